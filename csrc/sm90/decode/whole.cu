// The launches of whole_kernel.
#include "decode/whole_kernel.cuh"

#include "decode/wide_run.cuh"

namespace te_mx::sm90 {
namespace {

constexpr int kWholeMostStages = 64;
constexpr int kWholeAlone = 224 * 1024;  // bytes of shared memory of a CTA that has an SM alone

// bytes: of shared memory, of a CTA.
Status run(WholeParams p, const DecodeTask& t, int bytes) {
  p.x_stages = std::min(p.x_stages, p.runs());
  p.stages = std::min(p.x.quads, kWholeMostStages) + 1;
  do {
    --p.stages, p.room = whole_room(p);
  } while (p.stages > 0 && p.room.bytes > bytes);
  // NOTE: a warpgroup waits for its quads while those of all runs before may be under way.
  if (p.stages < std::min(p.x.quads, p.turns * kWholeAhead)) return Status::unsupported;
  CUtensorMap map;
  if (!mxtile::sm90::tensor_map_2d(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, t.w.from, t.w.rows,
                                   t.w.row_bytes, t.w.ld, p.cols(), kDecodeQuad))
    return Status::unsupported;
  const Status status = launch_align_beside(p.x, t.workspace, 1, t.stream);
  if (status != Status::ok) return status;
  const int ctas = (p.n + p.cols() - 1) / p.cols();
  const dim3 grid((ctas + p.cluster - 1) / p.cluster * p.cluster);
  const auto threads = static_cast<unsigned>(p.halves * p.turns * kRowsMath + 64);
  const int smem = std::max(p.room.bytes, kDecodeLeastSmem);
  return launch_early(whole_kernel, {grid, threads, t.stream, smem, p.cluster}, map, p);
}

}  // namespace

// NOTE: measured on an NVIDIA H200, 2026-11-29. Up to 32 rows ring_kernel is faster, and where 32
// rows of weights a CTA would leave half of the chip idle.
Status run_whole(const DecodeTask& t, bool factors, int sms) {
  auto p = params_of<WholeParams>(t, factors);
  const int ctas = (p.n + kWholeCols - 1) / kWholeCols;
  if (t.rows.groups.count > 0 || p.x.m <= kWholeA / 2 || p.x.m > kWholeA || 2 * ctas <= sms ||
      reinterpret_cast<uintptr_t>(p.words) % 16 != 0)
    return Status::unsupported;
  p.x.rows = p.x.rows_of.most = kWholeA;
  if (ctas <= sms) {
    p.turns = 3, p.x_stages = 6;
    return run(p, t, kWholeAlone);
  }
  if (ctas <= 2 * sms) {
    p.turns = 2, p.cluster = 4, p.x_stages = 4;
  } else {
    p.halves = 2, p.x_stages = 2;
  }
  const Status status = run(p, t, kWideSmem);
  return status == Status::unsupported ? run(p, t, kWholeAlone) : status;
}

}  // namespace te_mx::sm90
