// How a product is cut, and the launches of its kernels.
#pragma once

#include <algorithm>

#include "common/launch.h"
#include "decode/decode_kernel.cuh"
#include "mxtile/sm90/tensor_map.h"

namespace te_mx::sm90 {

// Fills in how weights [n, k] are cut and what of shared memory goes where; unsupported where there
// is no room.
inline Status cut_decode(DecodeParams& p, const DecodeSplit& split, int64_t n, int64_t k, int rows,
                         bool halves, bool prepared) {
  p.n = static_cast<int>(n), p.k = static_cast<int>(k);
  p.groups = static_cast<int>(decode_groups(n)), p.quads = static_cast<int>(decode_quads(k));
  p.split = split;
  p.parts = shares_of(p.quads, split.sums());
  p.tile_shift = split.tiles / 2, p.slice_parts = split.parts();
  const int tile_groups = kDecodeTile * split.tiles;
  p.clusters = std::max(split.clusters, (p.groups + tile_groups - 1) / tile_groups);
  p.cluster_groups = shares_of(p.groups, p.clusters);
  p.room = decode_room(split, k, rows, halves, prepared);
  p.cluster_factor = quotient_factor(split.cluster);
  p.width_factor = quotient_factor(std::max(1, p.room.input_quads * split.parts()));
  p.each_factor = quotient_factor(std::max(1, p.room.input_quads));
  return p.room.stages == 0 ? Status::unsupported : Status::ok;
}

// Prepares `blocks` blocks of `kept` rows in a workspace of decode_workspace(), as fp16 numbers or
// as codes with scales of either kind, for a kernel that follows at once. Of weights in any format.
Status launch_prepare(DecodeParams& p, const DecodeRows& rows, int64_t blocks, int kept,
                      bool halves, bool factors, void* workspace, void* stream);

// The codes of weights: rows of all groups, row_bytes of which are there, ld bytes apart.
struct DecodeCodes {
  const uint8_t* from = nullptr;
  int64_t rows = 0, row_bytes = 0, ld = 0;
};

// Launches the kernel on `blocks` blocks of at most Math::kRows rows, of weights that cut_decode
// was asked about, prepared just before or not at all.
template <class Math>
Status launch_decode(const DecodeParams& p, const DecodeCodes& w, const DecodeRows& rows,
                     int64_t blocks, void* stream) {
  CUtensorMap map;
  if (!mxtile::sm90::tensor_map_2d(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, w.from, w.rows,
                                   w.row_bytes, w.ld, kDecodeRows, Math::kQuadBytes / kDecodeRows))
    return Status::unsupported;
  const auto kernel = &decode_kernel<Math>;
  const dim3 grid(static_cast<unsigned>(p.clusters * p.split.cluster),
                  static_cast<unsigned>(blocks));
  const int smem = std::max(p.room.bytes, kDecodeLeastSmem);
  return launch_early(kernel, {grid, 32 * Math::kWarps, stream, smem, p.split.cluster}, map, p,
                      rows);
}

}  // namespace te_mx::sm90
