#include "gemm/gemm_grouped_launch.cuh"
#include "gemm/gemm_standing.cuh"

namespace te_mx::sm90 {

namespace {

template <class Config>
Status launch_standing(const GroupedGemmArgs& args, const Device& device) {
  const auto kernel = gemm_standing_kernel<Config>;
  static ClusterCount counts;
  int ctas;
  const Status fits = counts.of(device.index, reinterpret_cast<const void*>(kernel),
                                Config::kThreads, Config::kSmem, 1, ctas);
  if (fits != Status::ok) return fits;
  const Grouped kind{args};
  const GemmArgs& a = args.gemm;
  const int64_t n = a.rhs.rows, k = a.lhs.k;
  GroupedParams p{};
  p.lhs_scales = static_cast<const uint32_t*>(a.lhs.scales);
  p.rhs_scales = static_cast<const uint32_t*>(a.rhs.scales);
  p.codes = a.rhs.codes;
  p.blocks = static_cast<int>((n + kNvfp4Rows - 1) / kNvfp4Rows);
  p.k_steps = static_cast<int>((k + 127) / 128);
  p.m_blocks = static_cast<int>((a.lhs.rows + Config::kM - 1) / Config::kM);
  p.n_blocks = static_cast<int>((n + Config::kN - 1) / Config::kN);
  p.walk_in_groups_of(group_size(ctas, Config::kM, Config::kN));
  const Arrays arrays = kind.fill(p);
  const EpilogueParams& e = p.epilogue;
  CUtensorMap lhs, out{};
  using mxtile::sm90::tensor_map_2d;
  if (!tensor_map_2d(lhs, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, a.lhs.codes, arrays.lhs_rows, arrays.k,
                     arrays.lhs_ld, 64) ||
      (!e.direct && !tensor_map_2d(out, map_type(e.out_dtype), width_of(e.out_dtype), e.out, e.m, n,
                                   e.ldo * width_of(e.out_dtype), 64)))
    return Status::unsupported;
  const int64_t blocks = kind.blocks<Config>(p);
  const dim3 grid(static_cast<unsigned>(blocks < ctas ? blocks : ctas));
  return launch_early(kernel, {grid, Config::kThreads, a.execution.stream, Config::kSmem}, p, lhs,
                      out);
}

}  // namespace

Status launch_grouped_standing(const GroupedGemmArgs& args, const Device& device) {
  return with_lhs(args.gemm, [&]<tile::Fp8 kLhs>() {
    return launch_standing<StandingConfig<StandingOperands<kLhs>>>(args, device);
  });
}

}  // namespace te_mx::sm90
