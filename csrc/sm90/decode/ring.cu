// The launches of ring_kernel.
#include "decode/ring_kernel.cuh"
#include "decode/wide_run.cuh"

namespace te_mx::sm90 {
namespace {

// Shared memory of a CTA that has an SM alone.
constexpr int kRingAlone = 224 * 1024;

// k in rounds of runs as long as there are registers for.
template <class Math>
void cut(RingParams& p) {
  const int round = 2 * p.cluster, most = round * Math::kAhead;
  p.runs = std::min(p.x.quads, (p.x.quads + most - 1) / most * round);
  p.lengths = shares_of(p.x.quads, p.runs);
  p.dealt = {p.runs / round, p.runs % round};
  p.longer = {p.lengths.longer / round, p.lengths.longer % round};
}

// alone: a CTA has an SM alone.
template <class Math>
Status run(RingParams p, const DecodeTask& t, bool alone) {
  p.x.rows = p.x.rows_of.most = Math::kX;
  const auto blocks = static_cast<int>(decode_blocks(p.x.m, t.rows.groups.count, Math::kX));
  cut<Math>(p);
  const int all = p.dealt.to(0) * p.lengths.least + p.longer.to(0);
  p.stages = std::min(kRingMostStages, all) + 1;
  do {
    --p.stages, p.room = ring_room<Math>(p);
  } while (p.stages > 0 && p.room.bytes > (alone ? kRingAlone : kWideSmem));
  if (p.stages < std::min(all, Math::kAhead)) return Status::unsupported;
  CUtensorMap map;
  if (!mxtile::sm90::tensor_map_2d(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, t.w.from, t.w.rows,
                                   t.w.row_bytes, t.w.ld, kRowsWeights, kDecodeQuad))
    return Status::unsupported;
  if constexpr (!Math::kMakesX) {
    const Status status = launch_align_beside(p.x, t.workspace, blocks, t.stream);
    if (status != Status::ok) return status;
  }
  const dim3 grid((p.n + kRowsWeights - 1) / kRowsWeights * p.cluster, blocks);
  const int smem = std::max(p.room.bytes, kDecodeLeastSmem);
  return launch_early(ring_kernel<Math>, {grid, kRowsThreads, t.stream, smem, p.cluster}, map, p);
}

}  // namespace

// NOTE: what was fastest on an NVIDIA H200, 2026-11-29, of five shapes; of groups nothing was
// timed. Clusters of more than four do not all run at once.
Status run_rows(const DecodeTask& t, bool factors, int sms) {
  using Few = RingMath<8, true, 8, 1>;
  using More = RingMath<16, false, 4>;
  using Many = RingMath<32, false, 2>;
  using Alone = RingMath<32, false, 4, 1>;
  constexpr int kLongFrom = 64;  // quads from which more stages are better than the next product's
  const DecodeOut& out = t.p.out;
  const bool gelu = out.act == Act::gelu || out.act == Act::gelu_erf;
  // NOTE: other activations are those of results that were rounded before.
  if (out.activates && (!gelu || t.n % 2 != 0)) return Status::unsupported;
  auto p = params_of<RingParams>(t, factors);
  p.words_matrix = t.p.w_scales.matrix;
  const int tiles = (p.n + kRowsWeights - 1) / kRowsWeights, m = p.x.m;
  if (t.rows.groups.count > 0) {
    return wide_rows(m, t.rows.groups.count) == 16 ? run<More>(p, t, false)
                                                   : run<Many>(p, t, false);
  }
  if (m <= Few::kX && p.x.in.plain(p.x.k) && (m <= 4 ? tiles : 2 * tiles) <= sms) {
    p.cluster = 2 * tiles <= sms ? 2 : 1, p.at_once = m <= 4 ? 10 : 6;
    const Status status = run<Few>(p, t, true);
    if (status != Status::unsupported) return status;
  }
  Status status = run_whole(t, factors, sms);
  if (status != Status::unsupported) return status;
  status = run_dealt(t, factors, sms);
  if (status != Status::unsupported) return status;
  const int blocks = (m + More::kX - 1) / More::kX, all = tiles * blocks;
  if (blocks == 1) {
    p.cluster = std::clamp((227 * sms / 100 + all) / (2 * all), 1, 4);
    return run<More>(p, t, p.x.quads >= kLongFrom && all * p.cluster <= sms);
  }
  const int ctas = tiles * ((m + Many::kX - 1) / Many::kX);
  p.cluster = ctas <= sms ? 2 : 1;
  if (2 * all <= sms) return run<More>(p, t, true);
  if (2 * ctas <= sms) return run<Alone>(p, t, true);
  if (ctas > sms || p.x.quads < kLongFrom) return run<Many>(p, t, false);
  p.cluster = 1;
  return run<Alone>(p, t, true);
}

}  // namespace te_mx::sm90
