// NVFP4 weights that stand still for products with inputs that are not quantized, and the call.
// Host code alone, for machines without a GPU too.
//
// Weights [n, k] lie in blocks of 64 rows x 128 of k, [n / 64][k / 128], which are four quads of 16
// rows: 0.5625 bytes a weight. n is filled up to 64, k to 128, with zeros.
//   codes   1,024 bytes a quad: words [2][32 lanes][4]. Lane 4g + t of word 4h + i has the eight
//           codes of the 16 of k from 16 (4h + i) on that are its part of operand A of a product of
//           16-bit numbers: pairs p = 0 .. 3 of row g + 8 (p % 2), k 2t + 8 (p / 2) and the one
//           after it. Of a pair, the second code lies 16 bits above the first, in pair 3 below it.
//           Bits of a code (sign, then the other three): 15, 8:6 of pair 0; 12, 5:3 of pair 1;
//           9, 2:0 of pair 2; 13, 11:10 and 14 of pair 3.
//   scales  128 bytes a quad, in an array of their own: words [8 rows g][4], word i has bytes of
//           row g, block 2i; row g + 8, block 2i; row g, block 2i + 1; row g + 8, block 2i + 1.
//           A byte 8e + m that is not zero is (1 + m / 8) * 2^(e - 22), 255 is NaN: what is
//           subnormal in E4M3 is normal here.
//
// MXFP4 lies alike, 0.53125 bytes a weight, with scales of 64 bytes a quad: words [8 rows g][2],
// word i has bytes of row g, block 2i; row g + 8, block 2i; row g, block 2i + 1; row g + 8, block
// 2i + 1. A byte is that of E8M0 + kMxfp4Bias, so that it is the exponent of a bf16 number: weights
// with codes other than zeros in blocks of scales beyond 2^kMxfp4Least .. 2^kMxfp4Most, or with
// NaN, do not lie so.
#pragma once

#include <cstdint>

#include "te_mx/fused.h"
#include "te_mx/quantize.h"
#include "te_mx/types.h"

