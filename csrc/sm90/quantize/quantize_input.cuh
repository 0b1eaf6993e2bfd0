// The input types of the quantizer: how they lie in words, how magnitudes compare, scale bytes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "mxtile/sm90/barrier.cuh"
#include "mxtile/sm90/fp4.cuh"
#include "quantize/quantize_task.h"
#include "quantize/tile_classes.cuh"

namespace te_mx::sm90 {

namespace tile = mxtile::sm90;

// MXFP4 (kFmt e2m1) has codes of E4M3 in tiles: sm90_layout.h.
template <tile::Fp8 kFmt>
inline constexpr bool kIsFp4 = kFmt == tile::Fp8::e2m1;
template <tile::Fp8 kFmt>
inline constexpr tile::Fp8 kTileFmt = kIsFp4<kFmt> ? tile::Fp8::e4m3 : kFmt;
template <tile::Fp8 kFmt>
inline constexpr uint32_t kHeadroom = kIsFp4<kFmt> ? tile::kFp4Headroom : 0;

// A Word has two neighbouring elements, 16-byte vectors have kVectors for 8 elements. Factors come
// as two bf16 numbers in a word.
template <class T>
struct Input;

__device__ __forceinline__ float low_bf16(uint32_t w) { return __uint_as_float(w << 16); }
__device__ __forceinline__ float high_bf16(uint32_t w) { return __uint_as_float(w & 0xFFFF0000u); }

struct Input16 {
  static constexpr int kVectors = 1;
  using Word = uint32_t;
  static __device__ __forceinline__ Word shuffle_xor(Word w, int lanes) {
    return __shfl_xor_sync(~0u, w, lanes);
  }
};

template <>
struct Input<__nv_bfloat16> : Input16 {
  // The larger magnitudes of two words, with any signs; NaN wins.
  static __device__ __forceinline__ Word larger(Word a, Word b) {
    return tile::max_magnitude_bf16x2(a, b);
  }
  // The larger half of a, the larger half of b.
  static __device__ __forceinline__ Word larger_halves(Word a, Word b) {
    return larger(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
  }
  static __device__ __forceinline__ float2 values(Word w) { return {low_bf16(w), high_bf16(w)}; }
  static __device__ __forceinline__ float2 magnitudes(Word w) { return values(w & 0x7FFF7FFFu); }
  // NOTE: a product with a power of two is exact in bf16 but for values far below the smallest
  // code.
  static __device__ __forceinline__ float2 scaled(Word w, uint32_t factors) {
    const __nv_bfloat162 r = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&w),
                                     *reinterpret_cast<const __nv_bfloat162*>(&factors));
    return values(*reinterpret_cast<const uint32_t*>(&r));
  }
};

