// The launches of tiles_kernel.
#include "decode/tiles_kernel.cuh"
#include "decode/wide_run.cuh"

namespace te_mx::sm90 {
namespace {

// Numbers of quads times rows of x, of a part of k, up to which CTAs make x, by themselves or two
// of them together; beyond a kernel before is faster.
constexpr int kOwnQuads = 512, kSharedQuads = 256;

template <class Math>
Status run(TilesParams p, const DecodeTask& t) {
  p.blocks = (p.x.m + Math::kX - 1) / Math::kX;
  p.x.rows = p.x.rows_of.most = Math::kX;
  const int longest = p.parts.least + 1;
  p.stages = std::min(longest, kTilesMostStages);
  const auto bytes = [&] { return tiles_room<Math>(p.stages, p.cluster, longest).bytes; };
  while (p.stages > 0 && bytes() > kWideSmem) --p.stages;
  if (p.stages < 2) return Status::unsupported;
  mxtile::sm90::TensorMaps maps;
  if (!mxtile::sm90::tensor_maps_2d(maps, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, t.w.from, t.w.rows,
                                    t.w.row_bytes, t.w.ld, kTilesRows))
    return Status::unsupported;
  if constexpr (!Math::kMakesX) {
    p.x.made = static_cast<uint8_t*>(t.workspace);
    p.x.passes = p.x.made + int64_t{p.blocks} * kMostPasses * p.x.quads * aligned_bytes(Math::kX);
    const Status status = launch_align(p.x, p.blocks, t.stream);
    if (status != Status::ok) return status;
  }
  const auto kernel = &tiles_kernel<Math>;
  // NOTE: scales have an even number of tiles.
  const int tiles = (p.n + kTilesRows - 1) / kTilesRows, ctas = Math::kPeers * p.cluster;
  const dim3 grid((tiles + Math::kPeers - 1) / Math::kPeers * p.blocks * ctas);
  const int smem = std::max(bytes(), kDecodeLeastSmem);
  return launch_early(kernel, {grid, kTilesThreads, t.stream, smem, ctas}, maps.whole, maps.end, p);
}

}  // namespace

// NOTE: as many columns of the tensor cores as the rows need, with the same sums of each row.
Status run_tiles(const DecodeTask& t, int spread, int sms) {
  auto p = params_of<TilesParams>(t, false, spread);
  p.cluster = num_splits({SplitKind::wide, t.n, t.k, sms});
  p.parts = shares_of(p.x.quads, p.cluster);
  if (p.x.in.plain(p.x.k)) {
    if (p.x.m <= 8) return run<TilesMath<8, true>>(p, t);
    if (p.x.m <= 16 && p.parts.least * 16 <= kOwnQuads) return run<TilesMath<16, true>>(p, t);
    if (p.x.m > 16 && p.x.m <= 32 && 2 * p.cluster <= kDecodeMaxCluster &&
        p.parts.least * 32 <= kSharedQuads)
      return run<TilesMath<32, true, 2>>(p, t);
  }
  const int rows = wide_rows(p.x.m);
  return rows == 16   ? run<TilesMath<16, false>>(p, t)
         : rows == 32 ? run<TilesMath<32, false>>(p, t)
                      : run<TilesMath<64, false>>(p, t);
}

}  // namespace te_mx::sm90
