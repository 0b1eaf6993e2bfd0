#include "te_mx/sm90_decode.h"

#include <algorithm>

namespace te_mx::sm90 {

// Up to 8 rows leave room for the CTA of the next product, which loads its weights meanwhile: rows
// that are prepared before win later.
bool decode_is_long(int64_t m, int64_t k) {
  const int64_t quads = m * ((decode_quads(k) + 1) / 2);
  return quads > (m > kDecodeOwnRows ? 160 : 256);
}

DecodeRoom decode_room(const DecodeSplit& s, int64_t k, int rows, bool halves, bool prepared) {
  const int parts = s.parts();
  const int64_t part = ceil_div(decode_quads(k), s.cluster * parts);  // equal but for one quad
  const int warps = 4 * s.warpgroups;
  const int64_t fragments = int64_t{s.tiles} * kDecodeTile * (rows / 8);
  const int64_t sums = ceil_div(fragments, s.cluster) * s.cluster * parts * 512;
  const int64_t input = parts * (decode_input_bytes(rows, halves) + decode_scale_bytes(rows));
  DecodeRoom room;
  const int64_t stage = int64_t{warps} * kDecodeQuadBytes;
  const int64_t needed = std::min<int64_t>(part, kDecodeMaxStages);
  const int64_t bars = decode_bar_bytes(warps);
  // NOTE: the ring starts at a multiple of 1024 bytes, for the swizzle.
  const int64_t around = bars + warps * kDecodeScaleRing + 1008;
  const int64_t most = decode_smem(warps, rows, prepared) - around - sums;
  // Two quads a warp of 16 are twice what HBM wants to have been asked for;
  // then as much of x as there is room for, then more stages.
  int64_t stages = std::min<int64_t>(needed, 32 / warps);
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
