// The launches of wide_kernel.
#include <algorithm>

#include "common/launch.h"
#include "decode/decode_run.cuh"
#include "decode/wide_kernel.cuh"

namespace te_mx::sm90 {
namespace {

constexpr int kMostSmem = 112 * 1024;  // two CTAs share an SM: those of a product and of the next

template <class Math>
Status run(WideParams p, const DecodeTask& t) {
  p.blocks = (p.x.m + Math::kX - 1) / Math::kX;
  const int longest = p.parts.least + 1;
  p.stages = std::min(longest, kWideMostStages);
  while (p.stages > 0 && Math::room(p.stages, p.cluster, longest).bytes > kMostSmem) --p.stages;
  if (p.stages < 2) return Status::unsupported;
  CUtensorMap map;
  if (!mxtile::sm90::tensor_map_2d(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, t.w.from, t.w.rows,
                                   t.w.row_bytes, t.w.ld, kWideRows))
    return Status::unsupported;
  if constexpr (!Math::kMakesX) {
    p.x.rows = Math::kX;
    p.x.made = static_cast<uint8_t*>(t.workspace);
    p.x.passes = p.x.made + int64_t{p.blocks} * kMostPasses * p.x.quads * aligned_bytes(Math::kX);
    const dim3 grid(p.x.quads, (p.x.m + kAlignRows - 1) / kAlignRows);
    const Status status = launch_early(align_rows, {grid, kAlignThreads, t.stream, 0, 1}, p.x);
    if (status != Status::ok) return status;
  }
  const auto kernel = &wide_kernel<Math>;
  static thread_local int prepared = -1;  // the device whose limit is raised
  int device = 0;
  cudaGetDevice(&device);
  if (prepared != device) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostSmem);
    if (error != cudaSuccess) return started(error);
    prepared = device;
  }
  const int tiles = (p.n + kWideRows - 1) / kWideRows;
  const int bytes = std::max(Math::room(p.stages, p.cluster, longest).bytes, kDecodeLeastSmem);
  const dim3 grid(tiles * p.blocks * p.cluster);
  return launch_early(kernel, {grid, kWideThreads, t.stream, bytes, p.cluster}, map, p);
}

}  // namespace

// NOTE: as many columns of the tensor cores as the rows need, with the same sums of each row.
Status run_wide(const DecodeTask& t, int spread, int sms) {
  WideParams p;
  p.x.in = t.p.in, p.x.m = t.rows.m, p.x.k = static_cast<int>(t.k), p.x.spread = spread;
  p.x.quads = static_cast<int>(decode_quads(t.k));
  p.words = t.p.w_scales.from, p.words_quad = t.p.w_scales.quad;
  p.n = static_cast<int>(t.n), p.cluster = wide_cluster(t.n, t.k, sms), p.out = t.p.out;
  p.parts = shares_of(p.x.quads, p.cluster);
  const int m = p.x.m, rows = wide_rows(m);
  if (m <= 8 && p.x.in.plain(t.k) && (p.parts.least + 1) * std::max(m, 3) <= kWideOwnQuads) {
    const Status status = run<WideMath<8, true>>(p, t);
    if (status != Status::unsupported) return status;
  }
  return rows == 16   ? run<WideMath<16, false>>(p, t)
         : rows == 32 ? run<WideMath<32, false>>(p, t)
                      : run<WideMath<64, false>>(p, t);
}

}  // namespace te_mx::sm90
