#include <algorithm>

#include "te_mx/sm90_decode.h"

namespace te_mx::sm90 {
namespace {

int ceil_div(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

}  // namespace

DecodeSplit decode_split(int64_t n, int64_t k, int sms) {
  const int64_t all = decode_groups(n), quads = decode_quads(k);
  DecodeSplit best;
  double least = 1e30;
  for (const int cluster : {1, 2, 4, 8}) {
    if (cluster > quads) break;
    const int slice = ceil_div(quads, cluster);
    if (slice > 24 && cluster < 8) continue;  // inputs of 16 rows would take much shared memory
    // Clusters of 4 and more leave the SMs idle that are over in a GPC.
    const int at_once = cluster < 4 ? sms / cluster : std::max(sms / 16 * 16 / cluster, 1);
    const int waves = ceil_div(all, int64_t{at_once} * kDecodeMaxWarps);
    const int groups = ceil_div(all, int64_t{at_once} * waves);
    // Microseconds: a quad from HBM, inputs of a quad, what the exchange of sums takes.
    const double exchange = cluster == 1 ? 0.0 : 0.4 + 0.05 * cluster;
    const double time = waves * (groups * slice * 0.066 + slice * 0.05 + exchange);
    if (time >= least) continue;
    least = time;
    best.cluster = cluster, best.groups = groups;
    best.parts = std::clamp(kDecodeMaxWarps / groups, 1, std::min(4, slice));
    best.warps = groups * best.parts;
  }
  return best;
}

DecodeRoom decode_room(const DecodeSplit& s, int64_t k, int rows, Element element, int most) {
  DecodeRoom room;
  const int64_t quads = decode_quads(k);
  const int bytes = decode_quad_bytes(element);
  // Parts are equal but for one quad.
  const int part = ceil_div(quads, s.cluster * s.parts);
  room.slice_quads = static_cast<int>(std::min<int64_t>(quads, int64_t{part} * s.parts));
  room.slots = ceil_div(s.groups, s.cluster);
  const int units = ceil_div(s.groups * s.parts, s.warps);
  const int64_t x = int64_t{room.slice_quads} * kDecodeQuad * rows * 2;
  const int64_t scales = int64_t{room.slice_quads} * 4 * rows * 4;
  const int64_t sums = int64_t{room.slots} * s.cluster * s.parts * kDecodeRows * rows * 4;
  const int bars = s.warps * kDecodeMaxStages * 8;
  const int64_t ring = most - x - scales - sums - bars;
  if (ring < int64_t{s.warps} * bytes) return room;
  const int per_warp = static_cast<int>(ring / s.warps / bytes);  // quads
  room.stage_quads = std::min({part, std::max(1, per_warp / 2), std::max(1, 6400 / bytes)});
  room.stages = std::min({kDecodeMaxStages, per_warp / room.stage_quads,
                          units * ceil_div(part, room.stage_quads)});
  room.x_at = s.warps * room.stages * room.stage_quads * bytes;
  room.scales_at = room.x_at + static_cast<int>(x);
  room.sums_at = room.scales_at + static_cast<int>(scales);
  room.bars_at = room.sums_at + static_cast<int>(sums);
  room.bytes = room.bars_at + bars;
  return room;
}

}  // namespace te_mx::sm90
