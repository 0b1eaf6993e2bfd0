// The class of one 128 x 128 tile of an operand and its scale words (te_mx/sm90.h), decided by a
// CTA in shared memory.
//
// Order of calls, with a __syncthreads at every bar:
//   clear | add_block, add_range | examine | tile_class, write_words, plan | the plans are read
#pragma once

#include <cstdint>

#include "te_mx/sm90.h"

namespace te_mx::sm90 {

// A block's entry: scale byte | kCounts when the block counts.
inline constexpr uint32_t kCounts = 0x100;

struct TileScales {
  uint32_t largest, smallest;  // e over the counting blocks; smallest = 256 without any
  uint32_t ragged;             // some row's blocks are more than S apart
  uint16_t blocks[128][4];
  uint32_t plans[128][4];
  uint8_t target[128];  // E of each row for class 1

  __device__ __forceinline__ void clear() { largest = 0, smallest = 256, ragged = 0; }

  // `entry` of block b in row r.
  __device__ __forceinline__ void add_block(int r, int b, uint32_t entry) {
    blocks[r][b] = static_cast<uint16_t>(entry);
  }

  // The whole warp calls it; high and low are over the counting blocks this thread saw (0 and 256
  // without any).
  __device__ __forceinline__ void add_range(uint32_t high, uint32_t low) {
    high = __reduce_max_sync(~0u, high), low = __reduce_min_sync(~0u, low);
    if (threadIdx.x % 32 == 0) {
      atomicMax(&largest, high);
      atomicMin(&smallest, low);
    }
  }

  __device__ __forceinline__ uint32_t exponent() const { return smallest == 256 ? 127u : largest; }

  __device__ __forceinline__ void examine(int r, int spread) {
    uint32_t high = 0, low = 256;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const uint32_t entry = blocks[r][b];
      if (entry & kCounts) high = max(high, entry & 0xFF), low = min(low, entry & 0xFF);
    }
    target[r] = static_cast<uint8_t>(low == 256 ? exponent() : high);
    if (low != 256 && high - low > static_cast<uint32_t>(spread)) atomicOr(&ragged, 1u);
  }

  __device__ __forceinline__ int tile_class(int spread) const {
    if (smallest == 256) return 0;
    if (largest > kFarExponent) return 3;
    if (largest - smallest <= static_cast<uint32_t>(spread)) return 0;
    if (ragged == 0) return 1;
    return smallest == 0 ? 3 : 2;
  }

  // What happens to the codes of row r's blocks: upper half of the fp32 number 2^(127 - e - down),
  // which makes codes that are already shifted | down << 16 | 1 << 30 when unshifted codes may
  // saturate | NaN << 31.
  __device__ __forceinline__ void plan(int cls, int r, bool saturates) {
    const uint32_t shared = cls == 0 ? exponent() : target[r];
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const uint32_t entry = blocks[r][b], e = entry & 0xFF;
      const uint32_t down = cls < 2 && (entry & kCounts) ? shared - e : 0;
      const uint32_t factor = e + down >= 254 ? 0x0040u : (254 - e - down) << 7;
      plans[r][b] =
          factor | down << 16 | (saturates ? 1u << 30 : 0u) | (entry == 255 ? 1u << 31 : 0u);
    }
  }

  // Words of row r, called for r < 128 by as many threads; `words` is the tile's place in the
  // packed scales.
  __device__ __forceinline__ void write_words(int cls, int r, uint32_t* words) const {
    uint32_t word = 0;
    if (cls < 2) {
      const uint32_t e = cls == 0 ? exponent() : target[r];
      word = e == 0 ? 0x00400000u : e << 23;
    } else {
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const uint32_t entry = blocks[r][b];
        const uint32_t e = (entry & kCounts) || (entry & 0xFF) == 255 ? entry & 0xFF : 0;
        word |= e << (8 * b);
      }
    }
    words[r] = word;
    if (r < 4) words[128 + r] = r == 0 ? cls : (r == 1 ? exponent() : 0);
  }
};

// Reading a plan.
__device__ __forceinline__ float plan_factor(uint32_t plan) { return __uint_as_float(plan << 16); }
// The same with the factor 2^(127 - e). NOTE: a shift means E <= 190, so the factor is normal and
// its field can grow.
__device__ __forceinline__ uint32_t plan_unshifted(uint32_t plan) {
  return plan + ((plan >> 16 & 15) << 7);
}
__device__ __forceinline__ int plan_shift(uint32_t plan) {
  return static_cast<int>(plan >> 16 & 15);
}
__device__ __forceinline__ bool plan_saturates(uint32_t plan) { return plan >> 30 & 1; }
__device__ __forceinline__ bool plan_nan(uint32_t plan) { return plan >> 31; }

// The tile that pads an odd number of tiles: no blocks.
__device__ __forceinline__ void write_empty_tile(int r, uint32_t* words) {
  words[r] = 127u << 23;
  if (r < 4) words[128 + r] = r == 1 ? 127 : 0;
}

}  // namespace te_mx::sm90
