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
}
int longest(const RingParams& p) { return p.lengths.least + (p.lengths.longer > 0); }

template <class Math>
Status run(RingParams p, const DecodeTask& t, int blocks, bool alone) {
  cut<Math>(p);
  const auto bytes = [&] { return RingPlace<Math>::room_of(p).bytes; };
  const int all =
      dealt_to(p.runs, p.cluster, 0) * p.lengths.least + dealt_to(p.lengths.longer, p.cluster, 0);
  p.stages = std::min(kRingMostStages, all);
  while (p.stages > 0 && bytes() > (alone ? kRingAlone : kWideSmem)) --p.stages;
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
  const int smem = std::max(bytes(), kDecodeLeastSmem);
  return launch_early(ring_kernel<Math>, {grid, kRowsThreads, t.stream, smem, p.cluster}, map, p);
}

}  // namespace

// NOTE: what was faster than dealt_kernel and rows_kernel on an NVIDIA H200, 2026-11-29, of five
// shapes; of groups nothing was timed. Clusters of more than four do not all run at once.
Status run_ring(const DecodeTask& t, bool factors, int sms) {
  using Few = RingMath<8, true, 8, 1>;
  using More = RingMath<16, false, 4>;
  constexpr int kMade = 32;      // rows times quads of a run that CTAs make at once
  constexpr int kLongFrom = 64;  // quads from which more stages are better than the next product's
  if (t.rows.groups.count > 0) return Status::unsupported;
  RingParams p;
  p.x.in = t.p.in, p.x.rows_of = t.rows, p.x.m = t.rows.m, p.x.k = static_cast<int>(t.k);
  p.x.spread = 255;  // whatever lies further below becomes zeros
  p.x.quads = static_cast<int>(decode_quads(t.k)), p.x.factors = factors;
  p.words = t.p.w_scales.from, p.words_quad = t.p.w_scales.quad;
  p.words_matrix = t.p.w_scales.matrix;
  p.n = static_cast<int>(t.n), p.out = t.p.out;
  const int tiles = (p.n + kRowsWeights - 1) / kRowsWeights;
  if (p.x.m <= Few::kX) {
    p.x.rows = p.x.rows_of.most = Few::kX;
    p.cluster = std::min(4, sms / tiles);
    if (p.cluster < 2 || !p.x.in.plain(p.x.k)) return Status::unsupported;
    cut<Few>(p);
    return p.x.m * longest(p) > kMade ? Status::unsupported : run<Few>(p, t, 1, true);
  }
  // NOTE: more rows are two blocks, which share what L2 has of the weight.
  p.x.rows = p.x.rows_of.most = More::kX;
  const int blocks = (p.x.m + More::kX - 1) / More::kX, all = tiles * blocks;
  if (all > sms && (blocks > 1 || !factors)) return Status::unsupported;
  p.cluster = std::clamp((227 * sms / 100 + all) / (2 * all), 1, 4);
  return run<More>(p, t, blocks, p.x.quads >= kLongFrom && all * p.cluster <= sms);
}

}  // namespace te_mx::sm90
