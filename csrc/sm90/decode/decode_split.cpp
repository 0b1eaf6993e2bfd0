#include "te_mx/sm90_decode.h"

#include <algorithm>

namespace te_mx::sm90 {
namespace {

int ceil_div(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

// Clusters that run at once, a CTA on every SM. Those of 4 and more leave SMs of a GPC idle: 30 and
// 15 were counted on an H200 with 132.
int at_once(int cluster, int sms) {
  return std::max(1, cluster < 4 ? sms / cluster : (sms - sms / 11) / cluster);
}

// Quads of x that fit beside a ring, for 8 rows; groups of a cluster; parts of a slice.
constexpr int kMostSlice = 40, kMostGroups = 16, kMostParts = 8;

}  // namespace

DecodeSplit decode_split(int64_t n, int64_t k, int sms) {
  const int64_t all = decode_groups(n), quads = decode_quads(k);
  DecodeSplit best;
  double least = 1e30;
  for (const int cluster : {1, 2, 4, 8}) {
    if (cluster > quads) break;
    const int slice = ceil_div(quads, cluster);
    if (slice > kMostSlice && cluster < 8) continue;
    const int64_t room = at_once(cluster, sms);
    const int waves = ceil_div(all, room * kMostGroups);
    const int groups = ceil_div(all, room * waves);
    // Microseconds: a quad from HBM, inputs of a quad, what the exchange of sums takes.
    const double exchange = cluster == 1 ? 0.0 : cluster == 2 ? 0.3 : cluster == 4 ? 0.5 : 0.9;
    const double time = waves * (groups * slice * 0.066 + slice * 0.09 + exchange);
    if (time >= least) continue;
    least = time;
    best.cluster = cluster, best.groups = groups;
  }
  const int slice = ceil_div(quads, best.cluster);
  const int most = std::clamp(kDecodeMaxWarps / best.pairs(), 1, std::min(kMostParts, slice));
  best.parts = ceil_div(slice, ceil_div(slice, most));  // no more than shorten the longest
  return best;
}

DecodeRoom decode_room(const DecodeSplit& s, int64_t k, int rows, Element element, bool resident) {
  const int64_t quads = decode_quads(k);
  const int bytes = 2 * decode_quad_bytes(element), warps = s.warps();
  const int part = ceil_div(quads, s.cluster * s.parts);  // parts are equal but for one quad
  const int64_t slice = std::min<int64_t>(quads, int64_t{part} * s.parts);
  const int64_t step = int64_t{s.parts} * decode_input_bytes(rows);
  const int64_t sums =
      int64_t{ceil_div(s.groups, s.cluster)} * s.cluster * s.parts * kDecodeRows * rows * 4;
  const int bars = (warps + 3) * kDecodeMaxStages * 8;
  const int64_t most = kDecodeSmem - bars;
  DecodeRoom room;
  room.stage_quads = std::min(part, element == Element::e2m1 ? 2 : 1);
  const int64_t stage = int64_t{warps} * room.stage_quads * bytes;
  // At least half of what HBM wants to have been asked for, and the rest if there is room.
  const int64_t want = std::min<int64_t>(ceil_div(part, room.stage_quads) * stage, 48 * 1024);
  int64_t x = slice * decode_input_bytes(rows), end = sums;
  if (!resident) {  // sums lie where weights and inputs were
    int steps = std::min(kDecodeMaxStages, part);
    while (steps > 0 && (steps * step + want > most || (steps > 4 && steps * step > most / 3)))
      --steps;
    if (steps < std::min(2, part)) return {};
    room.input_stages = steps;
    x = steps * step, end = 0;
  }
  const int64_t stages = std::min<int64_t>(
      {kDecodeMaxStages, ceil_div(part, room.stage_quads), (most - x - end) / stage});
  if (stages < 1 || (!resident && stages * stage < want / 2)) return {};
  room.stages = static_cast<int>(stages);
  room.x_at = static_cast<int>(stages * stage);
  room.sums_at = resident ? static_cast<int>(room.x_at + x) : 0;
  room.bars_at = static_cast<int>(std::max(room.x_at + x, room.sums_at + sums));
  room.bytes = room.bars_at + bars;
  return room.bytes <= kDecodeSmem ? room : DecodeRoom{};
}

}  // namespace te_mx::sm90
