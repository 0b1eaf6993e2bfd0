// The class of one 128 x 128 tile of an operand and its scale words (te_mx/sm90.h), decided by a
// CTA in shared memory.
//
// Order of calls, with a __syncthreads at every bar:
//   clear, add_blocks, add_range | range, early_class, and where that is undecided examine |
//   late_class, write_words
// The class is known after the first bar for almost every tile; write_words may follow at once.
#pragma once

#include <cstdint>

#include "te_mx/sm90.h"

namespace te_mx::sm90 {

// A block's entry: scale byte | kCounts when the block counts.
inline constexpr uint32_t kCounts = 0x100;
inline constexpr int kUndecided = -1;

// The largest and the smallest e of counting blocks; 0 and 256 without any.
struct ScaleRange {
  uint32_t high = 0, low = 256;

  __device__ __forceinline__ void add(uint32_t entry) {
    if (entry & kCounts) high = max(high, entry & 0xFF), low = min(low, entry & 0xFF);
  }
  __device__ __forceinline__ bool empty() const { return low == 256; }
  // What the blocks share: E, or of MXFP4 so much below it.
  __device__ __forceinline__ uint32_t exponent(uint32_t headroom) const {
    return empty() ? 127u : below(high, headroom);
  }
  static __device__ __forceinline__ uint32_t below(uint32_t e, uint32_t headroom) {
    return max(e, headroom) - headroom;
  }
};

inline constexpr int kTileWarps = 8;  // of the CTA

struct TileScales {
  alignas(16) uint32_t seen[kTileWarps];  // by each warp: high | (511 - low) << 16
  alignas(16) uint16_t blocks[4][128];
  alignas(16) uint16_t target[128];  // exponent of each row for class 1
  uint32_t ragged;                   // some row's blocks are more than S apart

  __device__ __forceinline__ void clear() { ragged = 0; }

  // Entries of block b in the even row r, in the lower half, and in r + 1.
  __device__ __forceinline__ void add_blocks(int r, int b, uint32_t entries) {
    *reinterpret_cast<uint32_t*>(&blocks[b][r]) = entries;
  }

  // The whole warp calls it with the blocks that each thread saw: two entries at once, or all that
  // stands in a range.
  __device__ __forceinline__ void add_range(uint32_t entries) {
    // An entry xor 255 is 511 - e, or less than 256 for a block that does not count.
    const uint32_t e = entries & ((entries >> 8 & 0x00010001u) * 0xFF);
    const uint32_t low = entries ^ 0x00FF00FFu;
    add_range(max(e & 0xFFFF, e >> 16), max(max(low & 0xFFFF, low >> 16), 255u));
  }
  __device__ __forceinline__ void add_range(const ScaleRange& mine) {
    add_range(mine.high, 511 - mine.low);
  }
  __device__ __forceinline__ void add_range(uint32_t high, uint32_t low_key) {
    high = __reduce_max_sync(~0u, high), low_key = __reduce_max_sync(~0u, low_key);
    if (threadIdx.x % 32 == 0) seen[threadIdx.x / 32] = high | low_key << 16;
  }

  __device__ __forceinline__ ScaleRange range() const {
    const uint4 a = *reinterpret_cast<const uint4*>(seen);
    const uint4 b = *reinterpret_cast<const uint4*>(seen + 4);
    const uint32_t most = __vmaxu2(__vmaxu2(__vmaxu2(a.x, a.y), __vmaxu2(a.z, a.w)),
                                   __vmaxu2(__vmaxu2(b.x, b.y), __vmaxu2(b.z, b.w)));
    return {most & 0xFFFF, 511 - (most >> 16)};
  }

  static __device__ __forceinline__ int early_class(const ScaleRange& range, int spread) {
    if (range.empty()) return 0;
    if (range.high > kFarExponent) return 3;
    return range.high - range.low <= static_cast<uint32_t>(spread) ? 0 : kUndecided;
  }

  // alone: rows without blocks have nothing of others.
  __device__ __forceinline__ void examine(const ScaleRange& range, int r, int spread,
                                          uint32_t headroom, bool alone = false) {
    ScaleRange row;
#pragma unroll
    for (int b = 0; b < 4; ++b) row.add(blocks[b][r]);
    const uint32_t none = alone ? 127u : range.exponent(headroom);
    target[r] = static_cast<uint16_t>(row.empty() ? none : ScaleRange::below(row.high, headroom));
    if (!row.empty() && row.high - row.low > static_cast<uint32_t>(spread)) atomicOr(&ragged, 1u);
  }

  __device__ __forceinline__ int late_class(const ScaleRange& range) const {
    return ragged == 0 ? 1 : (range.low == 0 ? 3 : 2);
  }

  // Word of row r; `tile` is the tile's exponent.
  __device__ __forceinline__ uint32_t word(uint32_t tile, int cls, int r) const {
    if (cls < 2) {
      const uint32_t e = cls == 0 ? tile : target[r];
      return e == 0 ? 0x00400000u : e << 23;
    }
    uint32_t word = 0;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const uint32_t entry = blocks[b][r];
      const uint32_t e = (entry & kCounts) || (entry & 0xFF) == 255 ? entry & 0xFF : 0;
      word |= e << (8 * b);
    }
    return word;
  }
};

// Where the words of tile t of `tiles` along the operand's rows lie, at step k.
__device__ __forceinline__ uint32_t* tile_words(uint32_t* scales, int k, int t, int tiles) {
  const int padded = tiles + (tiles & 1);
  return scales + (static_cast<int64_t>(k) * padded + t) * kScaleWords;
}

// Writes the words of a tile, row r of 128 threads, and with the last tile of an odd number those
// of the tile that pads it: no blocks.
__device__ __forceinline__ void write_words(uint32_t word, uint32_t tile, int cls, int r,
                                            uint32_t* words, bool pad) {
  words[r] = word;
  if (r < 4) words[128 + r] = r == 0 ? cls : (r == 1 ? tile : 0);
  if (!pad) return;
  words += kScaleWords;
  words[r] = 127u << 23;
  if (r < 4) words[128 + r] = r == 1 ? 127 : 0;
}
__device__ __forceinline__ void write_words(const TileScales& s, uint32_t tile, int cls, int r,
                                            uint32_t* words, bool pad) {
  write_words(s.word(tile, cls, r), tile, cls, r, words, pad);
}

}  // namespace te_mx::sm90
