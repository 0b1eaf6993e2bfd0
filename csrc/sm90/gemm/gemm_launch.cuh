// Launches one GEMM instance: tensor maps, grid, cluster.
#pragma once

#include "common/launch.h"
#include "gemm/gemm_kernel.cuh"
#include "gemm/gemm_launch.h"
#include "mxtile/sm90/tensor_map.h"

namespace te_mx::sm90 {

inline CUtensorMapDataType map_type(DType dtype) {
  return dtype == DType::f32    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
         : dtype == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

inline int width_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

// What the copy engine cannot store, and what it cannot add.
inline bool stored_by_element(const Epilogue& e) {
  return e.ldo * width_of(e.out_dtype) % 16 != 0 || reinterpret_cast<uintptr_t>(e.out) % 16 != 0;
}
inline bool added_by_element(const Epilogue& e) {
  return e.accumulate && e.out_dtype != DType::f32;
}

// Whether every bias, one of N numbers or several of them, may be copied by words of 4 bytes.
inline bool bias_by_words(const Epilogue& e, int64_t n) {
  return e.bias_dtype == DType::f32 || (n % 2 == 0 && reinterpret_cast<uintptr_t>(e.bias) % 4 == 0);
}

// What the courier carries beside D. What it does not carry is rare.
inline const void* beside(const Epilogue& e) { return e.gelu_in != nullptr ? e.gelu_in : e.aux; }
inline Side carried(const Epilogue& e, int64_t n) {
  const bool backward = e.gelu_in != nullptr;
  if (beside(e) == nullptr || e.out_dtype == DType::f32 ||
      e.out_dtype != (backward ? e.gelu_in_dtype : e.aux_dtype) || stored_by_element(e) ||
      added_by_element(e) || n % 8 != 0 || reinterpret_cast<uintptr_t>(beside(e)) % 16 != 0 ||
      (backward ? e.bias : e.bias_grad) != nullptr) {
    return Side::none;
  }
  return backward ? Side::gelu_in : Side::aux;
}

// Starts a GEMM kernel on `blocks` blocks, of which `clusters` run at the same time.
template <class Config, class Params>
Status start(void (*kernel)(Params, CUtensorMap, CUtensorMap, CUtensorMap, CUtensorMap),
             const Params& p, const CUtensorMap& lhs, const CUtensorMap& rhs,
             const CUtensorMap& out, const CUtensorMap& side, int64_t blocks, int clusters,
             void* stream) {
  cudaLaunchAttribute attributes[2] = {early_start(), clusters_of(Config::kCluster)};
  cudaLaunchConfig_t config{};
  config.gridDim =
      dim3(static_cast<unsigned>((blocks < clusters ? blocks : clusters) * Config::kCluster));
  config.blockDim = dim3(Config::kThreads);
  config.dynamicSmemBytes = Config::kSmem;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes, config.numAttrs = 2;
  return started(cudaLaunchKernelEx(&config, kernel, p, lhs, rhs, out, side));
}

template <class Config, tile::Fp8 kLhs, tile::Fp8 kRhs, EpilogueKind kEpilogue>
Status launch(const GemmArgs& a, const Device& device) {
  const auto kernel = gemm_kernel<Config, kLhs, kRhs, kEpilogue, GemmParams>;
  static ClusterCount counts;
  int clusters;
  const Status fits = counts.of(device.index, reinterpret_cast<const void*>(kernel),
                                Config::kThreads, Config::kSmem, Config::kCluster, clusters);
  if (fits != Status::ok) return fits;
  const Epilogue& e = a.epilogue;
  const int64_t m = a.lhs.rows, n = a.rhs.rows, k = a.lhs.k;
  GemmParams p{};
  CUtensorMap lhs_map, rhs_map, out_map{}, side_map{};
  p.lhs_scales = static_cast<const uint32_t*>(a.lhs.scales);
  p.rhs_scales = static_cast<const uint32_t*>(a.rhs.scales);
  p.lhs_tiles = static_cast<int>(packed_tiles(m)), p.rhs_tiles = static_cast<int>(packed_tiles(n));
  p.k_steps = static_cast<int>((k + 127) / 128);
  constexpr int kN = Config::kN * Config::kCluster;
  p.m_blocks = static_cast<int>((m + Config::kM - 1) / Config::kM);
  p.n_blocks = static_cast<int>((n + kN - 1) / kN);
  p.walk_in_groups_of(group_size(clusters, Config::kM, kN));
  const int width = width_of(e.out_dtype);
  p.epilogue.out = e.out, p.epilogue.ldo = e.ldo, p.epilogue.out_dtype = e.out_dtype;
  p.epilogue.bias = e.bias, p.epilogue.bias_dtype = e.bias_dtype;
  p.epilogue.aux = e.aux, p.epilogue.aux_dtype = e.aux_dtype;
  p.epilogue.gelu_in = e.gelu_in, p.epilogue.gelu_in_dtype = e.gelu_in_dtype,
  p.epilogue.gelu = e.gelu;
  p.epilogue.bias_grad =
      e.bias_grad == nullptr ? nullptr : static_cast<float*>(a.execution.workspace);
  p.epilogue.accumulate = e.accumulate;
  p.epilogue.bias_words = bias_by_words(e, n);
  p.epilogue.direct = stored_by_element(e);
  p.epilogue.by_element = p.epilogue.direct || added_by_element(e);
  p.epilogue.side = carried(e, n);
  p.epilogue.m = static_cast<int>(m), p.epilogue.n = static_cast<int>(n);

  using namespace mxtile::sm90;
  const int64_t ld = packed_ld(k);
  if (!tensor_map_2d(lhs_map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, a.lhs.codes, m, k, ld,
                     Config::kM / Config::kCluster) ||
      !tensor_map_2d(rhs_map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, a.rhs.codes, n, k, ld,
                     Config::kN) ||
      (!p.epilogue.direct &&
       !tensor_map_2d(out_map, map_type(e.out_dtype), width, e.out, m, n, e.ldo * width, 64)) ||
      (p.epilogue.side != Side::none &&
       !tensor_map_2d(side_map, map_type(e.out_dtype), 2, beside(e), m, n, n * 2, 64))) {
    return Status::unsupported;
  }

  const int64_t blocks = static_cast<int64_t>(p.m_blocks) * p.n_blocks;
  return start<Config>(kernel, p, lhs_map, rhs_map, out_map, side_map, blocks, clusters,
                       a.execution.stream);
}

// The four pairs of formats and the epilogues of one configuration.
template <class Config>
Status launch_any(const GemmArgs& a, const Device& device) {
  using tile::Fp8;
  const auto go = [&]<Fp8 kLhs, Fp8 kRhs>() {
    if constexpr (Config::kFull) {
      if (carried(a.epilogue, a.rhs.rows) == Side::gelu_in)
        return launch<Config, kLhs, kRhs, EpilogueKind::backward>(a, device);
      if (needs_full(a.epilogue)) return launch<Config, kLhs, kRhs, EpilogueKind::full>(a, device);
    }
    return needs_full(a.epilogue) ? Status::bad_argument
                                  : launch<Config, kLhs, kRhs, EpilogueKind::plain>(a, device);
  };
  if (a.lhs.element == Element::e4m3) {
    return a.rhs.element == Element::e4m3 ? go.template operator()<Fp8::e4m3, Fp8::e4m3>()
                                          : go.template operator()<Fp8::e4m3, Fp8::e5m2>();
  }
  return a.rhs.element == Element::e4m3 ? go.template operator()<Fp8::e5m2, Fp8::e4m3>()
                                        : go.template operator()<Fp8::e5m2, Fp8::e5m2>();
}

}  // namespace te_mx::sm90
