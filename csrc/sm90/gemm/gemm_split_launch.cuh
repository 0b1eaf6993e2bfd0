// Launches one instance of the GEMM with K in parts: its sums go to the workspace.
#pragma once

#include "gemm/gemm_launch.cuh"
#include "gemm/gemm_split.cuh"

namespace te_mx::sm90 {

template <class Config, tile::Fp8 kLhs, tile::Fp8 kRhs>
Status launch_split(const GemmArgs& a, const Device& device) {
  const auto kernel = gemm_kernel<Config, kLhs, kRhs, EpilogueKind::plain, SplitParams>;
  static ClusterCount counts;
  int blocks_at_once;
  const Status fits = counts.of(device.index, reinterpret_cast<const void*>(kernel),
                                Config::kThreads, Config::kSmem, Config::kCluster, blocks_at_once);
  if (fits != Status::ok) return fits;
  const SplitRoom room = split_room(a);
  const int64_t m = a.lhs.rows, n = a.rhs.rows, k = a.lhs.k, parts = a.execution.parts;
  void* const sums = a.execution.workspace;
  SplitParams p{};
  p.lhs_scales = static_cast<const uint32_t*>(a.lhs.scales);
  p.rhs_scales = static_cast<const uint32_t*>(a.rhs.scales);
  p.lhs_tiles = static_cast<int>(packed_tiles(m)), p.rhs_tiles = static_cast<int>(packed_tiles(n));
  p.k_steps = static_cast<int>((k + 127) / 128);
  p.m_blocks = static_cast<int>((m + Config::kM - 1) / Config::kM);
  p.n_blocks = static_cast<int>((n + Config::kN - 1) / Config::kN);
  p.walk_in_groups_of(group_size(blocks_at_once, Config::kM, Config::kN));
  p.parts = static_cast<int>(parts), p.m = static_cast<int>(m),
  p.rows = static_cast<int>(room.rows);
  EpilogueParams& e = p.epilogue;
  e.out = sums, e.ldo = room.pitch, e.out_dtype = DType::f32;
  e.m = static_cast<int>(parts * room.rows), e.n = static_cast<int>(n);

  using namespace mxtile::sm90;
  CUtensorMap lhs_map, rhs_map, sums_map;
  const int64_t ld = packed_ld(k);
  if (!tensor_map_2d(lhs_map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, a.lhs.codes, m, k, ld,
                     Config::kM) ||
      !tensor_map_2d(rhs_map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, a.rhs.codes, n, k, ld,
                     Config::kN) ||
      !tensor_map_2d(sums_map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, sums, parts * room.rows,
                     room.pitch, room.pitch * 4, 64)) {
    return Status::unsupported;
  }
  const int64_t blocks = static_cast<int64_t>(p.m_blocks) * p.n_blocks * parts;
  return start<Config>(kernel, p, lhs_map, rhs_map, sums_map, {}, blocks, blocks_at_once,
                       a.execution.stream);
}

// The four pairs of formats of one configuration.
template <class Config>
Status launch_split_any(const GemmArgs& a, const Device& device) {
  using tile::Fp8;
  constexpr Fp8 k4 = Fp8::e4m3, k5 = Fp8::e5m2;
  if (a.lhs.element == Element::e4m3) {
    return a.rhs.element == Element::e4m3 ? launch_split<Config, k4, k4>(a, device)
                                          : launch_split<Config, k4, k5>(a, device);
  }
  return a.rhs.element == Element::e4m3 ? launch_split<Config, k5, k4>(a, device)
                                        : launch_split<Config, k5, k5>(a, device);
}

}  // namespace te_mx::sm90
