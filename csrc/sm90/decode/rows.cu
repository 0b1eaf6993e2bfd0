// The launches of rows_kernel.
#include "decode/rows_kernel.cuh"
#include "decode/wide_run.cuh"

namespace te_mx::sm90 {
namespace {

template <class Math>
Status run(RowsParams p, const DecodeTask& t, int blocks) {
  p.stages = std::min(p.x.quads, kRowsMostStages);
  while (p.stages > 0 && rows_room<Math>(p.stages, p.x.quads).bytes > kWideSmem) --p.stages;
  if (p.stages < std::min(p.x.quads, Math::kAhead)) return Status::unsupported;
  CUtensorMap map;
  if (!mxtile::sm90::tensor_map_2d(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, t.w.from, t.w.rows,
                                   t.w.row_bytes, t.w.ld, kRowsWeights, kDecodeQuad))
    return Status::unsupported;
  const Status status = launch_align_beside(p.x, t.workspace, blocks, t.stream);
  if (status != Status::ok) return status;
  const dim3 grid((p.n + kRowsWeights - 1) / kRowsWeights, blocks);
  const int smem = std::max(rows_room<Math>(p.stages, p.x.quads).bytes, kDecodeLeastSmem);
  return launch_early(rows_kernel<Math>, {grid, kRowsThreads, t.stream, smem}, map, p);
}

}  // namespace

Status run_rows(const DecodeTask& t, bool factors, int sms) {
  const DecodeOut& out = t.p.out;
  const bool gelu = out.act == Act::gelu || out.act == Act::gelu_erf;
  // NOTE: other activations are those of results that were rounded before.
  if (out.activates && (!gelu || t.n % 2 != 0)) return Status::unsupported;
  for (const auto run : {run_ring, run_dealt}) {
    const Status status = run(t, factors, sms);
    if (status != Status::unsupported) return status;
  }
  RowsParams p;
  p.x.in = t.p.in, p.x.rows_of = t.rows, p.x.m = t.rows.m, p.x.k = static_cast<int>(t.k);
  p.x.spread = 255;  // whatever lies further below becomes zeros
  p.x.quads = static_cast<int>(decode_quads(t.k));
  // NOTE: more rows are two blocks, which share what L2 has of the weight.
  p.x.rows = p.x.rows_of.most = std::min(32, wide_rows(p.x.m, t.rows.groups.count));
  p.words = t.p.w_scales.from, p.words_quad = t.p.w_scales.quad;
  p.words_matrix = t.p.w_scales.matrix;
  p.n = static_cast<int>(t.n), p.out = t.p.out, p.x.factors = factors;
  const auto blocks = static_cast<int>(decode_blocks(p.x.m, t.rows.groups.count, p.x.rows));
  return p.x.rows == 16 ? run<RowsMath<16>>(p, t, blocks) : run<RowsMath<32>>(p, t, blocks);
}

}  // namespace te_mx::sm90
