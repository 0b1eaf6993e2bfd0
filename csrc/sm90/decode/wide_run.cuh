// The launches of kernels with 128 rows of weights a CTA.
#pragma once

#include <algorithm>

#include "common/launch.h"
#include "decode/decode_run.cuh"
#include "decode/wide_kernel.cuh"

namespace te_mx::sm90 {

// Prepares all rows of x, in so many blocks, for a kernel that follows at once.
Status launch_align(const AlignedInput& x, int blocks, void* stream);

// Shared memory of a CTA. NOTE: two share an SM: those of a product and of the next.
inline constexpr int kWideSmem = 112 * 1024;

// Fills in blocks and stages of `p`, a part of `params`; has x prepared, and starts the kernel.
// row_bytes: of a row of weights in a stage.
template <class Math, class Params>
Status launch_wide(void (*kernel)(CUtensorMap, Params), Params& params, WideParams& p,
                   const DecodeTask& t, int row_bytes, int threads) {
  const int groups = t.rows.groups.count;
  const auto blocks = static_cast<int>(decode_blocks(p.x.m, groups, Math::kX));
  p.blocks = groups > 0 ? 1 : blocks;
  p.x.rows = p.x.rows_of.most = Math::kX;
  const int longest = p.parts.least + 1;
  p.stages = std::min(longest, kWideMostStages);
  const auto bytes = [&] { return wide_room<Math>(p.stages, p.cluster, longest).bytes; };
  while (p.stages > 0 && bytes() > kWideSmem) --p.stages;
  if (p.stages < 2) return Status::unsupported;
  CUtensorMap map;
  if (!mxtile::sm90::tensor_map_2d(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, t.w.from, t.w.rows,
                                   t.w.row_bytes, t.w.ld, kWideRows, row_bytes))
    return Status::unsupported;
  if constexpr (!Math::kMakesX) {
    p.x.made = static_cast<uint8_t*>(t.workspace);
    p.x.passes = p.x.made + int64_t{blocks} * kMostPasses * p.x.quads * aligned_bytes(Math::kX);
    const Status status = launch_align(p.x, blocks, t.stream);
    if (status != Status::ok) return status;
  }
  static thread_local int prepared = -1;  // the device whose limit is raised
  int device = 0;
  cudaGetDevice(&device);
  if (prepared != device) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kWideSmem);
    if (error != cudaSuccess) return started(error);
    prepared = device;
  }
  const int tiles = (p.n + kWideRows - 1) / kWideRows;
  const dim3 grid(tiles * p.blocks * p.cluster, groups > 0 ? blocks : 1);
  const int smem = std::max(bytes(), kDecodeLeastSmem);
  return launch_early(kernel, {grid, static_cast<unsigned>(threads), t.stream, smem, p.cluster},
                      map, params);
}

// What does not depend on the instance.
inline WideParams wide_params(const DecodeTask& t, int spread, int cluster) {
  WideParams p;
  p.x.in = t.p.in, p.x.rows_of = t.rows, p.x.m = t.rows.m, p.x.k = static_cast<int>(t.k),
  p.x.spread = spread;
  p.x.quads = static_cast<int>(decode_quads(t.k));
  p.words = t.p.w_scales.from, p.words_quad = t.p.w_scales.quad;
  p.n = static_cast<int>(t.n), p.cluster = cluster, p.out = t.p.out;
  p.parts = shares_of(p.x.quads, p.cluster);
  return p;
}

// Whether every CTA makes its slice of few rows of x, `rows` in a block, `most` quads times rows.
inline bool wide_makes(const WideParams& p, int rows, int most) {
  return rows <= 8 && p.x.in.plain(p.x.k) &&
         (p.parts.least + 1) * std::max(std::min(p.x.m, 8), 3) <= most;
}

}  // namespace te_mx::sm90
