// The call of a product of a few rows with weights that stand still, and what of shared memory goes
// where. Host code alone, for machines without a GPU too.
//
// Weights [n, k] are read as they lie for other kernels. Codes: rows of 8 bits that start multiples
// of 16 bytes apart, [n][ldw]. Scales: compact rows of them, or those of a packed operand
// (sm90_layout.h), whose codes are aligned. Their groups of 16 rows and quads of 128 k (four MX
// blocks) are what a warp multiplies at once.
//
// The kernel multiplies sums of blocks by their scales one after the other in fp32. So the scales
// of all blocks with other codes than zero are to lie in 2^-103 .. 2^88 (fp32 ones in 2^-60 ..
// 2^60), or be NaN, and no tile of a packed operand has class 3.
#pragma once

#include <cstdint>

#include "te_mx/fused.h"
#include "te_mx/sm90_split.h"
#include "te_mx/types.h"

namespace te_mx::sm90 {

inline constexpr int kDecodeRows = 16;      // of weights in a group
inline constexpr int kDecodeQuad = 128;     // of k
inline constexpr int kDecodeTile = 4;       // groups that a warpgroup multiplies at once
inline constexpr int kDecodeMostRows = 64;  // of x that a CTA meets at once
// Every CTA quantizes its slice of x, or a kernel before prepares all of it.
inline constexpr int kDecodeOwnRows = 8;  // at most, but of bf16 by CTAs of four warpgroups
inline constexpr int kDecodeMaxStages = 16;
inline constexpr int kDecodeMaxSteps = 32;  // quads of prepared x of a CTA that are on their way
// Barriers: of every warp's ring, of steps of all parts that are there and that were read, of sums.
constexpr int decode_bars(int warps) { return warps * kDecodeMaxStages + 2 * kDecodeMaxSteps + 1; }
constexpr int decode_bar_bytes(int warps) { return decode_bars(warps) * 8 + 16; }  // and the block
// CTAs of 16 warps have an SM alone where they have many rows. Otherwise two CTAs share it: those
// of a product and of the next, which loads its weights meanwhile.
constexpr bool decode_alone(int warps, int rows, bool prepared) {
  return warps == 16 && prepared && rows > 8;
}
constexpr int decode_smem(int warps, int rows, bool prepared) {
  return (decode_alone(warps, rows, prepared) ? 200 : 112) * 1024;
}
// Never three: CTAs of one product would gather on some SMs, those of the next on others.
inline constexpr int kDecodeLeastSmem = 76 * 1024;

// Codes of 16 rows over a quad, in shared memory.
inline constexpr int kDecodeQuadBytes = kDecodeRows * kDecodeQuad;
// Scales of a warp's group over chunks of four quads in shared memory: those that are read, those
// that are on their way, and the classes of their tiles.
inline constexpr int kDecodeChunk = 4;
inline constexpr int kDecodeChunkBytes = kDecodeChunk * kDecodeRows * 4;
inline constexpr int kDecodeScaleRing = 2 * kDecodeChunkBytes + 128;
constexpr int64_t decode_groups(int64_t n) { return (n + kDecodeRows - 1) / kDecodeRows; }
constexpr int64_t decode_quads(int64_t k) { return (k + kDecodeQuad - 1) / kDecodeQuad; }

// Bytes of a quad of x for `rows` rows, codes or fp16 numbers, and of its scales in fp32.
constexpr int decode_input_bytes(int rows, bool halves) {
  return rows * kDecodeQuad * (halves ? 2 : 1);
}
constexpr int decode_scale_bytes(int rows) { return rows * 4 * 4; }

// Quotients of numbers below 256 by one up to 256, without a division on the device:
// a / b is (a * quotient_factor(b)) >> 16.
constexpr int quotient_factor(int b) { return 65536 / b + 1; }

// What of shared memory goes where, for so many rows of x: depends on the split, and no result on
// it.
struct DecodeRoom {
  int stages = 0;                               // quads of every warp's ring of weights; 0: no room
  int input_quads = 0;                          // of x of every part that are there at once
  int scales_at = 0, sums_at = 0, ring_at = 0;  // x lies first, scales_at: its scales
  int w_scales_at = 0, bars_at = 0, bytes = 0;
};
DecodeRoom decode_room(const DecodeSplit& split, int64_t k, int rows, bool halves, bool prepared);

// Rows of a block, and how many blocks there may be: with groups (0: one matrix), a block has rows
// of one, or rows of none.
constexpr int decode_rows(int64_t m, int64_t groups) {
  const int64_t each = groups <= 1 ? m : 2 * ((m + groups - 1) / groups);
  return each <= 8 || m <= 8 ? 8 : each <= 16 ? 16 : each <= 32 ? 32 : kDecodeMostRows;
}
constexpr int64_t decode_blocks(int64_t m, int64_t groups, int rows) {
  const int64_t blocks = groups == 0 ? (m + rows - 1) / rows : groups + 1 + m / rows;
  return blocks < m ? blocks : m;
}

// Of one matrix of MXFP8 in tiles a CTA has 128 rows instead (decode/tiles_kernel.cuh), and x is
// aligned for a quad, in so many passes at most (decode/aligned_rows.cuh): bytes of a quad of x, of
// rows of a block.
inline constexpr int kMostPasses = 4;
constexpr int aligned_bytes(int rows) { return rows * (kDecodeQuad + 4); }
constexpr int wide_rows(int64_t m, int64_t groups = 0) {
  const int rows = decode_rows(m, groups);
  return rows < 16 ? 16 : rows;
}

// Of one matrix of blockwise FP8 in tiles, and of more rows than so many, a CTA has 128 rows and
// these of x (decode/factor_tiles.cuh).
inline constexpr int kFactorTilesFrom = 32;
constexpr int factor_tile_rows(int64_t m) { return m <= 64 ? 64 : 128; }

// out[m, n] = act(x[m, k] @ w[n, k]^T + bias). With groups, each of them has a w and a bias of its
// own, and rows of no group become 0. x are values, quantized on the way in to the bytes of
// quantize(), or of 16 bits as they are; or plain codes with their scales.
//
// Sums of a block of 32 (of 128 where scales are factors and of MXFP8 in tiles)
// come from the FP8 tensor cores, or from those of fp16 where `exact`, where x are values as they
// are, and where x has codes of E5M2.
struct DecodeArgs {
  int64_t m = 0, n = 0, k = 0;
  // Codes, aligned to 16 bytes, rows ldw bytes apart, and scales; of groups one behind the other.
  const uint8_t* w = nullptr;
  int64_t ldw = 0;
  const void* w_scales = nullptr;
  int32_t spread = 8;     // octaves that blocks of x may be apart where they are aligned; kByRows
  bool w_packed = false;  // for Hopper (sm90_layout.h); codes of 4 bits are E4M3 there
  Element w_element = Element::e4m3;  // or E2M1 where w_packed
  bool factors = false;               // scales are fp32 numbers for 128 of k, of both sides
  int64_t factor_rows = 1;            // rows of w that share theirs: 1 or 128
  const void* x = nullptr;            // [m, k], rows ldx elements apart
  int64_t ldx = 0;
  DType x_dtype = DType::bf16;
  bool x_as_is = false;
  const void* x_scales = nullptr;     // of codes, [m, ceil(k/32)] or [m, ceil(k/128)] fp32; null:
                                      // x are values
  Element x_element = Element::e4m3;  // E4M3 or E5M2
  // Where it is not null: x is x_act(x) * gate, rounded to x_dtype, of values of 16 bits that are
  // quantized; x_act is silu, quick_gelu or gelu, rows of both are whole vectors of 16 bytes.
  const void* gate = nullptr;  // [m, k], rows ldgate apart
  int64_t ldgate = 0;
  Act x_act = Act::silu;
  ScaleRule rule = ScaleRule::rceil;
  float amax_epsilon = 0.0f;  // of fp32 scales
  bool exact = false;
  void* out = nullptr;  // rows ldo apart
  int64_t ldo = 0;
  DType out_dtype = DType::bf16;
  const void* bias = nullptr;  // [n], [groups, n] or null
  DType bias_dtype = DType::bf16;
  Groups groups;  // of rows of x, one behind the other: no `starts`, no capacity
  bool activates = false;
  Act act = Act::relu;  // where it does; one that is not gated
  // kernel: a split, -1 for the one of decode_split().
  Execution execution;

  constexpr bool halves() const { return exact || x_as_is || x_element == Element::e5m2; }
};
// Whether CTAs of four warpgroups have up to 16 rows of x prepared before: half of k, mostly the
// slice of a CTA, is long. NOTE: no result depends on it.
bool decode_is_long(int64_t m, int64_t k);
// Workspace, aligned to 16 bytes: decode_workspace() of the same sizes.
Status decode(const DecodeArgs& args);
int64_t decode_workspace(int64_t m, int64_t k, int64_t groups);

}  // namespace te_mx::sm90
