// Steps that end in a quantizer on Hopper: normalization, activations and their derivatives. Plain
// functions like those of sm90.h; formulas and meaning as in cpu_fused.h.
//
// A value is computed in fp32, rounded to a dtype and quantized: the bytes are those of quantize()
// on the rounded matrix. `quantized` says what to make of it: x and x_stride of QuantizeArgs are
// not read, rows, cols and x_dtype are those of the rounded matrix.
#pragma once

#include <cstdint>

#include "te_mx/cpu_fused.h"
#include "te_mx/sm90.h"

namespace te_mx::sm90 {

struct Matrix {
  const void* data;
  int64_t stride;  // elements between rows
};

// z = norm(x), where x has z's dtype or is fp32.
struct NormQuantizeArgs {
  Matrix x;
  DType x_dtype;
  bool rms;
  float eps, inverse;
  const float* weight;  // [cols]
  const float* bias;    // [cols] or null
  float* mean;          // [rows], written; null with rms
  float* rstd;          // [rows], written
  void* z;              // [rows, cols] compact, or null
  uint32_t* ws;         // norm_ws_words(rows)
  QuantizeArgs quantized;
};

// Everything has the dtype of the result.
struct ActQuantizeArgs {
  Matrix h;     // [rows, cols], or [rows, 2 cols] when gated
  Matrix grad;  // [rows, cols], or null data: forward
  int64_t cols;
  Act act;
  bool gated;
  float limit, alpha, offset;
  void* out;               // [rows, quantized.cols] compact, or null
  QuantizeArgs quantized;  // of the result, which has 2 cols columns when gated and backward
};

// dx, dweight and dbias from dz. dz has x's dtype or one of 16 bits beside an fp32 x.
struct NormBackwardArgs {
  Matrix dz, x;
  int64_t rows, cols;
  DType dz_dtype, x_dtype, dx_dtype;
  bool rms;
  float inverse;
  const float* weight;
  const float* mean;  // null with rms
  const float* rstd;
  void* dx;         // [rows, cols] compact
  float* sums;      // [2, cols]: dweight, dbias
  float* row_sums;  // [rows, 2], scratch
  float* partial;   // [norm_partial_sums(rows), 2, cols], scratch
  uint32_t* ws;     // norm_ws_words(rows)
  void* stream;
};

// Scratch words of a normalization; they need no value.
constexpr int64_t norm_ws_words(int64_t rows) { return 1 + (rows + 127) / 128; }

// Parts in which dweight and dbias are summed, at most: tiles, or what norm_backward_strips.cu
// makes of the rows.
inline constexpr int64_t kStripsAtOnce = 384;  // CTAs, two or more for a part
constexpr int64_t norm_partial_sums(int64_t rows) {
  const int64_t longest = (rows + 63) / 64, shortest = (rows + 7) / 8, most = kStripsAtOnce / 2;
  const int64_t at_once = shortest < most ? shortest : most;
  return longest < at_once ? at_once : longest;
}

// Status::unsupported for types that do not go together.
Status norm_quantize(const NormQuantizeArgs& args);
Status norm_backward(const NormBackwardArgs& args);
Status act_quantize(const ActQuantizeArgs& args);

}  // namespace te_mx::sm90
