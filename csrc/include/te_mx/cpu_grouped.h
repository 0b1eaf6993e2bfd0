// Problems of several groups of rows (the tokens of the experts of a mixture) in one call: one
// parallel region for all groups. Every group gives the bits of a call of its own to cpu.h.
#pragma once

#include "te_mx/cpu.h"

namespace te_mx {

// Group i owns rows [starts[i], ends[i]) of a matrix: in order, disjoint, any of them empty. Rows
// may lie between groups and behind the last.
//
// Blocks of 32 rows start anew with every group, so a group's last block is its own. Scale rows of
// group i start at starts[i] / 32 + i, which leaves room for every tail; a matrix of `rows` rows
// has rows / 32 + count scale rows, and those that no block uses are 0.
struct Groups {
  int64_t count;
  const int64_t* starts;
  const int64_t* ends;
};

struct GroupedQuantizeArgs {
  // As quantize() of the whole matrix, except: col_scales [rows/32 + count, cols], col_sum
  // [count, cols], col_sum_ws [rows/kColSumRows + count, cols]; col_transposed is not supported.
  // Codes and scales of rows outside of groups are 0.
  QuantizeArgs all;
  Groups groups;
};

// Which kernels run the groups: `few_rows` those with at most kStreamMaxRows rows of lhs.
struct GroupedKernels {
  Kernel many_rows, few_rows;
};

struct GroupedGemmArgs {
  GroupedKernels kernels;
  Groups groups;
  // false: groups of rows: lhs [R, K] whose rows are grouped, rhs [count][N, K] one after another.
  // true: groups of k: lhs [M, R] and rhs [N, R] as quantize_grouped made them of columns.
  bool ragged_k;
  Operand lhs, rhs;
  int64_t packed_stride;  // bytes between the packed forms of two groups of rhs (for many_rows)
  // [R, N], rows outside of groups are zeroed unless accumulate; or, with ragged_k, [count, M, N].
  void* out;
  DType out_dtype;
  bool accumulate;
  const void* bias;  // [count, N] or null
  DType bias_dtype;
  void* workspace;  // 64-byte aligned
  int64_t workspace_bytes;
  int threads;
  uint32_t ran;  // out: bit i: Kernel i ran a group
};

// grouped.cpp
Status quantize_grouped(const GroupedQuantizeArgs& args);
// Independent problems, e.g. the weights of all groups. `threads` counts, not that of the args.
Status quantize_many(const QuantizeArgs* args, int64_t count, int threads);
// Operands [count][rows, k] one after another, as packed forms `stride` bytes apart.
Status pack_many(Kernel kernel, Role role, const Operand& first, int64_t count, void* packed,
                 int64_t stride, int threads);
int64_t workspace_bytes_grouped(const GroupedGemmArgs& args);
Status gemm_grouped(GroupedGemmArgs& args);

}  // namespace te_mx
