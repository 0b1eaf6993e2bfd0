// Promotion: adds what the tensor cores summed over one step of K, times its scales, to fp32 sums.
// Accumulator layout: mxtile/sm90/wgmma.cuh. A thread has two rows (r, r + 8) and 32 columns.
#pragma once

#include <cstdint>

#include "mxtile/sm90/swizzle.cuh"
#include "mxtile/sm90/wgmma.cuh"
#include "te_mx/sm90.h"

namespace te_mx::sm90 {

// The rhs tile has one scale, already inside the row factors: one FFMA an element.
__device__ __forceinline__ void promote_tile(float (&sum)[64], const float (&acc)[64], float f0,
                                             float f8) {
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    sum[4 * j + 0] = fmaf(acc[4 * j + 0], f0, sum[4 * j + 0]);
    sum[4 * j + 1] = fmaf(acc[4 * j + 1], f0, sum[4 * j + 1]);
    sum[4 * j + 2] = fmaf(acc[4 * j + 2], f8, sum[4 * j + 2]);
    sum[4 * j + 3] = fmaf(acc[4 * j + 3], f8, sum[4 * j + 3]);
  }
}

// Columns have scales of their own: `cols` is the shared address of the fp32 scales of this
// thread's first column. NOTE: scales are multiplied with each other first. acc * row could
// overflow where row * column does not.
__device__ __forceinline__ void promote_rows(float (&sum)[64], const float (&acc)[64], float f0,
                                             float f8, uint32_t cols) {
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const uint2 bits = mxtile::sm90::ld_shared_u32x2(cols + 32 * j);
    const float2 c = make_float2(__uint_as_float(bits.x), __uint_as_float(bits.y));
    sum[4 * j + 0] = fmaf(acc[4 * j + 0], f0 * c.x, sum[4 * j + 0]);
    sum[4 * j + 1] = fmaf(acc[4 * j + 1], f0 * c.y, sum[4 * j + 1]);
    sum[4 * j + 2] = fmaf(acc[4 * j + 2], f8 * c.x, sum[4 * j + 2]);
    sum[4 * j + 3] = fmaf(acc[4 * j + 3], f8 * c.y, sum[4 * j + 3]);
  }
}

// Reads the scale of block `kk` from a scale word of a tile of any class.
struct WordReader {
  uint32_t select, shift, byte_shift;
  __device__ __forceinline__ WordReader(uint32_t tile_class, int kk) {
    const bool bytes = tile_class >= 2;
    select = bytes ? (0x0444u | (static_cast<uint32_t>(kk) << 12)) : 0x3210u;
    shift = bytes ? 1 : 0;
    byte_shift = bytes ? 8 * kk : 23;
  }
  // As fp32. Byte 0 gives 0: only blocks of zeros have it outside class 3.
  __device__ __forceinline__ float scale(uint32_t word) const {
    return __uint_as_float(__byte_perm(word, 0, select) >> shift);
  }
  // As a scale byte.
  __device__ __forceinline__ int byte(uint32_t word) const {
    return static_cast<int>((word >> byte_shift) & 0xFFu);
  }
};

// v * 2^(e - 254) in two factors, neither of which leaves the range of fp32 before the product
// does.
__device__ __forceinline__ float add_far(float sum, float v, int e) {
  const int s = max(-250, min(250, e - 254));
  const int half = s >> 1;
  const float first = __uint_as_float(static_cast<uint32_t>(half + 127) << 23);
  const float second = __uint_as_float(static_cast<uint32_t>(s - half + 127) << 23);
  return fmaf(v * first, second, sum);
}

// One block of 32 K when a tile is of class 3, from scale words. Slow, and right for every
// exponent.
__device__ __forceinline__ void promote_far(float (&sum)[64], const float (&acc)[64], uint32_t w0,
                                            uint32_t w8, uint32_t cols, const WordReader& lhs,
                                            const WordReader& rhs) {
  const int e0 = lhs.byte(w0), e8 = lhs.byte(w8);
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const uint2 c = mxtile::sm90::ld_shared_u32x2(cols + 32 * j);
    const int c0 = rhs.byte(c.x), c1 = rhs.byte(c.y);
    sum[4 * j + 0] = add_far(sum[4 * j + 0], acc[4 * j + 0], e0 + c0);
    sum[4 * j + 1] = add_far(sum[4 * j + 1], acc[4 * j + 1], e0 + c1);
    sum[4 * j + 2] = add_far(sum[4 * j + 2], acc[4 * j + 2], e8 + c0);
    sum[4 * j + 3] = add_far(sum[4 * j + 3], acc[4 * j + 3], e8 + c1);
  }
}

}  // namespace te_mx::sm90
