// Forward and backward of a linear layer, y[M, N] = x[M, K] @ w[N, K]^T + bias, each as one call:
// quantizer and GEMMs of sm90.h one after the other, with everything between them in two buffers.
#pragma once

#include "te_mx/sm90.h"

namespace te_mx::sm90 {

struct LinearShape {
  int64_t m, n, k;
  bool x_columns, w_columns;  // operands that backward needs: for dw, for dx
};

// Where an operand lies in a buffer, in bytes.
struct LinearRoom {
  int64_t codes, scales, end;
};

// That of an operand [rows, k] from `at` on.
LinearRoom linear_room(int64_t at, int64_t rows, int64_t k);

// Buffers are aligned to 256 bytes. `temp` is free when the call is enqueued.
struct LinearRooms {
  LinearRoom x_row, w_row;  // in the temp of forward
  LinearRoom x_col, w_col;  // in what forward saves for backward; no bytes if nobody needs them
  LinearRoom g_row, g_col;  // in the temp of backward
  int64_t sums;             // there too, behind them: room for partial sums of the bias gradient
  int64_t backward_bytes;
};

LinearRooms linear_rooms(const LinearShape& shape);

struct LinearFormat {
  ScaleRule rule;
  int spread;
  Format forward, backward;  // of x and w; of the gradient
};

struct LinearMatrix {
  const void* data;
  int64_t stride;  // elements between rows
  DType dtype;
};

struct LinearResult {
  void* data;  // compact; null if nobody needs it
  DType dtype;
};

struct LinearForward {
  LinearShape shape;
  LinearFormat format;
  LinearMatrix x, w;
  const void* bias;  // [N] or null
  DType bias_dtype;
  LinearResult y;
  uint8_t* temp;
  uint8_t* saved;
  void* stream;
};

struct LinearBackward {
  LinearShape shape;
  LinearFormat format;
  LinearMatrix g;  // [M, N]
  const uint8_t* saved;
  LinearResult dx, dw, db;  // dx only with w_columns, dw only with x_columns; one of them at least
  uint8_t* temp;
  void* stream;
};

Status linear_forward(const LinearForward& args);
Status linear_backward(const LinearBackward& args);

}  // namespace te_mx::sm90
