// What gemm.cpp, the kernel families and the epilogues share.
//
// A packed operand is PackedHeader | float exponents[rows up to 32] | wide blocks | panels.
// gemm.cpp writes the header and the row exponents (they need only scales); a family writes and
// reads the panels. Everything is 64-byte aligned.
#pragma once

#include <cstdint>

#include "common/sizes.h"
#include "mxtile/mx/nibbles.hpp"
#include "te_mx/cpu.h"

namespace te_mx::cpu {

inline constexpr int64_t kRowBlock =
    32;  // rows of one epilogue call and of one bias-gradient partial
// Packed values are code * 2^(byte - E_row + 37). With rows of at most kWideSpread exponents every
// value lies in [2^-62, 2^53) and every product in [2^-124, 2^106): nothing to flush, and no
// overflow while K < 2^21.
inline constexpr int kRelativeExponent = 37;
inline constexpr int64_t kOverflowK = 1 << 21;
inline constexpr int64_t kSerialProducts = 256 * 1024;  // below, waking threads costs more than it
                                                        // saves

// One side of a problem as kernels read it: an Operand, or the part of one that a group owns.
struct StridedOperand {
  const uint8_t* codes;
  const uint8_t* scales;
  int64_t rows, k;
  int64_t code_row_stride, code_k_stride;  // one of the two is 1
  int64_t scale_row_stride, scale_block_stride;
  Element element;
  const void* packed;    // from pack() for the same kernel and role, or null
  bool nibbles = false;  // codes of 4 bits lie two a byte along k; rows count bytes then

  // Blockwise: the scales as stored, fp32, one for block_rows x 128; null for MX. Kernels do not
  // read them: split_scales() makes what they read. Its parts are those of `scales`, and
  const float* stored = nullptr;
  int64_t stored_row_stride = 0, stored_block_stride = 0;  // of blocks, in floats
  int64_t block_rows = 1;
  // factors[k / 128 * factor_stride + row]: what a scale is beside its power of two. Null: 1.
  const float* factors = nullptr;
  int64_t factor_stride = 0;

  Matrix values = {};  // of lhs without codes (values.hpp)

  // NVFP4: the scales are E4M3, one for block_rows x 16, and these are the tensor scales, a row (or
  // none) apart. Values are code * scale; a tensor scale is a power of two, which is the exponent
  // of its rows, times a factor that the epilogue multiplies.
  bool e4m3 = false;
  const float* whole = nullptr;
  int64_t whole_row_stride = 0, whole_group_stride = 0;

  bool as_values() const { return values.data != nullptr; }
  bool blockwise() const { return stored != nullptr; }
  int64_t block_k() const { return blockwise() ? kWideBlock : e4m3 ? kSmallBlock : kBlock; }
  // Scale bytes of a row; of NVFP4 that of its block of 16 of that number.
  const uint8_t* scales_of(int64_t row) const {
    return scales + (e4m3 ? row / block_rows : row) * scale_row_stride;
  }
  const uint8_t* small_scale(int64_t row, int64_t block) const {
    return scales_of(row) + block * scale_block_stride;
  }
  int64_t code_bytes() const { return nibbles ? rows * code_row_stride : rows * k; }  // of all

