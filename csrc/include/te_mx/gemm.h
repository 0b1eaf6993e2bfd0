// GEMMs: D[M, N] = epilogue(lhs[M, K] @ rhs[N, K]^T). In BLAS letters lhs is B and rhs is A.
#pragma once

#include "te_mx/types.h"

namespace te_mx {

// In fp32, in this order: + bias; aux is stored; GELU, or times the derivative of GELU at gelu_in;
// bias gradient; + out if accumulate; rounding to the dtype of out.
struct Epilogue {
  void* out = nullptr;  // [M, N], rows ldo apart
  int64_t ldo = 0;
  DType out_dtype = DType::f32;
  bool accumulate = false;
  const void* bias = nullptr;  // [N], of groups [count, N]; or null
  DType bias_dtype = DType::f32;
  Gelu gelu = Gelu::none;  // forward GELU, or the form whose derivative multiplies with gelu_in
  void* aux = nullptr;     // [M, N] compact, or null
  DType aux_dtype = DType::f32;
  const void* gelu_in = nullptr;  // [M, N] compact, or null
  DType gelu_in_dtype = DType::f32;
  BiasGrad bias_grad_kind = BiasGrad::none;
  float* bias_grad = nullptr;  // [M] (operand) or [N] (result)
};

struct GemmArgs {
  Operand lhs, rhs;
  // Of a CPU: lhs as values instead of codes, k contiguous, for stream kernels; lhs has its sizes.
  // Of the epilogue with a bias alone.
  Matrix values;
  Epilogue epilogue;
  Execution execution;
};

// Groups of rows: lhs [R, K] whose rows are grouped, rhs [count][N, K] one after another, out [R,
// N]; rows of no group become 0 unless accumulate. Along K: lhs [M, R] and rhs [N, R], groups of K,
// out [count, M, N]. Sizes of lhs and rhs are those of all rows of lhs, and of one rhs.
struct GroupedGemmArgs {
  GemmArgs gemm;
  Groups groups;
  bool along_k = false;
  // Along K, in host memory: D of group i begins so many rows of ldo behind out, not at i * M.
  const int32_t* first_rows = nullptr;
};

}  // namespace te_mx
