// What NVFP4's quantizer is told, of which part of it a CTA has a tile: one matrix or two, several
// of one size, or groups of rows; and how it reads sixteen numbers and writes what they become.
#pragma once

#include "common/groups.cuh"
#include "common/numbers.cuh"
#include "nvfp4/nvfp4_operand.cuh"
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

// Two matrices or one: the tiles of the first, then those of the second.
struct Nvfp4Two {
  Nvfp4Quantize of[2];
  int first;
  // Of rows and columns of both: the scale that theirs is multiplied with, as its largest magnitude
  // where it is one of these.
  const uint32_t* times_amax[4];
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

// Sixteen numbers side by side, of which `count` exist; the others are 0.
__device__ __forceinline__ void load_block(const Nvfp4Quantize& q, const void* data, int64_t row,
                                           int64_t col, int count, float (&v)[16]) {
  const Matrix& x = q.to.x;
  const int64_t at = row * x.row_stride + col;
  if (count < 16 || !q.vectors) {
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = i < count ? load_number(data, at + i, x.dtype) : 0.0f;
  } else if (x.dtype == DType::f32) {
    const auto* const from = reinterpret_cast<const float4*>(static_cast<const float*>(data) + at);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 w = __ldg(from + i);
      v[4 * i] = w.x, v[4 * i + 1] = w.y, v[4 * i + 2] = w.z, v[4 * i + 3] = w.w;
    }
  } else {
    const auto* const from =
        reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(data) + at);
    const uint4 w[2] = {__ldg(from), __ldg(from + 1)};
    const uint32_t words[8] = {w[0].x, w[0].y, w[0].z, w[0].w, w[1].x, w[1].y, w[1].z, w[1].w};
    const bool bf16 = x.dtype == DType::bf16;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 two = bf16 ? make_float2(__uint_as_float(words[i] << 16),
                                            __uint_as_float(words[i] & 0xFFFF0000u))
                              : __half22float2(as<__half2>(words[i]));
      v[2 * i] = two.x, v[2 * i + 1] = two.y;
    }
  }
}

// n bytes of words, of which all exist where rows are vectors.
template <int kWords>
__device__ __forceinline__ void put(uint8_t* to, const uint32_t (&w)[8], int n, bool vectors) {
  if (n == 4 * kWords && vectors) {
    if constexpr (kWords == 2) {
      *reinterpret_cast<uint2*>(to) = make_uint2(w[0], w[1]);
    } else {
      reinterpret_cast<uint4*>(to)[0] = make_uint4(w[0], w[1], w[2], w[3]);
      reinterpret_cast<uint4*>(to)[1] = make_uint4(w[4], w[5], w[6], w[7]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 4 * kWords; ++i)
    if (i < n) to[i] = static_cast<uint8_t>(w[i / 4] >> (8 * (i % 4)));
}

}  // namespace te_mx::sm90
