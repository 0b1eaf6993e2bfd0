// The grouped GEMM, of rows or of K.
#pragma once

#include <algorithm>

#include "gemm/gemm_grouped.cuh"
#include "gemm/gemm_launch.cuh"

namespace te_mx::sm90 {

struct Grouped {
  using Params = GroupedParams;
  static constexpr bool kEveryEpilogue = false;
  const GroupedGemmArgs& args;

  const GemmArgs& gemm() const { return args.gemm; }
  Arrays fill(Params& p) const {
    const Groups& g = args.groups;
    const int64_t m = args.gemm.lhs.rows, n = args.gemm.rhs.rows, k = args.gemm.lhs.k;
    const int64_t tiles = group_tiles(g.rows, g.count);
    p.groups = group_table(g), p.along_k = args.along_k;
    p.rows = static_cast<int>(m), p.columns = static_cast<int>(n);
    p.placed = args.first_rows != nullptr;
    if (p.placed) std::copy_n(args.first_rows, g.count, p.first_rows);
    if (!args.along_k) p.lhs_tiles = static_cast<int>((tiles + 1) / 2 * 2);
    p.epilogue = epilogue_params(args.gemm.epilogue, out_rows(), n, nullptr);
    if (args.along_k) return {m, n, tiles * kTile, tiles * kTile, tiles * kTile, n};
    return {g.rows, g.count * n, k, packed_ld(k), packed_ld(k), n};
  }
  // As many as there can be.
  template <class Config>
  int64_t blocks(const Params& p) const {
    const Groups& g = args.groups;
    return p.n_blocks * (args.along_k ? g.count * p.m_blocks : g.rows / Config::kM + g.count);
  }

 private:
  // Up to the end of the last one.
  int64_t out_rows() const {
    const Groups& g = args.groups;
    const int64_t m = args.gemm.lhs.rows;
    if (!args.along_k) return g.rows;
    if (args.first_rows == nullptr) return g.count * m;
    return *std::max_element(args.first_rows, args.first_rows + g.count) + m;
  }
};

}  // namespace te_mx::sm90
