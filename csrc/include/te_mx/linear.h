// A linear layer, y[M, N] = x[M, K] @ w[N, K]^T + bias: forward and backward as one call each,
// quantizer and GEMMs one after the other.
#pragma once

#include "te_mx/quantize.h"

namespace te_mx {

struct LinearArgs {
  int64_t m = 0, n = 0, k = 0;
  bool x_columns = false, w_columns = false;  // operands that backward needs: for dw, for dx
  // Of x and w, and of the gradient.
  Element forward = Element::e4m3, backward = Element::e4m3;
  Scaling scaling, w_scaling;  // of x and the gradient, of w
  ScaleRule rule = ScaleRule::rceil;
  float amax_epsilon = 0;  // as of QuantizeOut
  int32_t spread = 0;
  Matrix x;  // forward
  Matrix w;  // forward, and backward where that makes its columns
  // Operands that outlive the call. x_row: of fprop. x_col: left by forward for dw, with x_columns.
  // w_col: left by forward for dx if w_kept; otherwise backward makes it, in the workspace.
  OperandOut x_row, x_col, w_col;  // layouts are those of the device
  bool x_given = false;            // those of x were made before
  bool w_kept = false;
  // Those of w were made before: w_row and, if w_kept, w_col. Without it forward makes w_row in the
  // workspace.
  bool w_given = false;
  OperandOut w_row;
  const void* bias = nullptr;  // [N] or null
  DType bias_dtype = DType::f32;
  void* y = nullptr;  // results are compact
  DType y_dtype = DType::f32;
  Matrix g;            // backward, [M, N]
  void* dx = nullptr;  // only with w_columns
  DType dx_dtype = DType::f32;
  bool dx_accumulate = false;  // add to dx
  // Only with x_columns. In its place backward may leave the columns of g, in a buffer of the
  // caller, for the product that linear_wgrad runs later.
  void* dw = nullptr;
  DType dw_dtype = DType::f32;
  bool dw_accumulate = false;  // add to dw
  OperandOut g_col;
  void* db = nullptr;
  DType db_dtype = DType::f32;
  Execution execution;  // the workspace is free when the call is enqueued
};

// Where an operand lies in a buffer, in bytes.
struct OperandOffsets {
  int64_t codes, scales, end;
};

// Where things lie in the buffers of a layer.
struct LinearOffsets {
  OperandOffsets x_row, x_col, w_col;  // each in a buffer of its own
  OperandOffsets g_kept;               // columns of g, likewise
  OperandOffsets w_row;                // in the workspace of forward
  // In that of backward; no bytes if nobody needs them.
  OperandOffsets g_row, g_col, w_again;
  int64_t sums;  // there too, behind them: of the bias gradient
  int64_t forward_bytes, backward_bytes;
};

}  // namespace te_mx