namespace te_mx::sm90 {

inline constexpr int kNvfp4Rows = 64;   // of weights, that a warpgroup multiplies at once
inline constexpr int kNvfp4Quad = 128;  // of k
inline constexpr int kNvfp4Codes = 1024, kNvfp4Scales = 128;  // bytes of a quad
inline constexpr int kMxfp4Scales = 64;
// Rows of x times quads of a CTA's part that it quantizes by itself: more of them before.
inline constexpr int kNvfp4OwnQuads = 72;
inline constexpr int kMxfp4Bias = 119, kMxfp4Least = -125, kMxfp4Most = 8;
inline constexpr int kNvfp4Block = 4 * (kNvfp4Codes + kNvfp4Scales);
constexpr int64_t nvfp4_blocks(int64_t n, int64_t k) {
  return (n + kNvfp4Rows - 1) / kNvfp4Rows * ((k + kNvfp4Quad - 1) / kNvfp4Quad);
}

// out[m, n] = act(scale * (x[m, k] @ (codes * block scales)[n, k]^T) + bias): products are exact,
// sums fp32. With groups, each of them has weights, a scale and a bias of its own, one behind the
// other, and rows of no group become 0.
//
// mx: weights are MXFP4. quantizes: x is multiplied as the bf16 values of its MXFP8 codes.
struct Nvfp4Args {
  int64_t m = 0, n = 0, k = 0;
  const uint8_t* w = nullptr;  // codes, nvfp4_blocks(n, k) a matrix
  const uint8_t* w_scales = nullptr;
  const float* scale = nullptr;  // of the tensor, of every matrix; of values: null is 1
  bool scale_rows = false;       // or of each of its rows
  bool square = false;           // of plain codes: blocks are 16 x 16
  bool k_first = false;          // likewise: they lie [k, n], one a byte, and so do scales and out
  const void* x = nullptr;       // [m, k], rows ldx elements apart, a multiple of 8
  int64_t ldx = 0;
  DType x_dtype = DType::bf16;  // or fp16, as it is with NVFP4 alone; fp32 where it is quantized
  bool mx = false;
  bool quantizes = false;
  Element x_element = Element::e4m3;  // or E5M2
  ScaleRule rule = ScaleRule::rceil;
  // Of x that is quantized, of 16 bits: it is x_act(x) * gate, rounded to x_dtype (sm90_decode.h).
  const void* gate = nullptr;  // [m, k], rows ldgate apart
  int64_t ldgate = 0;
  Act x_act = Act::silu;
  // Likewise: row r is row places[r] of the x_rows of x; rows of no group may have any number
  // there.
  const int32_t* places = nullptr;  // [m] or null
  int64_t x_rows = 0;
  // In place of ends of groups: row r, which is row r / each of x, has the weights of group
  // experts[r], and becomes 0 where there is none. stands: written before the kernel before this
  // one began.
  const int32_t* experts = nullptr;  // [m] or null
  int64_t each = 1;
  bool stands = false;
  void* out = nullptr;  // rows ldo apart
  int64_t ldo = 0;
  DType out_dtype = DType::bf16;
  const void* bias = nullptr;  // [n], [groups, n] or null
  DType bias_dtype = DType::bf16;
  Groups groups;  // of rows of x, one behind the other: no `starts`, no capacity
  bool activates = false;
  Act act = Act::relu;  // where it does; one that is not gated
  Execution execution;  // kernel: the CTAs of a cluster, whose halves have parts of k up to 64
                        // rows, and 16 times 1 + a number of kNvfp4Shapes, where rows of bf16 have
                        // blocks so large; -1, or 0 of either: what sm90_split.h says
};
// w, w_scales and x are aligned to 16 bytes, x that is quantized to its elements. Workspace of what
// is quantized, aligned to 16 bytes: nvfp4_workspace() of the same sizes.
Status nvfp4_product(const Nvfp4Args& args);
constexpr int64_t nvfp4_workspace(int64_t m, int64_t k) { return m * ((k + 7) / 8 * 8) * 2; }

// MXFP4 to tiles (sm90_layout.h): one matrix, or of groups those with rows, behind each other. The
// operand may be some of the `rows` of each, whole 128 of them, and then begins with the first.
Status unpack_stacked(const PackArgs& args, int64_t rows);

// What a weight stands for: out [n, k], compact, bf16 or fp16, is codes * block scales, which are
// exact, times `scale` in fp32, rounded. Without x; one matrix; out is aligned to 16 bytes.
Status nvfp4_to_values(const Nvfp4Args& args);

// One direction of a quantizer, [rows, k]; not wanted without codes.
struct Nvfp4Side {
  uint8_t* codes = nullptr;   // [rows, ceil(k / 2)]
  uint8_t* scales = nullptr;  // [rows, ceil(k / 16)]; null: in place of codes what they are times
                              // block scales, exactly, in bf16, as x lies
  bool k_first = false;     // of columns: codes [k, rows], one a byte, scales [ceil(k / 16), rows]
  float* scale = nullptr;   // of the tensor
  bool scale_rows = false;  // or of each row
  bool transforms = false;  // whole chunks of 16, with bit k mod 32 of the signs
  bool by_32 = false;       // or of 32
  int64_t signs = 0;
  // Where the product of this tensor scale and another one goes, with 0 and 1 behind it, which are
  // what Nvfp4MultiplyArgs::factors reads; null: nowhere. Of one matrix, with one scale.
  float* factors = nullptr;
  const float* times = nullptr;
};

// Whether two scales are tried for every block, and by what the better one misses less.
enum class Nvfp4Tries : int32_t { none, magnitudes, squares };

// x [rows, cols] to plain NVFP4 by the rules of Transformer Engine: rows, and columns as rows of
// their own, two codes a byte; from one read, after another for the largest magnitudes.
struct Nvfp4QuantizeArgs {
  Matrix x;
  Nvfp4Side row, col;
  bool square = false;            // blocks are 16 x 16: [ceil(rows / 16), ..] scales
  const int64_t* seed = nullptr;  // of stochastic rounding, as in QuantizeOut
  int64_t first = 0;
  Nvfp4Tries tries = Nvfp4Tries::none;
  bool narrow = false;       // where the largest block scale is 256
  uint32_t* amax = nullptr;  // scratch: a word for every tensor scale of a row, and of a column
  // Of rows of x: blocks, transforms and tensor scales are those of each alone, [count], 1 of one
  // without rows. Columns lie as x does, those of codes as in layout "grouped_cols"; what belongs
  // to no group is 0.
  Groups groups;
  Execution execution;
};
Status nvfp4_quantize(const Nvfp4QuantizeArgs& args);
// Two matrices side by side, no groups: `times` of each may be a scale of the other. Words of amax
// that lie behind those of the first are cleared with them.
Status nvfp4_quantize_two(const Nvfp4QuantizeArgs& first, const Nvfp4QuantizeArgs& second);
// The same of matrices [rows, cols] at these addresses, whose results lie behind each other.
// Columns lie as the matrices do; nothing is rounded stochastically.
Status nvfp4_quantize_stacked(const Nvfp4QuantizeArgs& args, const void* const* xs, int64_t count);

// out[m, n] = (of_lhs * of_rhs) * sums + bias + out, in this order and in fp32, rounded: the end of
// a product of what tensor scales multiply. Compact; `out` is added where that is asked for.
struct Nvfp4FinishArgs {
  int64_t m = 0, n = 0;
  const float* sums = nullptr;
  const float* of_lhs = nullptr;  // of the tensor, or [m]; null: 1
  const float* of_rhs = nullptr;  // likewise, [n]
  bool lhs_rows = false, rhs_rows = false;
  const void* bias = nullptr;  // [n] or null
  DType bias_dtype = DType::bf16;
  void* out = nullptr;
  DType out_dtype = DType::bf16;
  bool accumulate = false;
  Execution execution;
};
Status nvfp4_finish(const Nvfp4FinishArgs& args);

// out[m, n] = (of_lhs * of_rhs) * (lhs @ rhs^T) + bias + out, in fp32, rounded once: a product of
// bf16 values by cublasLt, where the process has it. `out` is bf16 or fp32, a bias bf16 as it is;
// every row of whole 16 bytes. `out` is added where that is asked for.
struct Nvfp4MultiplyArgs {
  int64_t m = 0, n = 0, k = 0;
  const void* lhs = nullptr;  // [m, k], or [k, m]
  const void* rhs = nullptr;  // [n, k], or [k, n]
  bool lhs_k_first = false, rhs_k_first = false;
  const float* of_lhs = nullptr;  // of the tensor; null: 1
  const float* of_rhs = nullptr;
  const float* factors = nullptr;  // their product, 0 and 1, where a quantizer wrote them
  const void* bias = nullptr;      // [n] or null
  DType bias_dtype = DType::bf16;
  void* out = nullptr;  // rows ldo apart
  int64_t ldo = 0;
  DType out_dtype = DType::bf16;
  bool accumulate = false;
  Execution execution;
};
int64_t nvfp4_multiply_workspace();
Status nvfp4_multiply(const Nvfp4MultiplyArgs& args);
// Whether it would run, of any addresses that start at whole 16 bytes; nothing does.
Status nvfp4_multiplies(const Nvfp4MultiplyArgs& args);

// What plain codes stand for: out [n, k] (or [k, n]), compact, is codes * block scales, times
// `scale` in fp32 where that is not null, rounded. Without x and groups; any dtype.
Status nvfp4_from_rows(const Nvfp4Args& args);

}  // namespace te_mx::sm90
