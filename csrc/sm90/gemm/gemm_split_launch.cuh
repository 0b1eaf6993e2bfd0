// The GEMM with K cut into parts, for problems with too few blocks to fill the chip. Every part of
// every block is a block of its own, whose sums go to the workspace in fp32, [parts, rows, pitch];
// a second kernel (split_finish.cu) adds the parts up in order and applies the epilogue.
#pragma once

#include "gemm/gemm_launch.cuh"

namespace te_mx::sm90 {

// `epilogue` describes the sums of all parts as one matrix.
struct SplitParams : GemmParams {
  static constexpr ScheduleKind kSchedule = ScheduleKind::split;
  PartsOfK k;
  int m, rows;  // rows of D, and of the sums of one part: whole waves
};

struct Split {
  using Params = SplitParams;
  static constexpr bool kEveryEpilogue = false;  // that comes when the parts are added up
  const GemmArgs& args;

  const GemmArgs& gemm() const { return args; }
  Arrays fill(Params& p) const {
    const int64_t m = args.lhs.rows, n = args.rhs.rows, k = args.lhs.k;
    const SplitSums sums = split_sums(args);
    p.k = parts_of_k(p.k_steps, args.execution.parts);
    p.m = static_cast<int>(m), p.rows = static_cast<int>(sums.rows);
    EpilogueParams& e = p.epilogue;
    e.out = args.execution.workspace, e.ldo = sums.pitch, e.out_dtype = DType::f32;
    e.m = static_cast<int>(p.k.parts * sums.rows), e.n = static_cast<int>(n);
    return {m, n, k, packed_ld(k), packed_ld(k), sums.pitch};
  }
  template <class Config>
  int64_t blocks(const Params& p) const {
    return static_cast<int64_t>(p.m_blocks) * p.n_blocks * p.k.parts;
  }
};

}  // namespace te_mx::sm90
