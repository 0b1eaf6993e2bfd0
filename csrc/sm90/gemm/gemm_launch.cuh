// Launches one GEMM instance: parameters, tensor maps, grid, cluster. What kinds of GEMMs do
// differently is a small struct each:
//
//   Params               of the kernel
//   kEveryEpilogue       whether there are instances with more than bias and accumulation
//   gemm()               operands, epilogue, execution
//   fill(p)              what Params has beside the common part; returns the arrays
//   blocks<Config>(p)    of what a cluster computes at once, at most
#pragma once

#include <type_traits>

#include "common/formats.h"
#include "common/launch.h"
#include "gemm/gemm_kernel.cuh"
#include "gemm/gemm_launch.h"
#include "gemm/gemm_operands.cuh"
#include "mxtile/sm90/tensor_map.h"

namespace te_mx::sm90 {

// Sizes of operands and D as the copy engine sees them.
struct Arrays {
  int64_t lhs_rows, rhs_rows, k;
  int64_t lhs_ld, rhs_ld;  // bytes from row to row of codes
  int64_t out_columns;     // rows and everything else of D stand in its EpilogueParams
};

inline CUtensorMapDataType map_type(DType dtype) {
  return dtype == DType::f32    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
         : dtype == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

inline int width_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

// ------------------------------------------------------------------------------------ epilogue
// What the copy engine cannot store, and what it cannot add. NOTE: it writes 16 bytes at once, so
// where a row of D ends inside of them, what lies behind it would change.
inline bool stored_by_element(const Epilogue& e, int64_t n) {
  const int width = width_of(e.out_dtype);
  return e.ldo * width % 16 != 0 || reinterpret_cast<uintptr_t>(e.out) % 16 != 0 ||
         (e.ldo != n && n * width % 16 != 0);
}
inline bool added_by_element(const Epilogue& e) {
  return e.accumulate && e.out_dtype != DType::f32;
}

// Whether nothing but EpilogueKind::add is needed; of epilogues without GELU and bias gradient.
inline bool only_adds(const Epilogue& e, int64_t n) {
  return e.accumulate && e.out_dtype == DType::f32 && e.bias == nullptr && !stored_by_element(e, n);
}

// Whether every bias, one of N numbers or several of them, may be copied by words of 4 bytes.
inline bool bias_by_words(const Epilogue& e, int64_t n) {
  return e.bias_dtype == DType::f32 || (n % 2 == 0 && reinterpret_cast<uintptr_t>(e.bias) % 4 == 0);
}

// The side tensor of D, if the copy engine can carry it: others are rare.
inline const void* side_data(const Epilogue& e) { return e.gelu_in != nullptr ? e.gelu_in : e.aux; }
inline SideTensor side_tensor(const Epilogue& e, int64_t n) {
  const bool backward = e.gelu_in != nullptr;
  if (side_data(e) == nullptr || e.out_dtype == DType::f32 ||
      e.out_dtype != (backward ? e.gelu_in_dtype : e.aux_dtype) || stored_by_element(e, n) ||
      added_by_element(e) || n % 8 != 0 || reinterpret_cast<uintptr_t>(side_data(e)) % 16 != 0 ||
      (backward ? e.bias : e.bias_grad) != nullptr) {
    return SideTensor::none;
  }
  return backward ? SideTensor::gelu_in : SideTensor::aux;
}

// For a D[m, n]; `partial` is where partial sums of the bias gradient go.
inline EpilogueParams epilogue_params(const Epilogue& e, int64_t m, int64_t n, void* partial) {
  EpilogueParams p{};
  p.out = e.out, p.ldo = e.ldo, p.out_dtype = e.out_dtype;
  p.bias = e.bias, p.bias_dtype = e.bias_dtype;
  p.aux = e.aux, p.aux_dtype = e.aux_dtype;
  p.gelu_in = e.gelu_in, p.gelu_in_dtype = e.gelu_in_dtype;
  p.gelu = e.gelu;
  p.bias_grad = e.bias_grad == nullptr ? nullptr : static_cast<float*>(partial);
  p.accumulate = e.accumulate;
  p.bias_words = bias_by_words(e, n);
  p.direct = stored_by_element(e, n);
  p.by_element = p.direct || added_by_element(e);
  p.side = side_tensor(e, n);
  p.m = static_cast<int>(m), p.n = static_cast<int>(n);
  return p;
}

// -------------------------------------------------------------------------------------- launch
// What the copy engine is told of a call.
struct Maps {
  mxtile::sm90::TensorMaps lhs, rhs;
  CUtensorMap out{}, side{};

  // False for what the copy engine cannot describe.
  template <class Config>
  bool make(const GemmArgs& a, const EpilogueParams& e, const Arrays& arrays) {
    constexpr CUtensorMapDataType kCodes = CU_TENSOR_MAP_DATA_TYPE_UINT8;
    using mxtile::sm90::tensor_map_2d, mxtile::sm90::tensor_maps_2d;
    const int width = width_of(e.out_dtype);
    return tensor_maps_2d(lhs, kCodes, 1, a.lhs.codes, arrays.lhs_rows, arrays.k, arrays.lhs_ld,
                          Config::kM / Config::kCluster) &&
           tensor_maps_2d(rhs, kCodes, 1, a.rhs.codes, arrays.rhs_rows, arrays.k, arrays.rhs_ld,
                          Config::kN) &&
           (e.direct || tensor_map_2d(out, map_type(e.out_dtype), width, e.out, e.m,
                                      arrays.out_columns, e.ldo * width, 64)) &&
           (e.side == SideTensor::none ||
            tensor_map_2d(side, map_type(e.out_dtype), 2, side_data(a.epilogue), e.m, e.n,
                          int64_t{e.n} * 2, 64));
  }
};

// Starts a GEMM kernel on `blocks` blocks, of which `clusters` run at the same time.
template <class Config, class Params>
Status start(void (*kernel)(Params, CUtensorMap, CUtensorMap, CUtensorMap, CUtensorMap, CUtensorMap,
                            CUtensorMap),
             const Params& p, const Maps& maps, int64_t blocks, int clusters, void* stream) {
  const dim3 grid(
      static_cast<unsigned>((blocks < clusters ? blocks : clusters) * Config::kCluster));
  return launch_early(kernel, {grid, Config::kThreads, stream, Config::kSmem, Config::kCluster}, p,
                      maps.lhs.whole, maps.lhs.end, maps.rhs.whole, maps.rhs.end, maps.out,
                      maps.side);
}

template <class Config, EpilogueKind kEpilogue, class Kind>
Status launch(const Kind& kind, const Device& device) {
  using Params = typename Kind::Params;
  const auto kernel = gemm_kernel<Config, kEpilogue, Params>;
  static ClusterCount counts;
  int clusters;
  const Status fits = counts.of(device.index, reinterpret_cast<const void*>(kernel),
                                Config::kThreads, Config::kSmem, Config::kCluster, clusters);
  if (fits != Status::ok) return fits;
  constexpr int kN = Config::kN * Config::kCluster;
  const GemmArgs& a = kind.gemm();
  const int64_t m = a.lhs.rows, n = a.rhs.rows;
  Params p{};
  p.lhs_scales = static_cast<const uint32_t*>(a.lhs.scales);
  p.rhs_scales = static_cast<const uint32_t*>(a.rhs.scales);
  p.lhs_tiles = static_cast<int>(packed_tiles(m));
  p.rhs_tiles = static_cast<int>(Config::Promotion::rhs_tiles(n));
  p.k_steps = static_cast<int>((a.lhs.k + 127) / 128);
  p.rhs_stands = a.rhs.layout == Layout::standing;
  p.m_blocks = static_cast<int>((m + Config::kM - 1) / Config::kM);
  p.n_blocks = static_cast<int>((n + kN - 1) / kN);
  p.walk_in_groups_of(group_size(clusters, Config::kM, kN));
  const Arrays arrays = kind.fill(p);
  // NOTE: sums of columns count rows past the end, which are zeros where boxes are whole; and those
  // of a group are other groups'.
  constexpr bool kGroups = Params::kSchedule == ScheduleKind::groups;
  p.lhs_rows = kGroups || p.epilogue.bias_grad != nullptr ? Params::kAllRows : static_cast<int>(m);
  p.rhs_rows = kGroups ? Params::kAllRows : static_cast<int>(n);
  Maps maps;
  if (!maps.template make<Config>(a, p.epilogue, arrays)) return Status::unsupported;
  return start<Config>(kernel, p, maps, kind.template blocks<Config>(p), clusters,
                       a.execution.stream);
}

// What go<lhs>() gives, for the element of the tiles of lhs.
template <class Go>
Status with_lhs(const GemmArgs& a, const Go& go) {
  using tile::Fp8;
  return tile_element(a.lhs.element) == Element::e5m2 ? go.template operator()<Fp8::e5m2>()
                                                      : go.template operator()<Fp8::e4m3>();
}

// Both elements of lhs and the epilogues of one shape of blocks.
template <class Shape, class Promotion, class Kind>
Status launch_any(const Kind& kind, const Device& device) {
  using tile::Fp8;
  const GemmArgs& a = kind.gemm();
  const auto go = [&]<Fp8 kLhs>() {
    using Config = GemmConfig<Shape, ByteOperands<kLhs>, Promotion>;
    if constexpr (Kind::kEveryEpilogue && Config::kFull) {
      if (side_tensor(a.epilogue, a.rhs.rows) == SideTensor::gelu_in)
        return launch<Config, EpilogueKind::backward>(kind, device);
      if (needs_full(a.epilogue)) return launch<Config, EpilogueKind::full>(kind, device);
    }
    if (Kind::kEveryEpilogue && needs_full(a.epilogue)) return Status::bad_argument;
    using WavesApart = typename Promotion::WavesApart;
    if constexpr (Kind::kEveryEpilogue && Config::kWaves > 1 && !std::is_void_v<WavesApart>) {
      using Adding = GemmConfig<Shape, ByteOperands<kLhs>, WavesApart>;
      if (only_adds(a.epilogue, a.rhs.rows)) return launch<Adding, EpilogueKind::add>(kind, device);
    }
    return launch<Config, EpilogueKind::plain>(kind, device);
  };
  return with_lhs(a, go);
}

// --------------------------------------------------------------------------------------- dense
// One product, K in one piece.
struct Dense {
  using Params = GemmParams;
  static constexpr bool kEveryEpilogue = true;
  const GemmArgs& args;

  const GemmArgs& gemm() const { return args; }
  Arrays fill(Params& p) const {
    const int64_t m = args.lhs.rows, n = args.rhs.rows, k = args.lhs.k;
    p.epilogue = epilogue_params(args.epilogue, m, n, args.execution.workspace);
    return {m, n, k, packed_ld(k), packed_ld(k), n};
  }
  template <class Config>
  int64_t blocks(const Params& p) const {
    return static_cast<int64_t>(p.m_blocks) * p.n_blocks;
  }
};

}  // namespace te_mx::sm90
