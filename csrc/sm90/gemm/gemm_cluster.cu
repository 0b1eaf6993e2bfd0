// Launches the GEMM of tiles with K in parts inside of a cluster.
#include "gemm/gemm_cluster.cuh"
#include "gemm/gemm_launch.cuh"

namespace te_mx::sm90 {

namespace {

template <class Config>
Status launch_as(const GemmArgs& a, const Device& device) {
  const auto kernel = gemm_cluster_kernel<Config>;
  const int parts = a.execution.parts;
  static ClusterCount counts[kMostClusterParts + 1];
  int clusters;
  const Status fits = counts[parts].of(device.index, reinterpret_cast<const void*>(kernel),
                                       Config::kThreads, Config::kSmem, parts, clusters);
  if (fits != Status::ok) return fits;
  const int64_t m = a.lhs.rows, n = a.rhs.rows;
  ClusterParams p{};
  p.lhs_scales = static_cast<const uint32_t*>(a.lhs.scales);
  p.rhs_scales = static_cast<const uint32_t*>(a.rhs.scales);
  p.lhs_tiles = static_cast<int>(packed_tiles(m)), p.rhs_tiles = static_cast<int>(packed_tiles(n));
  p.k_steps = static_cast<int>((a.lhs.k + 127) / 128);
  p.rhs_stands = a.rhs.layout == Layout::standing;
  p.m_blocks = static_cast<int>((m + 127) / 128), p.n_blocks = static_cast<int>((n + 127) / 128);
  p.walk_in_groups_of(group_size(clusters, 128, 128));
  p.k = parts_of_k(p.k_steps, parts);
  p.finish = finish_params(a, 1, static_cast<float*>(a.execution.workspace));
  p.epilogue.m = static_cast<int>(m), p.epilogue.n = static_cast<int>(n);
  const int64_t blocks = int64_t{p.m_blocks} * p.n_blocks;
  if (blocks * parts > INT32_MAX) return Status::unsupported;
  p.lhs_rows = static_cast<int>(m), p.rhs_rows = static_cast<int>(n);
  mxtile::sm90::TensorMaps lhs, rhs;
  constexpr CUtensorMapDataType kCodes = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  using mxtile::sm90::tensor_maps_2d;
  if (!tensor_maps_2d(lhs, kCodes, 1, a.lhs.codes, m, a.lhs.k, packed_ld(a.lhs.k), 128) ||
      !tensor_maps_2d(rhs, kCodes, 1, a.rhs.codes, n, a.lhs.k, packed_ld(a.lhs.k), 128))
    return Status::unsupported;
  const dim3 grid(static_cast<unsigned>(blocks * parts));
  return launch_early(kernel, {grid, Config::kThreads, a.execution.stream, Config::kSmem, parts}, p,
                      lhs.whole, lhs.end, rhs.whole, rhs.end);
}

}  // namespace

Status gemm_cluster(const GemmArgs& a, const Device& device) {
  using tile::Fp8;
  const auto go = [&]<Fp8 kLhs>() {
    return launch_as<ClusterConfig<ByteOperands<kLhs>>>(a, device);
  };
  const Status status = with_lhs(a, go);
  if (status != Status::ok || a.epilogue.bias_grad == nullptr) return status;
  return reduce_columns(static_cast<const float*>(a.execution.workspace), a.epilogue.bias_grad,
                        (a.lhs.rows + kFinishRows - 1) / kFinishRows, a.rhs.rows,
                        static_cast<cudaStream_t>(a.execution.stream));
}

}  // namespace te_mx::sm90
