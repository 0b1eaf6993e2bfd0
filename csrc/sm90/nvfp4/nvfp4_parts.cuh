// What NVFP4's quantizer is told, and of which part of it a CTA has a tile: one matrix, several of
// one size, or groups of rows.
#pragma once

#include "common/groups.cuh"
#include "te_mx/sm90_nvfp4.h"

namespace te_mx::sm90 {

inline constexpr int kNvfp4Warps = 8, kNvfp4Threads = 32 * kNvfp4Warps,
                     kNvfp4Down = 16 * kNvfp4Warps, kNvfp4Across = 64;
inline constexpr int kMostMatrices = 64;  // of a launch

struct Nvfp4Quantize {
  Nvfp4QuantizeArgs to;
  uint32_t* row_amax;
  uint32_t* col_amax;  // the same where they are the same
  bool vectors;        // rows start at whole 16 bytes
  bool only_amax;
  bool row_words, col_words;  // as do those of results, of which whole vectors are written
};

// Of kMore: groups of rows of x; or so many matrices of as many rows each.
struct Nvfp4Parts {
  GroupTable groups;
  int matrices, first;  // of all, those of this launch begin with `first`
  const void* xs[kMostMatrices];
};

// The matrix, or the group of rows, that a CTA has a tile of.
struct Nvfp4Part {
  const void* x;
  int64_t down;         // its rows before the tile
  int64_t begin, rows;  // where it begins among all, and how many it has
  int64_t row_blocks;   // rows of square scales before its own
  int64_t col_blocks;   // rows of column scales before its own, where these lie as x does
  int group;
};

// Of groups of rows: zeros in the 128 rows from `down` on that belong to none. Before: where a
// group without rows has a scale.
__device__ __forceinline__ void clear_rows(const Nvfp4Quantize& q, const GroupTable& groups,
                                           int64_t down, int64_t col0) {
  const Nvfp4Side &row_to = q.to.row, &col_to = q.to.col;
  const int lane = threadIdx.x % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t cols = q.to.x.cols, col = col0 + lane % 4 * 16;
  if (down == 0 && col0 == 0 && warp == 0) {
    int before = 0;
    for (int first = 0; first < groups.count; first += 32) {
      const GroupRows mine = groups_of_lanes(groups, first, before);
      if (mine.group >= groups.count || mine.size() > 0) continue;
      if (row_to.codes != nullptr && !row_to.scale_rows) row_to.scale[mine.group] = 1.0f;
      if (col_to.codes != nullptr) col_to.scale[mine.group] = 1.0f;
    }
  }
  int last = 0;
  for (int i = lane; groups.capacity == 0 && i < groups.count; i += 32)
    last = max(last, groups.read(i));
  last = __reduce_max_sync(~0u, last);
  const auto across = static_cast<int>(max(int64_t{0}, min(int64_t{16}, cols - col)));
#pragma unroll 1
  for (int b = 0; b < 2; ++b) {
    const int64_t row = down + 16 * warp + lane / 4 + 8 * b;
    if (row >= groups.rows) continue;
    bool inside = row < last;
    if (groups.capacity != 0) {
      const int64_t group = row / groups.capacity;
      inside = group < groups.count && row < groups.read(static_cast<int>(group));
    }
    if (inside || across == 0) continue;
    const auto zeros = [](uint8_t* to, int64_t bytes) {
      for (int64_t i = 0; i < bytes; ++i) to[i] = 0;
    };
    if (row_to.codes != nullptr) {
      if (row_to.scales == nullptr) {
        zeros(row_to.codes + 2 * (row * cols + col), 2 * across);
      } else {
        zeros(row_to.codes + row * ((cols + 1) / 2) + col / 2, (across + 1) / 2);
        row_to.scales[row * ((cols + 15) / 16) + col / 16] = 0;
      }
      if (row_to.scale_rows && col == 0) row_to.scale[row] = 1.0f;
    }
    if (col_to.codes != nullptr) {
      const int64_t bytes = col_to.scales == nullptr ? 2 : 1;
      zeros(col_to.codes + bytes * (row * cols + col), bytes * across);
    }
  }
}

// What a CTA has; false: nothing. tile: of rows.
__device__ __forceinline__ bool find_part(const Nvfp4Quantize& q, const Nvfp4Parts& parts,
                                          int64_t tile, Nvfp4Part& found) {
  if (parts.matrices == 0) {
    GroupRows group;
    if (!find_tile(parts.groups, static_cast<int>(tile), group)) return false;
    const int64_t bytes = q.to.x.dtype == DType::f32 ? 4 : 2;
    found.x = static_cast<const uint8_t*>(q.to.x.data) + group.start * q.to.x.row_stride * bytes;
    found.down = kNvfp4Down * (tile - group.first_tile());
    found.begin = group.start, found.rows = group.size(), found.group = group.group;
    found.row_blocks = 0, found.col_blocks = group.start / 16 + group.group;
    return true;
  }
  const int64_t rows = q.to.x.rows, tiles = (rows + kNvfp4Down - 1) / kNvfp4Down;
  const auto here = static_cast<int>(tile / tiles);
  found.x = parts.xs[here], found.group = parts.first + here;
  found.down = kNvfp4Down * (tile - here * tiles);
  found.begin = found.group * rows, found.rows = rows;
  found.row_blocks = found.col_blocks = found.group * ((rows + 15) / 16);
  return true;
}

}  // namespace te_mx::sm90
