// One matrix to quantize, as quantize.cpp sees it.
#pragma once

#include "quantize/quantize.hpp"
#include "te_mx/quantize.h"

namespace te_mx::cpu {

struct QuantizeTask {
  const void* x;  // [rows, cols]
  int64_t rows, cols;
  int64_t row_stride, col_stride;
  DType x_dtype;
  Element element;
  ScaleRule rule;
  uint8_t* row_codes;   // [rows, cols], or null
  uint8_t* row_scales;  // [rows, ceil(cols/32)]
  uint8_t* col_codes;   // [rows, cols], or [cols, rows] when col_transposed, or null
  uint8_t* col_scales;  // [ceil(rows/32), cols], or [cols, ceil(rows/32)]
  bool col_transposed;
  float* col_sum;     // [cols] sum of x over rows, or null
  float* col_sum_ws;  // [ceil(rows/kColSumRows), cols] partial sums, needed with col_sum
  int threads;
  int64_t together;  // bytes of codes of the whole call of which this is a part, or 0
  quantize_tile::Hadamard row_hadamard, col_hadamard;
  const int64_t* seed;  // of stochastic rounding, or null
  int64_t first;        // number of the first row
};

// Of a call that passed check_out().
QuantizeTask task_of(const QuantizeArgs& args);
Status quantize_task(const QuantizeTask& task);

}  // namespace te_mx::cpu
