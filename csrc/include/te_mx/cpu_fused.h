// Steps that end in a quantizer without writing what they quantize: normalization, activation and
// the derivative of an activation. Plain functions like those of cpu.h.
//
// A value is computed in fp32, rounded to a dtype (z_dtype, out_dtype) and quantized: the bytes are
// those of quantize() on the rounded matrix.
#pragma once

#include <cstdint>

#include "te_mx/cpu.h"

namespace te_mx {

// What to make of a matrix [rows, cols]; directions that are not wanted are null. Columnwise codes
// lie as the matrix does.
struct QuantizeOut {
  Format fmt;
  ScaleRule rule;
  uint8_t* row_codes;   // [rows, cols]
  uint8_t* row_scales;  // [rows, ceil(cols/32)]
  uint8_t* col_codes;   // [rows, cols]
  uint8_t* col_scales;  // [ceil(rows/32), cols]
  float* col_sum;       // [cols], sums of the rounded values
  float* col_sum_ws;    // [ceil(rows/kColSumRows), cols], needed with col_sum
};

// Sums over a row are fp32 and run in kNormLanes lanes: lane l adds elements l, l + kNormLanes, ...
// in this order, then lane l adds lane l + d for d = kNormLanes/2, ..., 1.
inline constexpr int64_t kNormLanes = 256;

// mean = sum(x) / cols, rstd = 1 / sqrt(sum((x - mean)^2) / cols + eps), z = (x - mean) * rstd *
// weight + bias; with rms the mean is taken as 0. Dividing by cols is multiplying by `inverse`.
struct NormArgs {
  const void* x;  // [rows, cols], rows row_stride apart
  int64_t rows, cols, row_stride;
  DType x_dtype;
  bool rms;
  float eps, inverse;
  const float* weight;  // [cols]
  const float* bias;    // [cols] or null
  float* mean;          // [rows]; null with rms
  float* rstd;          // [rows]
  void* z;              // [rows, cols] compact, or null
  DType z_dtype;
  QuantizeOut quantized;
  int threads;
};

// With h = (x - mean) * rstd and v = dz * weight:
// dx = (v - (sum(v) / cols + h * (sum(v h) / cols))) * rstd; with rms without the first sum.
// dweight = sum of dz * h over the rows, dbias = sum of dz.
struct NormGradArgs {
  const void* dz;  // [rows, cols] compact
  const void* x;   // [rows, cols], rows row_stride apart
  int64_t rows, cols, row_stride;
  DType dz_dtype, x_dtype;
  bool rms;
  float inverse;
  const float* weight;
  const float* mean;  // null with rms
  const float* rstd;
  void* dx;  // [rows, cols] compact
  DType dx_dtype;
  float* dweight;  // [cols]
  float* dbias;    // [cols] or null
  float* ws;       // [2, ceil(rows/kColSumRows), cols]
  int threads;
};

enum class Act : int32_t {
  gelu = 0,  // tanh form
  relu = 1,
  squared_relu = 2,
  silu = 3,
  quick_gelu = 4,  // x * sigmoid(1.702 x)
  sigmoid = 5,
  clamped_silu = 6,  // y = min(x, limit): y * sigmoid(alpha y); gated, see below
  gelu_erf = 7,
};

// Forward (grad null): out = act(h), or act(h[:, :cols]) * h[:, cols:] when gated. Backward: out is
// the gradient of h from grad = gradient of that. The gate of clamped_silu is clamp(h, -limit,
// limit) + offset.
struct ActArgs {
  const void* h;     // [rows, cols], or [rows, 2 cols] when gated, compact
  const void* grad;  // [rows, cols] compact, or null
  int64_t rows, cols;
  DType h_dtype, grad_dtype;
  Act act;
  bool gated;
  float limit, alpha, offset;
  void* out;  // compact, or null
  DType out_dtype;
  QuantizeOut quantized;  // of out. Backward and gated: only where 32 divides cols
  int threads;
};

Status normalize(const NormArgs& args);               // norm.cpp
Status normalize_backward(const NormGradArgs& args);  // norm.cpp
Status activate(const ActArgs& args);                 // activation.cpp

}  // namespace te_mx
