// Launches one GEMM instance: tensor maps, grid, cluster.
#pragma once

#include "gemm_kernel.cuh"
#include "gemm_launch.h"
#include "launch.h"
#include "mxtile/sm90/tensor_map.h"

namespace te_mx::sm90 {

inline CUtensorMapDataType map_type(DType dtype) {
  return dtype == DType::f32    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
         : dtype == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

inline int width_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

// What the copy engine cannot store, and what it cannot add.
inline bool stored_by_element(const GemmArgs& a) {
  return a.ldo * width_of(a.out_dtype) % 16 != 0 || reinterpret_cast<uintptr_t>(a.out) % 16 != 0;
}
inline bool added_by_element(const GemmArgs& a) {
  return a.accumulate && a.out_dtype != DType::f32;
}

// Whether every bias, one of N numbers or several of them, may be copied by words of 4 bytes.
inline bool bias_by_words(const GemmArgs& a) {
  return a.bias_dtype == DType::f32 ||
         (a.n % 2 == 0 && reinterpret_cast<uintptr_t>(a.bias) % 4 == 0);
}

// What the courier carries beside D. What it does not carry is rare.
inline const void* beside(const GemmArgs& a) { return a.gelu_in != nullptr ? a.gelu_in : a.aux; }
inline Side carried(const GemmArgs& a) {
  const bool backward = a.gelu_in != nullptr;
  if (beside(a) == nullptr || a.out_dtype == DType::f32 ||
      a.out_dtype != (backward ? a.gelu_in_dtype : a.aux_dtype) || stored_by_element(a) ||
      added_by_element(a) || a.n % 8 != 0 || reinterpret_cast<uintptr_t>(beside(a)) % 16 != 0 ||
      (backward ? a.bias : a.bias_grad) != nullptr) {
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

template <class Config, tile::Fp8 kLhs, tile::Fp8 kRhs, Epilogue kEpilogue>
Status launch(const GemmArgs& a, const Device& device) {
  const auto kernel = gemm_kernel<Config, kLhs, kRhs, kEpilogue, GemmParams>;
  static ClusterCount counts;
  int clusters;
  const Status fits = counts.of(device.index, reinterpret_cast<const void*>(kernel),
                                Config::kThreads, Config::kSmem, Config::kCluster, clusters);
  if (fits != Status::ok) return fits;
  GemmParams p{};
  CUtensorMap lhs_map, rhs_map, out_map{}, side_map{};
  p.lhs_scales = a.lhs.scales, p.rhs_scales = a.rhs.scales;
  p.lhs_tiles = static_cast<int>(packed_tiles(a.m)),
  p.rhs_tiles = static_cast<int>(packed_tiles(a.n));
  p.k_steps = static_cast<int>((a.k + 127) / 128);
  constexpr int kN = Config::kN * Config::kCluster;
  p.m_blocks = static_cast<int>((a.m + Config::kM - 1) / Config::kM);
  p.n_blocks = static_cast<int>((a.n + kN - 1) / kN);
  p.walk_in_groups_of(group_size(clusters, Config::kM, kN));
  const int width = width_of(a.out_dtype);
  p.epilogue.out = a.out, p.epilogue.ldo = a.ldo, p.epilogue.out_dtype = a.out_dtype;
  p.epilogue.bias = a.bias, p.epilogue.bias_dtype = a.bias_dtype;
  p.epilogue.aux = a.aux, p.epilogue.aux_dtype = a.aux_dtype;
  p.epilogue.gelu_in = a.gelu_in, p.epilogue.gelu_in_dtype = a.gelu_in_dtype,
  p.epilogue.gelu = a.gelu;
  p.epilogue.bias_grad = a.bias_grad == nullptr ? nullptr : static_cast<float*>(a.workspace);
  p.epilogue.accumulate = a.accumulate;
  p.epilogue.bias_words = bias_by_words(a);
  p.epilogue.direct = stored_by_element(a);
  p.epilogue.by_element = p.epilogue.direct || added_by_element(a);
  p.epilogue.side = carried(a);
  p.epilogue.m = static_cast<int>(a.m), p.epilogue.n = static_cast<int>(a.n);

  using namespace mxtile::sm90;
  const int64_t ld = packed_ld(a.k);
  if (!tensor_map_2d(lhs_map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, a.lhs.codes, a.m, a.k, ld,
                     Config::kM / Config::kCluster) ||
      !tensor_map_2d(rhs_map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, a.rhs.codes, a.n, a.k, ld,
                     Config::kN) ||
      (!p.epilogue.direct &&
       !tensor_map_2d(out_map, map_type(a.out_dtype), width, a.out, a.m, a.n, a.ldo * width, 64)) ||
      (p.epilogue.side != Side::none &&
       !tensor_map_2d(side_map, map_type(a.out_dtype), 2, beside(a), a.m, a.n, a.n * 2, 64))) {
    return Status::unsupported;
  }

  const int64_t blocks = static_cast<int64_t>(p.m_blocks) * p.n_blocks;
  return start<Config>(kernel, p, lhs_map, rhs_map, out_map, side_map, blocks, clusters, a.stream);
}

// The four pairs of formats and the epilogues of one configuration.
template <class Config>
Status launch_any(const GemmArgs& a, const Device& device) {
  using tile::Fp8;
  const auto go = [&]<Fp8 kLhs, Fp8 kRhs>() {
    if constexpr (Config::kFull) {
      if (carried(a) == Side::gelu_in)
        return launch<Config, kLhs, kRhs, Epilogue::backward>(a, device);
      if (needs_full(a)) return launch<Config, kLhs, kRhs, Epilogue::full>(a, device);
    }
    return needs_full(a) ? Status::bad_argument
                         : launch<Config, kLhs, kRhs, Epilogue::plain>(a, device);
  };
  if (a.lhs_fmt == Format::e4m3) {
    return a.rhs_fmt == Format::e4m3 ? go.template operator()<Fp8::e4m3, Fp8::e4m3>()
                                     : go.template operator()<Fp8::e4m3, Fp8::e5m2>();
  }
  return a.rhs_fmt == Format::e4m3 ? go.template operator()<Fp8::e5m2, Fp8::e4m3>()
                                   : go.template operator()<Fp8::e5m2, Fp8::e5m2>();
}

}  // namespace te_mx::sm90
