// The launches of dealt_kernel.
#include "decode/dealt_kernel.cuh"
#include "decode/wide_run.cuh"

namespace te_mx::sm90 {
namespace {

template <class Math>
Status run(DealtParams p, const DecodeTask& t) {
  p.x.rows = p.x.rows_of.most = Math::kX;
  p.blocks = (p.x.m + Math::kX - 1) / Math::kX;
  const int longest = (p.x.quads + p.cluster - 1) / p.cluster;
  p.groups = shares_of(kDealtGroups, p.cluster);
  p.adders = p.cluster == 1 ? 0 : (kDealtGroups + p.cluster - 1) / p.cluster;
  p.slots = p.cluster == 1 ? 0 : std::min(longest, kDealtMostSlots);
  p.stages = std::min(longest, kDealtMostStages);
  const auto bytes = [&] {
    return dealt_room<Math>(p.stages, p.slots * p.cluster * p.adders, p.x.quads).bytes;
  };
  while (p.stages > 3 && bytes() > kWideSmem) --p.stages;
  while (p.slots > 2 && bytes() > kWideSmem) --p.slots;
  if (bytes() > kWideSmem) return Status::unsupported;
  mxtile::sm90::TensorMaps maps;
  if (!mxtile::sm90::tensor_maps_2d(maps, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, t.w.from, t.w.rows,
                                    t.w.row_bytes, t.w.ld, kWideRows))
    return Status::unsupported;
  const dim3 grid((p.n + kWideRows - 1) / kWideRows * p.blocks * p.cluster);
  const auto threads = static_cast<unsigned>(kDealtMath + 32 + 32 * p.adders);
  const int smem = std::max(bytes(), kDecodeLeastSmem);
  return launch_early(dealt_kernel<Math>, {grid, threads, t.stream, smem, p.cluster}, maps.whole,
                      maps.end, p);
}

}  // namespace

// NOTE: measured on an NVIDIA H200, 2026-11-29: of more rows products are too many bytes to send.
Status run_dealt(const DecodeTask& t, bool factors, int sms) {
  auto p = params_of<DealtParams>(t, factors);
  p.cluster = num_splits({SplitKind::wide, t.n, t.k, sms});
  if (t.rows.groups.count > 0 || p.x.quads > kDealtMostQuads ||
      reinterpret_cast<uintptr_t>(p.words) % 16 != 0 || p.x.m > 8 || !p.x.in.plain(p.x.k))
    return Status::unsupported;
  return run<DealtMath<8>>(p, t);
}

}  // namespace te_mx::sm90
