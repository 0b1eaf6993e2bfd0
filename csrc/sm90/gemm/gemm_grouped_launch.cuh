// Launches one instance of the grouped GEMM.
#pragma once

#include <algorithm>

#include "gemm/gemm_grouped.cuh"
#include "gemm/gemm_launch.cuh"
#include "mxtile/sm90/tensor_map.h"

namespace te_mx::sm90 {

// Sizes of a grouped problem as the operands' arrays have them.
struct GroupedShape {
  int64_t lhs_rows, rhs_rows, k;  // of all groups
  int64_t lhs_ld, rhs_ld;         // bytes from row to row of codes
  int64_t out_rows;               // up to the end of the last one
};

inline GroupedShape grouped_shape(const GroupedGemmArgs& args) {
  const Groups& g = args.groups;
  const int64_t m = args.gemm.lhs.rows, n = args.gemm.rhs.rows, k = args.gemm.lhs.k;
  const int64_t tiles = group_tiles(g.rows, g.count) * kTile;
  if (args.along_k) {
    int64_t last = (g.count - 1) * m;
    if (args.first_rows != nullptr)
      last = *std::max_element(args.first_rows, args.first_rows + g.count);
    return {m, n, tiles, tiles, tiles, last + m};
  }
  return {g.rows, g.count * n, k, packed_ld(k), packed_ld(k), g.rows};
}

template <class Config, tile::Fp8 kLhs, tile::Fp8 kRhs>
Status launch_grouped(const GroupedGemmArgs& args, const Device& device) {
  const GemmArgs& a = args.gemm;
  const Groups& g = args.groups;
  const bool along_k = args.along_k;
  const auto kernel = gemm_kernel<Config, kLhs, kRhs, EpilogueKind::plain, GroupedParams>;
  static ClusterCount counts;
  int clusters;
  const Status fits = counts.of(device.index, reinterpret_cast<const void*>(kernel),
                                Config::kThreads, Config::kSmem, Config::kCluster, clusters);
  if (fits != Status::ok) return fits;
  constexpr int kN = Config::kN * Config::kCluster;
  GroupedParams p{};
  p.groups = group_table(g), p.along_k = along_k;
  const int64_t m = a.lhs.rows, n = a.rhs.rows;
  p.rows = static_cast<int>(m), p.columns = static_cast<int>(n);
  p.placed = args.first_rows != nullptr;
  if (p.placed) std::copy_n(args.first_rows, g.count, p.first_rows);
  p.lhs_scales = static_cast<const uint32_t*>(a.lhs.scales);
  p.rhs_scales = static_cast<const uint32_t*>(a.rhs.scales);
  p.lhs_tiles =
      static_cast<int>(along_k ? packed_tiles(m) : (group_tiles(g.rows, g.count) + 1) / 2 * 2);
  p.rhs_tiles = static_cast<int>(packed_tiles(n));
  p.k_steps = static_cast<int>((a.lhs.k + 127) / 128);
  p.m_blocks = static_cast<int>((m + Config::kM - 1) / Config::kM);
  p.n_blocks = static_cast<int>((n + kN - 1) / kN);
  p.walk_in_groups_of(group_size(clusters, Config::kM, kN));
  const GroupedShape shape = grouped_shape(args);
  const Epilogue& from = a.epilogue;
  const int width = width_of(from.out_dtype);
  EpilogueParams& e = p.epilogue;
  e.out = from.out, e.ldo = from.ldo, e.out_dtype = from.out_dtype;
  e.accumulate = from.accumulate;
  e.bias = from.bias, e.bias_dtype = from.bias_dtype;
  e.bias_words = bias_by_words(from, n);
  e.direct = stored_by_element(from);
  e.by_element = e.direct || added_by_element(from);
  e.m = static_cast<int>(shape.out_rows), e.n = static_cast<int>(n);

  using namespace mxtile::sm90;
  CUtensorMap lhs_map, rhs_map, out_map{};
  if (!tensor_map_2d(lhs_map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, a.lhs.codes, shape.lhs_rows,
                     shape.k, shape.lhs_ld, Config::kM / Config::kCluster) ||
      !tensor_map_2d(rhs_map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, a.rhs.codes, shape.rhs_rows,
                     shape.k, shape.rhs_ld, Config::kN) ||
      (!e.direct && !tensor_map_2d(out_map, map_type(from.out_dtype), width, from.out,
                                   shape.out_rows, n, from.ldo * width, 64))) {
    return Status::unsupported;
  }

  // As many as there can be.
  const int64_t blocks =
      p.n_blocks * (along_k ? g.count * p.m_blocks : g.rows / Config::kM + g.count);
  return start<Config>(kernel, p, lhs_map, rhs_map, out_map, {}, blocks, clusters,
                       a.execution.stream);
}

// The four pairs of formats of one configuration.
template <class Config>
Status launch_grouped_any(const GroupedGemmArgs& args, const Device& device) {
  using tile::Fp8;
  constexpr Fp8 k4 = Fp8::e4m3, k5 = Fp8::e5m2;
  const Element lhs = args.gemm.lhs.element, rhs = args.gemm.rhs.element;
  if (lhs == Element::e4m3) {
    return rhs == Element::e4m3 ? launch_grouped<Config, k4, k4>(args, device)
                                : launch_grouped<Config, k4, k5>(args, device);
  }
  return rhs == Element::e4m3 ? launch_grouped<Config, k5, k4>(args, device)
                              : launch_grouped<Config, k5, k5>(args, device);
}

}  // namespace te_mx::sm90
