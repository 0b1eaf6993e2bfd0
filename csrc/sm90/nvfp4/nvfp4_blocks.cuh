// A block of sixteen numbers to NVFP4 by the rules of Transformer Engine: its scale, one of two by
// four over six, and its codes, to nearest even or at random, or what they stand for in bf16.
#pragma once

#include "common/numbers.cuh"
#include "mxtile/sm90/convert.cuh"
#include "nvfp4/nvfp4_operand.cuh"
#include "quantize/random_codes.cuh"
#include "te_mx/sm90_nvfp4.h"

namespace te_mx::sm90 {

inline constexpr uint32_t kInfinite = 0x7F800000u;
inline constexpr float kLargest = 3.402823466e38f, kMostCode = 6.0f;

// What follows from the largest magnitude of a tensor, or of a row of it, and how blocks are
// scaled.
template <bool kTries>
struct Nvfp4Whole {
  float amax, encode, decode, bound;
  bool squares;
  __device__ __forceinline__ Nvfp4Whole(const uint32_t* of, const Nvfp4QuantizeArgs& a)
      : bound(kTries && a.narrow ? 1536.0f : 2688.0f), squares(a.tries == Nvfp4Tries::squares) {
    amax = __uint_as_float(__ldcg(of));
    const float all = amax == 0.0f ? 1.0f : fminf(bound / amax, kLargest);
    encode = kTries ? all : all * 0.16666667163372040f, decode = 1.0f / all;
  }
};

// The scale of a block, and by what its elements are multiplied.
struct Nvfp4Block {
  uint32_t byte;
  float scale, over;
  uint32_t keep;  // of its codes: none of a block with a NaN
  // Of two scales that were tried, `four` is the larger one, with which codes go up to 4.
  template <bool kTries>
  __device__ __forceinline__ Nvfp4Block(uint32_t largest, const Nvfp4Whole<kTries>& whole,
                                        bool four = false) {
    float wanted = __uint_as_float(largest) * whole.encode;
    if constexpr (kTries) {
      const float sixth = __fdiv_rn(__uint_as_float(largest), 6.0f);
      wanted = __fmul_rn(__fmul_rn(sixth, whole.encode), four ? 1.5f : 1.0f);
    }
    byte = tile::fp8x2<tile::Fp8::e4m3>(wanted, 0.0f) & 0xFF;
    // E4M3 as fp32, exactly: its bits 120 octaves below.
    scale = __uint_as_float(byte << 20) * 0x1p120f;
    over = fminf(1.0f / (scale * whole.decode), kLargest);
    keep = ~0u;
    if (largest >= kInfinite) byte = 0x7F, scale = __uint_as_float(0x7FC00000u), keep = 0;
  }
};

// A number that was scaled, rounded to a code. A sum with 2^23 steps ends at a step, which is half
// the binade, and at least 1 / 2.
__device__ __forceinline__ float nearest_code(float t) {
  const float a = tile::clamp_magnitude(t, kMostCode);
  const float m = __uint_as_float(max(__float_as_uint(a) & 0x7F800000u, __float_as_uint(1.0f)));
  return __fmaf_rn(m, -0x1.8p22f, __fmaf_rn(m, 0x1.8p22f, a));
}

// By how much each of both scales misses a block, in the order of k.
__device__ __forceinline__ float2 misses(const float (&v)[16], uint32_t largest,
                                         const Nvfp4Whole<true>& whole) {
  float of[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const Nvfp4Block b(largest, whole, j == 0);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float value =
          __fmul_rn(__fmul_rn(nearest_code(__fmul_rn(v[i], b.over)), b.scale), whole.amax);
      const float off = __fsub_rn(__fdiv_rn(value, whole.bound), v[i]);
      sum = __fadd_rn(sum, whole.squares ? __fmul_rn(off, off) : fabsf(off));
    }
    of[j] = sum;
  }
  return make_float2(of[0], of[1]);
}
// Whether a block of a row, or of a column, takes the larger one.
template <bool kTries>
__device__ __forceinline__ bool misses_less_by_four(const float (&v)[16], uint32_t largest,
                                                    const Nvfp4Whole<kTries>& whole) {
  if constexpr (kTries) {
    const float2 of = misses(v, largest, whole);
    return of.x < of.y;
  } else {
    return false;
  }
}
__device__ __forceinline__ float2 added(float2 a, float2 b) {
  return make_float2(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y));
}
// With those of the lane `other` away.
__device__ __forceinline__ float2 shared_misses(float2 a, int other) {
  return added(a, make_float2(__shfl_xor_sync(~0u, a.x, other), __shfl_xor_sync(~0u, a.y, other)));
}

// What a number that was scaled draws, as bits whose upper ones are its sign and its code: see
// random_codes.cuh. `half` picks the random bits of a word.
__device__ __forceinline__ uint32_t by_chance(float t, uint32_t word, uint32_t half) {
  const float steps = __fmul_rz(tile::clamp_magnitude(t, kMostCode), kToSteps);
  return __dp2a_lo(word, half, __float_as_uint(steps));
}
constexpr uint32_t half_of(int i) { return i % 2 == 0 ? 0x40u : 0x4000u; }

// A block to 16 codes, in the first two words, or to what they stand for without the scale of the
// tensor, in bf16. With kRandom, draw(i) has the random bits of element i, in half(i) of a word.
template <bool kRandom, class Words, class Halves>
__device__ __forceinline__ void make_codes(uint32_t (&out)[8], const float (&v)[16],
                                           const Nvfp4Block& b, bool values, Words draw,
                                           Halves half) {
  if (values) {
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
      float two[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float t = __fmul_rn(v[i + j], b.over);
        if constexpr (kRandom) {
          const uint32_t bits = by_chance(t, draw(i + j), half(i + j)) & 0xFFC00000u;
          two[j] = __uint_as_float(bits) * 0x1p126f * b.scale;
        } else {
          two[j] = __fmul_rn(nearest_code(t), b.scale);
        }
      }
      out[i / 2] = as<uint32_t>(__floats2bfloat162_rn(two[0], two[1]));
    }
    return;
  }
#pragma unroll
  for (int eight = 0; eight < 2; ++eight) {
    uint32_t w[8];
    float t[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int k = 8 * eight + i;
      t[i] = __fmul_rn(v[k], b.over);
      if constexpr (kRandom) {
        w[i] = by_chance(t[i], draw(k), half(k));
      } else {
        w[i] = step_nearest(fminf(fabsf(t[i]), kMostCode) * kToNearest);
      }
    }
    if constexpr (kRandom) {
      out[eight] = nibbles_of_steps(w) & b.keep;
    } else {
      out[eight] = nibbles_of(w, t) & b.keep;
    }
  }
}

}  // namespace te_mx::sm90
