// How gemm() cuts a problem and lays out its workspace: the single formula behind
// workspace_bytes().
#pragma once

#include "gemm/gemm_internal.hpp"

namespace te_mx::cpu {

// Byte offsets into the workspace and the chunk sizes. Depends on shapes, on which operands are
// packed and on bias_grad_kind only.
struct GemmPlan {
  Decodes decodes;                      // the side that has no panels
  int64_t m_chunk, n_chunk;             // rows of lhs and rhs packed at a time
  int64_t bias_grad_partial;            // float[ceil(M/32)][N]
  int64_t turned_codes, turned_scales;  // rhs as [rows, k], when turns_rhs()
  int64_t lhs_exp, rhs_exp;             // float[rows up to 32]
  int64_t lhs_wide, rhs_wide;           // uint8[ceil(rows/32)]
  int64_t lhs_factor, rhs_factor;       // float[rows up to 32], of tensor scales
  int64_t lhs_panels, rhs_panels;
  int64_t scratch;  // of the family
  int64_t bytes;
};

bool is_stream(Kernel kernel);

// Stream kernels read rows of rhs: one that is stored [k, rows] is turned into the workspace.
bool turns_rhs(const GemmTask& args);
// Bytes for it: [rows, k], and behind it those of NVFP4 two a byte, as its streams read them.
int64_t turned_code_bytes(const StridedOperand& rhs);

GemmPlan plan_gemm(const GemmTask& args, const KernelImpl& impl);

}  // namespace te_mx::cpu
