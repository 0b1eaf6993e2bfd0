// Promotion: adds what the tensor cores summed over one step of K, times its scales, to fp32 sums.
// Accumulator layout: mxtile/sm90/wgmma.cuh. A thread has two rows (r, r + 8) and 32 columns.
//
// Functions of kFirst work on the columns of sum[kFirst] and after, as many as acc has.
#pragma once

#include <cstdint>

#include "mxtile/sm90/swizzle.cuh"
#include "mxtile/sm90/wgmma.cuh"
#include "te_mx/sm90.h"

namespace te_mx::sm90 {

// The columns have one scale, already inside the row factors: one FFMA an element.
template <int kFirst, int kCount>
__device__ __forceinline__ void promote_tile(float (&sum)[64], const float (&acc)[kCount], float f0,
                                             float f8) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    sum[kFirst + i] = fmaf(acc[i], i % 4 < 2 ? f0 : f8, sum[kFirst + i]);
  }
}

// The two bf16 numbers of a word. NOTE: without keep() the compiler would do this once for several
// waves, and have no registers for it.
__device__ __forceinline__ float2 unpack_bf16(uint32_t pair) {
  const uint32_t v = mxtile::sm90::keep(pair);
  return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xFFFF0000u));
}

// Columns have factors of their own, two to a word, and rows have none.
template <int kFirst, int kCount>
__device__ __forceinline__ void promote_columns(float (&sum)[64], const float (&acc)[kCount],
                                                const uint32_t (&cols)[kCount / 4]) {
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    const float2 c = unpack_bf16(cols[j]);
    float* const to = sum + kFirst + 4 * j;
    to[0] = fmaf(acc[4 * j + 0], c.x, to[0]);
    to[1] = fmaf(acc[4 * j + 1], c.y, to[1]);
    to[2] = fmaf(acc[4 * j + 2], c.x, to[2]);
    to[3] = fmaf(acc[4 * j + 3], c.y, to[3]);
  }
}

// Both have. NOTE: scales are multiplied with each other first. acc * row could overflow where
// row * column does not.
template <int kFirst, int kCount>
__device__ __forceinline__ void promote_both(float (&sum)[64], const float (&acc)[kCount], float f0,
                                             float f8, const uint32_t (&cols)[kCount / 4]) {
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    const float2 c = unpack_bf16(cols[j]);
    float* const to = sum + kFirst + 4 * j;
    to[0] = fmaf(acc[4 * j + 0], f0 * c.x, to[0]);
    to[1] = fmaf(acc[4 * j + 1], f0 * c.y, to[1]);
    to[2] = fmaf(acc[4 * j + 2], f8 * c.x, to[2]);
    to[3] = fmaf(acc[4 * j + 3], f8 * c.y, to[3]);
  }
}

// What a word of a tile of class 0 or 1 says to products: of weights that stand still its lower
// half tells how their codes come back (te_mx/sm90_frozen.h).
__device__ __forceinline__ float shared_scale(uint32_t word) {
  return __uint_as_float(word & 0xFFFF0000u);
}

// Reads the scale of block `kk` from a scale word of a tile of any class.
struct WordReader {
  uint32_t select, shift, byte_shift;
  __device__ __forceinline__ WordReader(uint32_t tile_class, int kk) {
    const bool bytes = tile_class >= 2;
    select = bytes ? (0x0444u | (static_cast<uint32_t>(kk) << 12)) : 0x3244u;
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

// One block of 32 K when a tile is of class 3, from scale words; `cols` is the shared address of
// the words of this thread's first column. Slow, and right for every exponent.
template <int kFirst, int kCount>
__device__ __forceinline__ void promote_far(float (&sum)[64], const float (&acc)[kCount],
                                            uint32_t w0, uint32_t w8, uint32_t cols,
                                            const WordReader& lhs, const WordReader& rhs) {
  const int e0 = lhs.byte(w0), e8 = lhs.byte(w8);
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    // NOTE: the compiler would otherwise read all scales first, and have no registers for them.
    if (j == kCount / 8) __threadfence_block();
    const uint2 c = mxtile::sm90::ld_shared_u32x2(cols + 8 * kFirst + 32 * j);
    const int c0 = rhs.byte(c.x), c1 = rhs.byte(c.y);
    float* const to = sum + kFirst + 4 * j;
    to[0] = add_far(to[0], acc[4 * j + 0], e0 + c0);
    to[1] = add_far(to[1], acc[4 * j + 1], e0 + c1);
    to[2] = add_far(to[2], acc[4 * j + 2], e8 + c0);
    to[3] = add_far(to[3], acc[4 * j + 3], e8 + c1);
  }
}

}  // namespace te_mx::sm90
