// Launches one instance of the grouped GEMM.
#pragma once

#include <algorithm>

#include "gemm_grouped.cuh"
#include "gemm_launch.cuh"
#include "mxtile/sm90/tensor_map.h"

namespace te_mx::sm90 {

// Sizes of a grouped problem as the operands' arrays have them.
struct GroupedShape {
  int64_t lhs_rows, rhs_rows, k;  // of all groups
  int64_t lhs_ld, rhs_ld;         // bytes from row to row of codes
  int64_t out_rows;               // up to the end of the last one
};

inline GroupedShape grouped_shape(const GemmArgs& a, const GroupedCall& call) {
  const Groups& g = call.groups;
  const int64_t tiles = group_tiles(g.rows, g.count) * kTile;
  if (call.along_k) {
    int64_t last = (g.count - 1) * a.m;
    if (call.first_rows != nullptr)
      last = *std::max_element(call.first_rows, call.first_rows + g.count);
    return {a.m, a.n, tiles, tiles, tiles, last + a.m};
  }
  return {g.rows, g.count * a.n, a.k, packed_ld(a.k), packed_ld(a.k), g.rows};
}

template <class Config, tile::Fp8 kLhs, tile::Fp8 kRhs>
Status launch_grouped(const GemmArgs& a, const GroupedCall& call, const Device& device) {
  const Groups& g = call.groups;
  const bool along_k = call.along_k;
  const auto kernel = gemm_kernel<Config, kLhs, kRhs, Epilogue::plain, GroupedParams>;
  static ClusterCount counts;
  int clusters;
  const Status fits = counts.of(device.index, reinterpret_cast<const void*>(kernel),
                                Config::kThreads, Config::kSmem, Config::kCluster, clusters);
  if (fits != Status::ok) return fits;
  constexpr int kN = Config::kN * Config::kCluster;
  GroupedParams p{};
  p.groups = group_table(g), p.along_k = along_k;
  p.rows = static_cast<int>(a.m), p.columns = static_cast<int>(a.n);
  p.placed = call.first_rows != nullptr;
  if (p.placed) std::copy_n(call.first_rows, g.count, p.first_rows);
  p.lhs_scales = a.lhs.scales, p.rhs_scales = a.rhs.scales;
  p.lhs_tiles =
      static_cast<int>(along_k ? packed_tiles(a.m) : (group_tiles(g.rows, g.count) + 1) / 2 * 2);
  p.rhs_tiles = static_cast<int>(packed_tiles(a.n));
  p.k_steps = static_cast<int>((a.k + 127) / 128);
  p.m_blocks = static_cast<int>((a.m + Config::kM - 1) / Config::kM);
  p.n_blocks = static_cast<int>((a.n + kN - 1) / kN);
  p.walk_in_groups_of(group_size(clusters, Config::kM, kN));
  const GroupedShape shape = grouped_shape(a, call);
  const int width = width_of(a.out_dtype);
  EpilogueParams& e = p.epilogue;
  e.out = a.out, e.ldo = a.ldo, e.out_dtype = a.out_dtype, e.accumulate = a.accumulate;
  e.bias = a.bias, e.bias_dtype = a.bias_dtype;
  e.bias_words = bias_by_words(a);
  e.direct = stored_by_element(a);
  e.by_element = e.direct || added_by_element(a);
  e.m = static_cast<int>(shape.out_rows), e.n = static_cast<int>(a.n);

  using namespace mxtile::sm90;
  CUtensorMap lhs_map, rhs_map, out_map{};
  if (!tensor_map_2d(lhs_map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, a.lhs.codes, shape.lhs_rows,
                     shape.k, shape.lhs_ld, Config::kM / Config::kCluster) ||
      !tensor_map_2d(rhs_map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, a.rhs.codes, shape.rhs_rows,
                     shape.k, shape.rhs_ld, Config::kN) ||
      (!e.direct && !tensor_map_2d(out_map, map_type(a.out_dtype), width, a.out, shape.out_rows,
                                   a.n, a.ldo * width, 64))) {
    return Status::unsupported;
  }

  // As many as there can be.
  const int64_t blocks =
      p.n_blocks * (along_k ? g.count * p.m_blocks : g.rows / Config::kM + g.count);
  return start<Config>(kernel, p, lhs_map, rhs_map, out_map, {}, blocks, clusters, a.stream);
}

// The four pairs of formats of one configuration.
template <class Config>
Status launch_grouped_any(const GemmArgs& a, const GroupedCall& call, const Device& device) {
  using tile::Fp8;
  constexpr Fp8 k4 = Fp8::e4m3, k5 = Fp8::e5m2;
  if (a.lhs_fmt == Format::e4m3) {
    return a.rhs_fmt == Format::e4m3 ? launch_grouped<Config, k4, k4>(a, call, device)
                                     : launch_grouped<Config, k4, k5>(a, call, device);
  }
  return a.rhs_fmt == Format::e4m3 ? launch_grouped<Config, k5, k4>(a, call, device)
                                   : launch_grouped<Config, k5, k5>(a, call, device);
}

}  // namespace te_mx::sm90
