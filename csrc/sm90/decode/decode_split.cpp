#include "te_mx/sm90_decode.h"

#include <algorithm>

#include "te_mx/sm90_choice.h"

namespace te_mx::sm90 {
namespace {

// CTAs of two warpgroups that run at once, two on every SM. Clusters of 4 and more leave a part of
// the SMs of a GPC idle: with 240 and 256 CTAs in them products took a second turn on an H200 with
// 132 SMs.
int64_t at_once(int cluster, int sms, double idle) {
  return 2 * (cluster < 4 ? sms : sms - static_cast<int>(sms * idle));
}

// Microseconds. Of one product: those that take the fastest of all splits, or one within 4 % of it,
// of seven shapes with 1 to 16 rows (docs/notes/hopper.md). Of one of several products in a launch,
// SMs that one leaves idle have others: what shortens one, more CTAs, lengthens all.
struct Costs {
  double quad;      // of a tile of 64 rows, in one CTA of two on an SM
  double input;     // a quad of x
  double exchange;  // of sums, for each CTA of a cluster
  double crowd;     // a CTA more on every SM
  double idle;
};
constexpr Costs kAlone{0.35, 0.05, 0.1, 0.0, 2.0 / 11},
    kAmongOthers{0.15, 0.03, 0.08, 0.5, 1.0 / 11};

DecodeSplit narrow_split(int64_t n, int64_t k, int sms, const Costs& costs) {
  const int64_t tiles = ceil_div(decode_groups(n), kDecodeTile), quads = decode_quads(k);
  const double all = static_cast<double>(tiles * quads) * 8448.0 / 4.27e6;  // from HBM
  DecodeSplit best;
  double least = 1e30;
  for (int i = 0; i < kDecodeNarrow; ++i) {
    const DecodeSplit s = decode_split_of(i, n, sms);
    if (s.cluster > quads || (s.tiles == 1 && s.sums() > quads && quads > 1)) continue;
    const int64_t ctas = ceil_div(tiles, s.tiles) * s.cluster, slice = ceil_div(quads, s.cluster);
    const int64_t waves = ceil_div(ctas, at_once(s.cluster, sms, costs.idle));
    const double work = static_cast<double>(waves * slice * s.tiles) * costs.quad;
    const double input = static_cast<double>(waves * slice) * costs.input;
    const double exchange = s.cluster == 1 ? 0.0 : 0.2 + costs.exchange * s.cluster;
    const double crowd = costs.crowd * std::max(0.0, static_cast<double>(ctas) / sms - 1.1);
    const double time = std::max(all, work) + input + exchange + crowd;
    if (time >= least) continue;
    least = time, best = s;
  }
  return best;
}

// That of four warpgroups with the fewest quads a warp, all CTAs at once, in clusters of two at
// most: those of more do not come to lie on an SM each. Of equals the one with less of x for a CTA;
// cluster 0: there is none.
DecodeSplit wide_split(int64_t n, int64_t k, int sms) {
  DecodeSplit best{0};
  int64_t least = 0;
  for (int i = kDecodeNarrow; i < kDecodeNarrow + 6; ++i) {
    const DecodeSplit s = decode_split_of(i, n, sms);
    const int64_t part = ceil_div(decode_quads(k), s.sums());
    if (s.clusters * s.cluster > sms || s.sums() > decode_quads(k)) continue;
    if (best.cluster != 0 && part > least) continue;
    least = part, best = s;
  }
  return best;
}

}  // namespace

DecodeSplit decode_split_of(int index, int64_t n, int sms) {
  if (index < kDecodeNarrow) return {index / 2 + 1, index % 2 + 1};
  const int cluster = (index - kDecodeNarrow) / 3 + 1, tiles = 1 << (index - kDecodeNarrow) % 3;
  // NOTE: decode_narrowed() has the parts of one tile in twice as many CTAs.
  if (cluster > kDecodeMaxCluster / (tiles == 1 ? 2 : 1)) return {0};
  const int64_t groups = decode_groups(n), least = ceil_div(groups, kDecodeTile * tiles);
  const int64_t clusters = std::max(least, std::min<int64_t>(groups, sms / cluster));
  return {cluster, tiles, 4, static_cast<int>(clusters)};
}

DecodeSplit decode_split(int64_t n, int64_t k, int sms, bool grouped) {
  if (grouped) return narrow_split(n, k, sms, kAmongOthers);
  const DecodeSplit narrow = narrow_split(n, k, sms, kAlone), wide = wide_split(n, k, sms);
  if (wide.cluster == 0) return narrow;
  // NOTE: up to 8 rows both took 0.6 us for a quad of every warp, and 0.6 us more in CTAs of two
  // warpgroups, of which not all start early.
  const int64_t ahead =
      ceil_div(decode_quads(k), wide.sums()) - ceil_div(decode_quads(k), narrow.sums());
  return ahead <= 1 ? wide : narrow;
}

// Up to 8 rows leave room for the CTA of the next product, which loads its weights meanwhile: rows
// that are prepared before win later.
bool decode_is_long(int64_t m, int64_t k) {
  const int64_t quads = m * ((decode_quads(k) + 1) / 2);
  return quads > (m > kDecodeOwnRows ? 160 : 256);
}

DecodeRoom decode_room(const DecodeSplit& s, int64_t k, int rows, Element element, bool halves,
                       bool prepared) {
  const int parts = s.parts();
  const int64_t part = ceil_div(decode_quads(k), s.cluster * parts);  // equal but for one quad
  const int warps = 4 * s.warpgroups;
  const int64_t fragments = int64_t{s.tiles} * kDecodeTile * (rows / 8);
  const int64_t sums = ceil_div(fragments, s.cluster) * s.cluster * parts * 512;
  const int64_t input = parts * (decode_input_bytes(rows, halves) + decode_scale_bytes(rows));
  DecodeRoom room;
  const int64_t stage = int64_t{warps} * decode_quad_bytes(element);
  const int64_t needed = std::min<int64_t>(part, kDecodeMaxStages);
  const int64_t bars = decode_bar_bytes(warps);
  // NOTE: the ring starts at a multiple of 1024 bytes, for the swizzle.
  const int64_t around = bars + warps * kDecodeScaleRing + 1008;
  const int64_t most = decode_smem(warps, rows, prepared) - around - sums;
  // Two quads a warp of 16, or four of 4 bits, are twice what HBM wants to have been asked for;
  // then as much of x as there is room for, then more stages.
  int64_t stages = std::min<int64_t>(needed, (element == Element::e2m1 ? 64 : 32) / warps);
  while (stages > 2 && (most - stages * stage) / input < std::min<int64_t>(part, 4)) --stages;
  if ((most - stages * stage) / input < 1) stages = 1;
  // Prepared rows arrive quad by quad; of many rows there is room for few.
  const int64_t steps = (rows <= 16 ? kDecodeMaxSteps : kDecodeMaxSteps / 2) / std::max(2, parts);
  const int64_t wanted = prepared ? std::min(part, steps) : part;
  const int64_t quads = std::min(wanted, (most - stages * stage) / input);
  if (quads < 1) return {};
  stages = std::min(needed, (most - quads * input) / stage);
  room.stages = static_cast<int>(stages), room.input_quads = static_cast<int>(quads);
  room.scales_at = static_cast<int>(quads * parts * decode_input_bytes(rows, halves));
  room.sums_at = static_cast<int>(quads * input);
  room.ring_at = static_cast<int>((room.sums_at + sums + 1023) / 1024 * 1024);
  room.w_scales_at = static_cast<int>(room.ring_at + stages * stage);
  room.bars_at = room.w_scales_at + warps * kDecodeScaleRing;
  room.bytes = static_cast<int>(room.bars_at + bars);
  return room;
}

int64_t decode_workspace(int64_t m, int64_t k, int64_t groups) {
  const int rows = decode_rows(m, groups);
  const int64_t quads = decode_quads(k);
  int64_t few = 0;
  if (rows > kDecodeOwnRows || (groups == 0 && decode_is_long(m, k))) {
    const int kept = std::max(rows, 16);
    few = quads * (decode_input_bytes(kept, true) + decode_scale_bytes(kept)) *
          decode_blocks(m, groups, kept);
  }
  const int rows_wide = wide_rows(m, groups);
  const int64_t blocks = decode_blocks(m, groups, rows_wide);
  const int64_t wide =
      quads * blocks * (kMostPasses * aligned_bytes(rows_wide) + (rows_wide + 15) / 16);
  return std::max(few, wide);
}

}  // namespace te_mx::sm90