template <>
struct Input<__half> : Input16 {
  static __device__ __forceinline__ Word larger(Word a, Word b) {
    return tile::max_magnitude_f16x2(a, b);
  }
  static __device__ __forceinline__ Word larger_halves(Word a, Word b) {
    return larger(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
  }
  static __device__ __forceinline__ float2 values(Word w) {
    return __half22float2(*reinterpret_cast<const __half2*>(&w));
  }
  static __device__ __forceinline__ float2 magnitudes(Word w) { return values(w & 0x7FFF7FFFu); }
  static __device__ __forceinline__ float2 scaled(Word w, uint32_t factors) {
    const float2 v = values(w);
    return {v.x * low_bf16(factors), v.y * high_bf16(factors)};
  }
};

template <>
struct Input<float> {
  static constexpr int kVectors = 2;
  using Word = uint2;
  static __device__ __forceinline__ Word shuffle_xor(Word w, int lanes) {
    return {__shfl_xor_sync(~0u, w.x, lanes), __shfl_xor_sync(~0u, w.y, lanes)};
  }
  static __device__ __forceinline__ Word larger(Word a, Word b) {
    return {max(a.x & 0x7FFFFFFFu, b.x & 0x7FFFFFFFu), max(a.y & 0x7FFFFFFFu, b.y & 0x7FFFFFFFu)};
  }
  static __device__ __forceinline__ Word larger_halves(Word a, Word b) {
    return larger({a.x, b.x}, {a.y, b.y});
  }
  static __device__ __forceinline__ float2 values(Word w) {
    return {__uint_as_float(w.x), __uint_as_float(w.y)};
  }
  static __device__ __forceinline__ float2 magnitudes(Word w) {
    return {fabsf(__uint_as_float(w.x)), fabsf(__uint_as_float(w.y))};
  }
  static __device__ __forceinline__ float2 scaled(Word w, uint32_t factors) {
    const float2 v = values(w);
    return {v.x * low_bf16(factors), v.y * high_bf16(factors)};
  }
};

// What an entry's block is multiplied by, as bf16 bits: 2^(127 - e), NaN for NaN. NOTE: e is at
// most 247 for finite blocks.
__device__ __forceinline__ uint32_t block_factor(uint32_t entry) {
  return entry == 255 ? 0x7FFFu : (254 - (entry & 0xFF)) << 7;
}

// Two neighbouring blocks, each in 16 bits: entries (tile_classes.cuh) and factors.
struct BlockPair {
  uint32_t entries, factors;
  bool nan;
};

// Whether a block is not all zeros, which below the smallest code it is; bf16 numbers have none
// there but in MXFP4.
template <tile::Fp8 kFmt>
__device__ __forceinline__ bool has_codes(float amax, uint32_t e) {
  const float largest = amax * tile::e8m0_inverse(e);
  if constexpr (kIsFp4<kFmt>) return largest > 0.25f;
  return (tile::fp8x2<kFmt>(largest, 0.0f) & 0x7F) != 0;
}

// Entry of a block whose largest magnitude is `amax`.
template <class T, tile::Fp8 kFmt>
__device__ __forceinline__ uint32_t block_entry(float amax, ScaleRule rule) {
  const uint32_t bits = __float_as_uint(amax);
  if (bits >= 0x7F800000u) return 255;
  const uint32_t e = rule == ScaleRule::rceil   ? tile::e8m0_rceil<kFmt>(amax)
                     : rule == ScaleRule::floor ? tile::e8m0_floor<kFmt>(amax)
                                                : tile::e8m0_even<kFmt>(amax);
  return e | (has_codes<kFmt>(amax, e) ? kCounts : 0);
}

// From the largest magnitudes of two blocks.
template <class T, tile::Fp8 kFmt>
__device__ __forceinline__ BlockPair block_pair(typename Input<T>::Word most,
                                                const QuantizeTask& a) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    constexpr uint32_t kOnes = 0x10001u, kEmax = tile::kFp8Emax<kFmt> * kOnes;
    const uint32_t m = most & 0x7FFF7FFFu;
    const uint32_t e = __vmaxu2((m + a.carry) >> 7 & 0x01FF01FFu, kEmax) - kEmax;
    // NOTE: a bf16 amax is a multiple of 2^-133. In FP8 only blocks of zeros have zero codes, in
    // FP4 those up to 2^-129.
    constexpr uint32_t kCounting = 0x8000 - (kIsFp4<kFmt> ? 0x11 : 1);
    BlockPair pair{e | ((m + kCounting * kOnes) >> 7 & 0x01000100u), 0x7F007F00u - (e << 7),
                   ((m + 0x00800080u) & 0x80008000u) != 0};
    if (pair.nan) {
      const uint32_t nans = __vcmpgeu2(m, 0x7F807F80u);
      pair.entries = (pair.entries & ~nans) | (nans & 0x00FF00FFu);
      pair.factors = (pair.factors & ~nans) | (nans & 0x7FFF7FFFu);
    }
    return pair;
  } else {
    const float2 amax = Input<T>::magnitudes(most);
    const uint32_t e0 = block_entry<T, kFmt>(amax.x, a.rule);
    const uint32_t e1 = block_entry<T, kFmt>(amax.y, a.rule);
    return {e0 | e1 << 16, block_factor(e0) | block_factor(e1) << 16, e0 == 255 || e1 == 255};
  }
}

}  // namespace te_mx::sm90
