// Launches an instance of the GEMM that reads codes of 4 bits.
#pragma once

#include "gemm/gemm_codes_kernel.cuh"
#include "gemm/gemm_launch.cuh"

namespace te_mx::sm90 {

inline PlainScales plain_scales(const Operand& o) {
  const int64_t blocks = (o.k + 31) / 32;
  const auto* const at = static_cast<const uint8_t*>(o.scales);
  return {at, static_cast<int>(o.rows), static_cast<int>(blocks),
          blocks % 16 == 0 && reinterpret_cast<uintptr_t>(at) % 16 == 0};
}

// lhs_comes: see CodesParams.
template <class Config>
Status launch_codes_as(const GemmArgs& a, bool lhs_comes, const Device& device) {
  const auto kernel = gemm_codes_kernel<Config>;
  const int parts = std::max(a.execution.parts, 1);
  static ClusterCount counts[kMostCodesParts + 1];
  int clusters;
  const Status fits = counts[parts].of(device.index, reinterpret_cast<const void*>(kernel),
                                       Config::kThreads, Smem<Config>::kBytes, parts, clusters);
  if (fits != Status::ok) return fits;
  const int64_t m = a.lhs.rows, n = a.rhs.rows;
  CodesParams p{};
  p.lhs_scales = static_cast<const uint32_t*>(a.lhs.scales);
  p.lhs_tiles = static_cast<int>(packed_tiles(m));
  p.k_steps = static_cast<int>((a.lhs.k + 127) / 128);
  p.m_blocks = static_cast<int>((m + 127) / 128), p.n_blocks = static_cast<int>((n + 127) / 128);
  p.walk_in_groups_of(group_size(clusters, 128, 128));
  p.k = parts_of_k(p.k_steps, parts), p.rhs = plain_scales(a.rhs), p.lhs_comes = lhs_comes;
  p.lhs_rows = static_cast<int>(m), p.rhs_rows = static_cast<int>(n);
  mxtile::sm90::TensorMaps lhs;
  CUtensorMap rhs, out{};
  using mxtile::sm90::tensor_map_2d, mxtile::sm90::tensor_maps_2d;
  const int64_t k = a.lhs.k, ld = row_bytes(k, true);
  constexpr CUtensorMapDataType kBytes = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  if (!tensor_maps_2d(lhs, kBytes, 1, a.lhs.codes, m, k, packed_ld(k), 128) ||
      !tensor_map_2d(rhs, kBytes, 1, a.rhs.codes, n, ld, ld, 128, kRawRowBytes))
    return Status::unsupported;
  const int64_t blocks = int64_t{p.m_blocks} * p.n_blocks;
  int64_t at_once = blocks;
  if constexpr (Config::kKeepsSums) {
    p.finish = finish_params(a, 1, static_cast<float*>(a.execution.workspace));
  } else {
    const Epilogue& e = a.epilogue;
    p.epilogue = epilogue_params(e, m, n, nullptr);
    if (!p.epilogue.direct && !tensor_map_2d(out, map_type(e.out_dtype), width_of(e.out_dtype),
                                             e.out, m, n, e.ldo * width_of(e.out_dtype), 64)) {
      return Status::unsupported;
    }
    at_once = std::min<int64_t>(blocks, clusters);
  }
  if (at_once * parts > INT32_MAX) return Status::unsupported;
  const Launch at{static_cast<unsigned>(at_once * parts), Config::kThreads, a.execution.stream,
                  Smem<Config>::kBytes, parts};
  return launch_early(kernel, at, p, lhs.whole, lhs.end, rhs, out);
}

// Bias and accumulation of K in one piece go through the copy engine, block after block. Whatever
// takes more reads sums from shared memory.
template <tile::Fp8 kLhs>
Status launch_codes(const GemmArgs& a, bool lhs_comes, const Device& device) {
  using Operands = CodesOperands<kLhs>;
  if (a.execution.parts <= 1 && !needs_full(a.epilogue))
    return launch_codes_as<CodesConfig<Operands, EpilogueKind::plain>>(a, lhs_comes, device);
  return launch_codes_as<CodesConfig<Operands, EpilogueKind::sums>>(a, lhs_comes, device);
}

}  // namespace te_mx::sm90
