#include "te_mx/sm90_decode.h"

#include <algorithm>

namespace te_mx::sm90 {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// CTAs that run at once, two on every SM. Clusters of 4 and more leave SMs of a GPC idle: 30 and 15
// with one CTA an SM were counted on an H200 with 132.
int64_t at_once(int cluster, int sms) { return 2 * (cluster < 4 ? sms : sms - sms / 11); }

}  // namespace

DecodeSplit decode_split(int64_t n, int64_t k, int sms) {
  const int64_t tiles = ceil_div(decode_groups(n), kDecodeTile), quads = decode_quads(k);
  // Microseconds by arithmetic: a quad of a tile of 8 bits from HBM, and what one CTA takes of it
  // at most.
  const double unit = 8448.0 / 4.27e6, alone = 0.15;
  const double all = static_cast<double>(tiles * quads) * unit;
  DecodeSplit best;
  double least = 1e30;
  for (int i = 0; i < kDecodeSplits; ++i) {
    const DecodeSplit s = decode_split_of(i);
    if (s.cluster > quads || (s.tiles == 1 && s.cluster * s.parts() > quads && quads > 1)) continue;
    const int64_t ctas = ceil_div(tiles, s.tiles) * s.cluster, slice = ceil_div(quads, s.cluster);
    const int64_t waves = ceil_div(ctas, at_once(s.cluster, sms));
    // x of a slice, and what the exchange of sums takes.
    const double input = static_cast<double>(slice) * 0.03;
    const double exchange = s.cluster == 1 ? 0.0 : 0.2 + 0.08 * s.cluster;
    // What runs beside others on its SM takes the place of the next product.
    const double crowd = 0.5 * std::max(0.0, static_cast<double>(ctas) / sms - 1.1);
    const double work = static_cast<double>(waves * slice * s.tiles) * alone;
    const double time = std::max(all, work) + static_cast<double>(waves) * input + exchange + crowd;
    if (time >= least) continue;
    least = time, best = s;
  }
  return best;
}

DecodeRoom decode_room(const DecodeSplit& s, int64_t k, int rows, Element element, bool halves) {
  const int parts = s.parts();
  const int64_t part = ceil_div(decode_quads(k), s.cluster * parts);  // equal but for one quad
  const int64_t fragments = int64_t{s.tiles} * kDecodeTile * (rows / 8);
  const int64_t sums = ceil_div(fragments, s.cluster) * s.cluster * parts * 512;
  const int64_t input = parts * (decode_input_bytes(rows, halves) + decode_scale_bytes(rows));
  DecodeRoom room;
  room.stage_quads = static_cast<int>(std::min<int64_t>(part, element == Element::e2m1 ? 2 : 1));
  const int64_t stage = int64_t{kDecodeWarps} * room.stage_quads * decode_quad_bytes(element);
  const int64_t needed =
      std::min<int64_t>(ceil_div(part, room.stage_quads), int64_t{kDecodeMaxStages});
  const int64_t bars = kDecodeBarBytes;
  const int64_t most = kDecodeSmem - bars - sums;
  // Four stages are twice what HBM wants to have been asked for; then as much of x as there is room
  // for, then more stages.
  int64_t stages = std::min<int64_t>(needed, 4);
  while (stages > 2 && (most - stages * stage) / input < std::min<int64_t>(part, 4)) --stages;
  if ((most - stages * stage) / input < 1) stages = 1;
  // Prepared rows arrive quad by quad.
  const int64_t wanted = rows > kDecodeOwnRows ? std::min<int64_t>(part, kDecodeMaxSteps) : part;
  const int64_t quads = std::min(wanted, (most - stages * stage) / input);
  if (quads < 1) return {};
  stages = std::min(needed, (most - quads * input) / stage);
  room.stages = static_cast<int>(stages), room.input_quads = static_cast<int>(quads);
  room.scales_at = static_cast<int>(quads * parts * decode_input_bytes(rows, halves));
  room.sums_at = static_cast<int>(quads * input);
  room.ring_at = static_cast<int>(room.sums_at + sums);
  room.bars_at = static_cast<int>(room.ring_at + stages * stage);
  room.bytes = static_cast<int>(room.bars_at + bars);
  return room;
}

int64_t decode_workspace(int64_t m, int64_t k, int64_t groups) {
  const int rows = decode_rows(m, groups);
  if (rows <= kDecodeOwnRows) return 0;
  return decode_quads(k) * (decode_input_bytes(rows, true) + decode_scale_bytes(rows)) *
         decode_blocks(m, groups, rows);
}

}  // namespace te_mx::sm90
