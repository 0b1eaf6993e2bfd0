// The launches of factor_tiles.
#include "decode/decode_run.cuh"
#include "decode/factor_tiles.cuh"

namespace te_mx::sm90 {
namespace {

template <class Math>
Status run(FactorTilesParams p, const DecodeTask& t, int cluster) {
  p.cluster = cluster, p.parts = shares_of(p.quads, cluster);
  p.blocks = (p.m + Math::kCols - 1) / Math::kCols;
  const FactorRoom room = Math::room(cluster, p.parts.least + (p.parts.longer > 0 ? 1 : 0));
  p.stages = room.stages, p.sums_at = room.sums_at;
  mxtile::sm90::TensorMaps maps;
  if (!mxtile::sm90::tensor_maps_2d(maps, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, t.w.from, t.w.rows,
                                    t.w.row_bytes, t.w.ld, kFactorTile))
    return Status::unsupported;
  const auto kernel = &factor_tiles<Math>;
  const int tiles = (p.n + kFactorTile - 1) / kFactorTile;
  const dim3 grid(static_cast<unsigned>(tiles * p.blocks * cluster));
  const int smem = std::max(room.bytes, Math::kLeastSmem);
  return launch_early(kernel, {grid, kFactorThreads, t.stream, smem, cluster}, maps.whole, maps.end,
                      p);
}

}  // namespace

Status run_factor_tiles(DecodeTask t, bool factor_rows, int sms) {
  const WeightScales& scales = t.p.w_scales;
  if (reinterpret_cast<uintptr_t>(scales.from) % 16 != 0) return Status::unsupported;
  const auto blocks = static_cast<int>(decode_blocks(t.rows.m, 0, kDecodeMostRows));
  t.p.n = static_cast<int>(t.n), t.p.k = static_cast<int>(t.k);
  t.p.quads = static_cast<int>(decode_quads(t.k)), t.rows.most = kDecodeMostRows;
  const Status status =
      launch_prepare(t.p, t.rows, blocks, kDecodeMostRows, false, true, t.workspace, t.stream);
  if (status != Status::ok) return status;
  FactorTilesParams p;
  p.made = t.p.in.made, p.made_scales = t.p.in.made_scales;
  p.factors = scales.from, p.factors_quad = scales.quad, p.factor_rows = factor_rows;
  p.m = t.rows.m, p.n = t.p.n, p.quads = t.p.quads, p.out = t.p.out;
  const int rows = factor_tile_rows(p.m);
  const int parts = num_splits({SplitKind::factors, p.n, t.k, sms, 0, p.m, rows});
  return rows == 64 ? run<FactorMath<64>>(p, t, parts) : run<FactorMath<128>>(p, t, parts);
}

}  // namespace te_mx::sm90
