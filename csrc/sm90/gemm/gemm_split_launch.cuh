// The GEMM with K in parts: its sums go to the workspace.
#pragma once

#include "gemm/gemm_launch.cuh"
#include "gemm/gemm_split.cuh"

namespace te_mx::sm90 {

struct Split {
  using Params = SplitParams;
  static constexpr bool kEveryEpilogue = false;  // that comes when the parts are added up
  const GemmArgs& args;

  const GemmArgs& gemm() const { return args; }
  Arrays fill(Params& p) const {
    const int64_t m = args.lhs.rows, n = args.rhs.rows, k = args.lhs.k;
    const SplitSums sums = split_sums(args);
    p.parts = args.execution.parts, p.steps = shares_of(p.k_steps, p.parts);
    p.m = static_cast<int>(m), p.rows = static_cast<int>(sums.rows);
    EpilogueParams& e = p.epilogue;
    e.out = args.execution.workspace, e.ldo = sums.pitch, e.out_dtype = DType::f32;
    e.m = static_cast<int>(p.parts * sums.rows), e.n = static_cast<int>(n);
    return {m, n, k, packed_ld(k), packed_ld(k), sums.pitch};
  }
  template <class Config>
  int64_t blocks(const Params& p) const {
    return static_cast<int64_t>(p.m_blocks) * p.n_blocks * p.parts;
  }
};

}  // namespace te_mx::sm90