  // The byte of a code; with nibbles k is even.
  const uint8_t* at(int64_t row, int64_t k0) const {
    return codes + row * code_row_stride + (nibbles ? k0 / 2 : k0 * code_k_stride);
  }
  uint8_t code(int64_t row, int64_t k0) const {
    return nibbles ? *at(row, k0) >> (k0 % 2 * 4) & 0x0F : *at(row, k0);
  }
};

// Rows [begin, end) of codes and scale bytes; begin is a multiple of 32, or blocks are of one row.
static inline StridedOperand part_of_rows(const StridedOperand& all, int64_t begin, int64_t end) {
  StridedOperand part = all;
  part.codes += begin * all.code_row_stride;
  part.scales = all.scales_of(begin);
  part.whole += begin * all.whole_row_stride;
  part.rows = end - begin;
  return part;
}

// Codes [k0, k0 + n) of a row whose k is contiguous, one a byte, n <= kMost and k0 even: where they
// lie, or unpacked to room.
template <int kMost>
[[gnu::always_inline]] static inline const uint8_t* codes_of(const StridedOperand& o, int64_t row,
                                                             int64_t k0, int64_t n, uint8_t* room) {
  const uint8_t* from = o.at(row, k0);
  if (!o.nibbles) return from;
  if (n == kMost) {
    mxtile::mx::unpack_nibbles<kMost / 2>(from, room);
  } else {
    for (int64_t i = 0; i < n; ++i) room[i] = from[i / 2] >> (i % 2 * 4) & 0x0F;
  }
  return room;
}

// A plain operand whose codes and scales are compact; of a scaling that is none of ours, whatever.
static inline StridedOperand strided(const Operand& o) {
  const bool k_first = o.layout == Layout::k_first, blockwise = is_blockwise(o.scaling);
  const bool e4m3 = is_nvfp4(o.scaling);
  const int64_t blocks = ceil_div(o.k, blockwise ? kWideBlock : e4m3 ? kSmallBlock : kBlock);
  const int64_t block_rows = blockwise || e4m3 ? ceil_div(o.rows, o.scaling.block_rows) : o.rows;
  const bool nibbles = is_fp4(o.element) && !k_first;
  StridedOperand s{o.codes,
                   nullptr,
                   o.rows,
                   o.k,
                   k_first   ? 1
                   : nibbles ? ceil_div(o.k, 2)
                             : o.k,
                   k_first ? o.rows : 1,
                   k_first ? 1 : blocks,
                   k_first ? block_rows : 1,
                   o.element,
                   o.packed,
                   nibbles};
  if (blockwise) {
    s.stored = static_cast<const float*>(o.scales);
    s.stored_row_stride = s.scale_row_stride;
    s.stored_block_stride = s.scale_block_stride;
    s.block_rows = o.scaling.block_rows;
  } else {
    s.scales = static_cast<const uint8_t*>(o.scales);
  }
  if (e4m3) {
    s.e4m3 = true;
    s.block_rows = o.scaling.block_rows;
    s.whole = o.tensor_scale;
    s.whole_row_stride = o.tensor_scales == TensorScale::rows ? 1 : 0;
    s.whole_group_stride = o.tensor_scales == TensorScale::groups ? 1 : 0;
  }
  return s;
}

// One problem as kernels see it.
struct GemmTask : Epilogue {
  Kernel kernel;
  StridedOperand lhs, rhs;
  void* workspace;  // 64-byte aligned
  int64_t workspace_bytes;
  int threads;
  bool invariant;    // the bits of a row of D depend on no other row of lhs
  int64_t together;  // bytes of results of the whole call of which this is a part, or 0
  Kernel ran;        // out, as for gemm()
};

// gemm_entry.cpp: the task of a call.
GemmTask task_of(const GemmArgs& args);

// gemm.cpp: what the entry points do, for parts of a call too.
int64_t workspace_bytes(const GemmTask& task);
Status run_task(GemmTask& task);
Status pack_operand(Kernel kernel, Role role, const StridedOperand& operand, void* packed,
                    int threads);

struct PackedHeader {
  int64_t rows, k;
  int32_t kernel, role;
  int32_t wide;  // some row spans more than kWideSpread exponents: its block runs on wide_f64
  int16_t element;
  int16_t factors;           // whether the split scales hold factors
  int64_t exponents_offset;  // bytes from the header; E_row - 127 - 37 as float, 0 for rows past
                             // the end
  int64_t panels_offset;     // bytes from the header
  int64_t wide_offset;       // bytes from the header; uint8 for every 32 rows, 1: holds a wide row
  int64_t split_offset;      // bytes from the header; of blockwise FP8 its SplitScales, else 0
};
static_assert(sizeof(PackedHeader) == 64);

// split_scales.cpp: fp32 scales as kernels read them. A scale is 2^(byte - 127) times a factor in
// [1, 2): the power of two goes into the packed values as that of an MX block does, and the factor
// of both sides multiplies the fp32 sum of a block of 128. Scales that are powers of two leave no
// factors, and a product of such operands runs as MX does.
//
// Below 2^-127 the factor is less than 1, a zero has the factor 0, NaN has byte 255. A scale whose
// codes are all zero does not widen its row.
struct SplitScales {
  int64_t bytes;    // [rows, ceil(k/32)], or [ceil(k/32), rows] where codes lie by k; then
  int64_t factors;  // float[ceil(k/128)][rows up to 32]
  int64_t all;
  SplitScales(int64_t rows, int64_t k)
      : bytes(round_up(rows * ceil_div(k, kBlock), 64)),
        factors(round_up(rows, kRowBlock) * ceil_div(k, kWideBlock) * 4),
        all(bytes + round_up(factors, 64)) {}
};
// The operand with scales (and factors, if there are any, or `always`) in `buffer` of
// SplitScales::all bytes.
StridedOperand split_scales(const StridedOperand& operand, void* buffer, int threads,
                            bool always = false);
// The operand with scales that were split before.
StridedOperand with_split(const StridedOperand& operand, const void* buffer, bool factors);

// The largest scale byte (not 255) that a row exponent stands for.
static inline int row_byte(float exponent) {
  return static_cast<int>(exponent) + 127 + kRelativeExponent;
}

// acc[rows][ld] holds the fp32 sums of D[m0.., n0..] before the row exponents.
// out, aux, gelu_in, bias and bias_grad_partial are indexed by m0 and n0 through args.
struct EpilogueContext {
  const GemmTask* args;
  const float* lhs_exp;      // [M]: D = acc * 2^(lhs_exp[m] + rhs_exp[n]); integers as float
  const float* rhs_exp;      // [N]
  const float* lhs_factor;   // [M] and
  const float* rhs_factor;   // [N up to 32]: what D is multiplied by beside, or both null
  float* bias_grad_partial;  // [ceil(M/32)][N], or null unless bias_grad_kind is result
  bool past_caches;          // out is large and its rows are whole cache lines
  bool aux_past_caches;      // so is aux
  bool exact_scale;          // acc is already scaled (wide_f64): both exponents are null
};

// m0 is a multiple of 32 and rows covers its whole 32-row block (rows = min(32, M - m0)), so one
// call owns the bias-gradient partials [m0/32][n0 .. n0+cols). cols is 1..64 and n0 is a multiple
// of 16. acc is 64-byte aligned and ld is a multiple of 16; acc columns past cols up to the next 16
// may be read, never trusted.
using EpilogueFn = void (*)(const EpilogueContext& context, const float* acc, int64_t ld,
                            int64_t m0, int64_t n0, int rows, int cols);
EpilogueFn epilogue_for(Isa isa);

// The part of D that one run() makes. gemm.cpp cuts large problems so that packed operands stay in
// cache: panels given to run() start at row m0 of lhs and row n0 of rhs; m0 and n0 are multiples
// of 32. Everything else (args, context, exponents, out) is that of the whole problem and is
// indexed from 0.
struct Range {
  int64_t m0, m1, n0, n1;
};

// The side that run() decodes itself, a little at a time, instead of reading its panels.
enum class Decodes : int32_t { none, lhs, rhs };

// One kernel family: all entry points of one Kernel value. M, N and K are > 0 in every call.
struct KernelImpl {
  // Bytes of the panels (multiple of 64), 0 when the kernel reads plain codes.
  int64_t (*panel_bytes)(Role role, int64_t rows, int64_t k);
  // Fills panels with values relative to the row exponents (see kRelativeExponent). operand and
  // exponents are those of the chunk. Null when both sides are plain.
  Status (*pack_panels)(Role role, const StridedOperand& operand, const float* exponents,
                        void* panels, int threads);
  // Scratch of run() beyond panels, exponents and bias-gradient partials. Null: none.
  int64_t (*workspace_bytes)(const GemmTask& args);
  // Computes D[m0..m1, n0..n1] (panels null on the side that is decoded) with context.args->threads
  // threads.
  Status (*run)(const Range& range, const void* lhs_panels, const void* rhs_panels,
                const EpilogueContext& context, void* workspace);
  // out[m] = sum over k of the dequantized lhs row m, fp32, in a fixed order. lhs, its panels,
  // exponents and out are those of the chunk. wide_f64 reads the codes (panels and exponents are
  // null).
  void (*row_sums)(const StridedOperand& lhs, const void* lhs_panels, const float* lhs_exp,
                   float* out, int threads);
  // Which side run() had better decode. Depends on what workspace_bytes() may depend on. Null:
  // none.
  Decodes (*decodes)(const GemmTask& args) = nullptr;
  // As pack_panels, of panels that nobody keeps: writes what run() and row_sums() read, perhaps not
  // all padding. Null: pack_panels.
  Status (*pack_read)(Role role, const StridedOperand& operand, const float* exponents,
                      void* panels, int threads) = nullptr;
};

const KernelImpl* kernel_impl(Kernel kernel);  // gemm.cpp's table; null when not built

// The families. Each returns null when this build lacks it.
const KernelImpl* wide_f64_impl();      // gemm_wide.cpp
const KernelImpl* portable_f32_impl();  // gemm_f32*.cpp
const KernelImpl* avx2_f32_impl();
const KernelImpl* avx512_f32_impl();
const KernelImpl* portable_stream_impl();  // stream_f32*.cpp
const KernelImpl* avx2_stream_impl();
const KernelImpl* avx512_stream_impl();
const KernelImpl* avx512_bf16_impl();   // gemm_bf16*.cpp
const KernelImpl* amx_bf16_impl();      // real tiles
const KernelImpl* amx_emulated_impl();  // software tiles, chosen when isa_current() is amx_emulated
const KernelImpl* avx512_bf16_stream_impl();  // stream_bf16*.cpp
const KernelImpl* amx_stream_impl();
const KernelImpl* amx_emulated_stream_impl();

// row_exponents.cpp (shared). Writes exponents[rows up to 32] and wide_blocks[ceil(rows/32)]; true
// when any block holds a wide row.
bool scan_row_exponents(const StridedOperand& operand, float* exponents, uint8_t* wide_blocks,
                        int threads);
// The factors beside them, [rows up to 32]: 1 but for NVFP4.
void row_factors(const StridedOperand& operand, float* factors);
// Whether it is this row; of codes.
bool row_is_wide(const StridedOperand& operand, int64_t row);

}  // namespace te_mx::cpu
