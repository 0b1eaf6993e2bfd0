// Steps that end in a quantizer without writing what they quantize: normalization, activation and
// the derivative of an activation.
//
// A value is computed in fp32, rounded to a dtype (that of z, of out) and quantized: the bytes are
// those of quantize() on the rounded matrix.
#pragma once

#include "te_mx/quantize.h"

namespace te_mx {

// Sums over a row are fp32 and run in kNormLanes lanes: lane l adds elements l, l + kNormLanes, ...
// in this order, then lane l adds lane l + d for d = kNormLanes/2, ..., 1.
inline constexpr int64_t kNormLanes = 256;

// mean = sum(x) / cols, rstd = 1 / sqrt(sum((x - mean)^2) / cols + eps), z = (x - mean) * rstd *
// weight + bias; with rms the mean is taken as 0. Dividing by cols is multiplying by `inverse`.
struct NormArgs {
  Matrix x;  // [rows, cols], elements of a row are adjacent
  bool rms = false;
  float eps = 0.0f, inverse = 0.0f;
  const void* weight = nullptr;     // [cols]
  const void* bias = nullptr;       // [cols] or null
  DType weight_dtype = DType::f32;  // of both; a CPU takes f32
  float* mean = nullptr;            // [rows]; null with rms
  float* rstd = nullptr;            // [rows]
  void* z = nullptr;                // [rows, cols] compact, or null
  DType z_dtype = DType::f32;
  QuantizeOut to;                // of z; without col_sum
  uint32_t* counters = nullptr;  // scratch of a GPU
  Execution execution;
};

// The same z, bit for bit, of few rows, and nothing else.
struct NormRowsArgs {
  Matrix x;  // [rows, cols], elements of a row are adjacent
  bool rms = false;
  bool zero_centered = false;  // weights stand for 1 + weight
  float eps = 0.0f, inverse = 0.0f;
  const void* weight = nullptr;  // [cols]
  const void* bias = nullptr;    // [cols] or null
  DType weight_dtype = DType::f32;
  void* z = nullptr;  // [rows, cols] compact
  DType z_dtype = DType::f32;
  Execution execution;
};

// With h = (x - mean) * rstd and v = dz * weight:
// dx = (v - (sum(v) / cols + h * (sum(v h) / cols))) * rstd; with rms without the first sum.
// dweight = sum of dz * h over the rows, dbias = sum of dz.
struct NormGradArgs {
  Matrix dz, x;  // [rows, cols], elements of a row are adjacent
  bool rms = false;
  float inverse = 0.0f;
  const void* weight = nullptr;
  DType weight_dtype = DType::f32;  // of weight, dweight and dbias; a CPU takes f32
  const float* mean = nullptr;      // null with rms
  const float* rstd = nullptr;
  void* dx = nullptr;  // [rows, cols] compact
  DType dx_dtype = DType::f32;
  void* dweight = nullptr;  // [cols]
  void* dbias = nullptr;    // [cols], or null
  // Scratch: partial sums of dweight and dbias; of a GPU sums of rows [rows, 2], and counters.
  float* partial = nullptr;
  float* row_sums = nullptr;
  uint32_t* counters = nullptr;
  Execution execution;
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

// Forward (grad without data): out = act(h), or act(h[:, :cols]) * h[:, cols:] when gated.
// Backward: out is the gradient of h from grad = gradient of that. The gate of clamped_silu is
// clamp(h, -limit, limit) + offset.
struct ActArgs {
  Matrix h;     // [rows, cols], or [rows, 2 cols] when gated
  Matrix grad;  // [rows, cols]
  Act act = Act::gelu;
  bool gated = false;
  float limit = 0.0f, alpha = 0.0f, offset = 0.0f;
  bool in_pairs = false;  // of a GPU, forward: column 2i is activated, column 2i + 1 is its gate
  void* out = nullptr;    // compact, or null
  DType out_dtype = DType::f32;
  QuantizeOut to;  // of out. A CPU: backward and gated only where blocks (32 or 128) divide cols
  Execution execution;
};

}  // namespace te_mx
