// The Hopper backend (sm_90a) as plain functions: device pointers, sizes and a stream in, a status
// out. Calls are asynchronous, allocate nothing, never throw and know no torch.
// D[M, N] = epilogue(lhs[M, K] @ rhs[N, K]^T).
//
// Packed operands, what the GEMM reads. An operand [rows, K] is cut into tiles of 128 rows x 128 K.
// A tile has four blocks of 32 a row; a block counts when its scale byte is not 255 and it has a
// nonzero code. e is a block's scale byte, E the largest e of the counting blocks of the tile (127
// without any), S the allowed spread (0..8).
//
//   class 0, tile-shared   every e >= E - S: codes times 2^(e - E), rounded to nearest even;
//                          one exponent E
//   class 1, row-shared    the same inside each row's group of four: one exponent a row (E for a
//                          row without blocks)
//   class 2, spread        codes untouched, four exponents a row; all e >= 1
//   class 3, far           the same, for tiles with an e of 0, or any tile with E > 190: careful
//                          arithmetic
//
// Blocks of zeros keep their codes and never count. Blocks of scale 255 become code 0x7F and never
// count.
//
//   codes    uint8 [rows, ld], ld = K rounded up to 16; bytes at and after K hold anything and are
//            not read
//   scales   uint32 [ceil(K/128)][tiles][132], tiles = ceil(rows/128) rounded up to even: what one
//            tile needs lies together and arrives with its codes. Word r < 128 is row r of the
//            tile. class 0, 1: the fp32 number 2^(E - 127); class 2, 3: four scale bytes, the first
//            block lowest, 0 for blocks of zeros and missing blocks, 255 for NaN. Word 128: the
//            class. Word 129: E. Words 130, 131: 0. Rows past the end have no blocks.
#pragma once

#include <cstdint>

#include "te_mx/cpu.h"

namespace te_mx::sm90 {

inline constexpr int64_t kTile = 128;
inline constexpr int64_t kScaleWords = 132;  // of one tile
inline constexpr int kFarExponent = 190;
inline constexpr int kMaxSpread = 8;

struct Packed {
  uint8_t* codes;    // [rows, packed_ld(k)]
  uint32_t* scales;  // packed_scale_words(rows, k)
};

constexpr int64_t packed_ld(int64_t k) { return (k + 15) / 16 * 16; }
constexpr int64_t packed_tiles(int64_t rows) { return (rows + 2 * kTile - 1) / (2 * kTile) * 2; }
constexpr int64_t packed_scale_words(int64_t rows, int64_t k) {
  return (k + kTile - 1) / kTile * packed_tiles(rows) * kScaleWords;
}

struct QuantizeArgs {
  const void* x;  // [rows, cols], rows x_stride elements apart
  int64_t rows, cols, x_stride;
  DType x_dtype;
  Format fmt;
  ScaleRule rule;
  // Plain MX, either may be null: codes [rows, cols] and scales [rows, ceil(cols/32)];
  uint8_t* row_codes;
  uint8_t* row_scales;
  uint8_t* col_codes;  // transposed: codes [cols, rows], scales [cols, ceil(rows/32)]
  uint8_t* col_scales;
  bool col_lies_as_x;  // not transposed: codes [rows, cols], scales [ceil(rows/32), cols]
  // Packed, either may be null (then its plain twin must be null too: a direction has one form)
  Packed row_packed;  // operand [rows, K = cols]
  Packed col_packed;  // operand [cols, K = rows]
  int spread;
  void* col_sum;  // [cols] sum of x over rows, or null
  DType col_sum_dtype;
  float* col_sum_ws;  // [ceil(rows/128), cols], needed with col_sum
  void* stream;
};

struct PackArgs {
  const uint8_t* codes;   // [rows, k], or [k, rows] when k_first; compact
  const uint8_t* scales;  // [rows, ceil(k/32)], or [ceil(k/32), rows]; compact
  int64_t rows, k;
  bool k_first;
  Format fmt;
  int spread;
  Packed out;
  void* stream;
};

struct DequantizeArgs {
  const uint8_t* codes;   // [rows, cols] compact
  const uint8_t* scales;  // [rows, ceil(cols/32)], or [ceil(rows/32), cols] when blocks_along_rows
  int64_t rows, cols;
  bool blocks_along_rows;
  Format fmt;
  DType out_dtype;
  void* out;  // [rows, cols] compact
  void* stream;
};

// out[row] = sum over k of the values of an operand [rows, k], in an order that only the sizes
// decide.
struct RowSumsArgs {
  const uint8_t* codes;   // [rows, k], or [k, rows] when k_first; compact
  const uint8_t* scales;  // [rows, ceil(k/32)], or [ceil(k/32), rows]; compact
  int64_t rows, k;
  bool k_first;
  Format fmt;
  float* out;        // [rows]
  float* workspace;  // row_sums_workspace_bytes(rows, k, k_first)
  void* stream;
};

struct GemmArgs {
  Packed lhs, rhs;
  Format lhs_fmt, rhs_fmt;
  int64_t m, n, k;
  void* out;  // [M, N], rows ldo apart
  DType out_dtype;
  int64_t ldo;
  bool accumulate;
  const void* bias;  // [N] or null
  DType bias_dtype;
  Gelu gelu;  // forward GELU, or the form whose derivative multiplies when gelu_in is set
  void* aux;  // [M, N] compact, written before GELU, or null
  DType aux_dtype;
  const void* gelu_in;  // [M, N] compact, or null; not with aux
  DType gelu_in_dtype;
  // [N] column sums of the result, or null: rounded to 16 bits first where gelu_in has the dtype of
  // out and both have whole 16 bytes a row
  float* bias_grad;
  void* workspace;  // 16-byte aligned
  int64_t workspace_bytes;
  int config;  // -1: chosen by the cost model; else an index below config_count()
  int parts;   // of K, at most one for every 128, added up in order; 0 or 1: K in one piece
  void* stream;
};

Status quantize(const QuantizeArgs& args);
// Two matrices that do not depend on each other, at the same time where the GPU has room for both.
// On the same stream; the first without col_sum.
Status quantize_two(const QuantizeArgs& first, const QuantizeArgs& second);
Status pack(const PackArgs& args);
Status dequantize(const DequantizeArgs& args);
int64_t row_sums_workspace_bytes(int64_t rows, int64_t k, bool k_first);
Status row_sums(const RowSumsArgs& args);

int64_t workspace_bytes(const GemmArgs& args);
Status gemm(const GemmArgs& args);
int config_count();
bool config_full(int config);  // else without GELU, aux and bias gradient
int chosen_config(const GemmArgs& args);
const char* config_name(int config);

// The current device is a Hopper GPU with a driver that encodes tensor maps.
bool available();

}  // namespace te_mx::sm90
