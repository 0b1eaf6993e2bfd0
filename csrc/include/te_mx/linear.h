// A linear layer, y[M, N] = x[M, K] @ w[N, K]^T + bias: forward and backward as one call each,
// quantizer and GEMMs one after the other, with everything between them in two buffers.
#pragma once

#include "te_mx/types.h"

namespace te_mx {

struct LinearArgs {
  int64_t m = 0, n = 0, k = 0;
  bool x_columns = false, w_columns = false;  // operands that backward needs: for dw, for dx
  // Of x and w, and of the gradient.
  Element forward = Element::e4m3, backward = Element::e4m3;
  Scaling scaling;
  ScaleRule rule = ScaleRule::rceil;
  int32_t spread = 0;
  Matrix x, w;                 // forward
  const void* bias = nullptr;  // [N] or null
  DType bias_dtype = DType::f32;
  void* y = nullptr;  // results are compact
  DType y_dtype = DType::f32;
  Matrix g;            // backward, [M, N]
  void* dx = nullptr;  // only with w_columns
  DType dx_dtype = DType::f32;
  void* dw = nullptr;  // only with x_columns
  DType dw_dtype = DType::f32;
  void* db = nullptr;
  DType db_dtype = DType::f32;
  uint8_t* saved = nullptr;  // what forward leaves for backward
  Execution execution;       // the workspace is free when the call is enqueued
};

}  // namespace te_mx
