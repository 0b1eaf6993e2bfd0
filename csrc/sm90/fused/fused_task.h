// What the kernels of fused steps are told of matrices.
#pragma once

#include "te_mx/fused.h"

namespace te_mx::sm90 {

struct Rows {
  const void* data;
  int64_t stride;  // elements between rows
};

inline Rows rows_of(const Matrix& m) { return {m.data, m.row_stride}; }

// activate() of rows in groups, to layouts of groups: each has blocks of its own. Without `out`;
// col_sum is [groups, cols].
Status activate_grouped(const ActArgs& args, const Groups& groups);

// dx, dweight and dbias from dz.
struct NormGradTask {
  Rows dz, x;
  int64_t rows, cols;
  DType dz_dtype, x_dtype, dx_dtype;
  bool rms;
  float inverse;
  const void* weight;
  DType weight_dtype;
  const float* mean;  // null with rms
  const float* rstd;
  void* dx;            // [rows, cols] compact
  void* dweight;       // [cols] of weight_dtype
  void* dbias;         // likewise, or null
  float* row_sums;     // [rows, 2], scratch
  float* partial;      // [norm_partial_sums(rows), 2, cols], scratch
  uint32_t* counters;  // norm_counters(rows)
  void* stream;
};

}  // namespace te_mx::sm90
