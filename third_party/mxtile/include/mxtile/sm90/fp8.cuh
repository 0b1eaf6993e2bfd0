// FP8 and E8M0 element maths on the device: conversions, shifts of codes by powers of two, block
// scales.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "mxtile/sm90/convert.cuh"
#include "mxtile/sm90/wgmma.cuh"

namespace mxtile::sm90 {

template <Fp8 kFmt>
inline constexpr float kFp8Max = static_cast<float>(mx::ElementOf<kFmt>::kTraits.max);
template <Fp8 kFmt>
inline constexpr int kFp8Emax = mx::ElementOf<kFmt>::kMaxExponent;
// One in the exponent field of a code, and the first code above the largest value.
template <Fp8 kFmt>
inline constexpr uint32_t kFp8Step = 1u << mx::ElementOf<kFmt>::kMantissaBits;
template <Fp8 kFmt>
inline constexpr uint32_t kFp8Special = mx::ElementOf<kFmt>::kMaxCode + 1;
inline constexpr uint32_t kEveryByte = 0x01010101u;  // a number in every byte of a word

// Bit 7 of every byte is set when that code is subnormal and not zero. The other bits hold
// anything.
template <Fp8 kFmt>
__device__ __forceinline__ uint32_t fp8x4_subnormal(uint32_t codes) {
  const uint32_t magnitude = codes & 0x7F7F7F7Fu;
  return (magnitude + 0x7F7F7F7Fu) & ~(magnitude + (0x80 - kFp8Step<kFmt>)*kEveryByte);
}

// Transposes 4 x 4 bytes: word i is row i before and column i after, lowest byte first.
__device__ __forceinline__ void transpose_bytes(uint32_t& a, uint32_t& b, uint32_t& c,
                                                uint32_t& d) {
  const uint32_t ab0 = __byte_perm(a, b, 0x5140), ab1 = __byte_perm(a, b, 0x7362);
  const uint32_t cd0 = __byte_perm(c, d, 0x5140), cd1 = __byte_perm(c, d, 0x7362);
  a = __byte_perm(ab0, cd0, 0x5410), b = __byte_perm(ab0, cd0, 0x7632);
  c = __byte_perm(ab1, cd1, 0x5410), d = __byte_perm(ab1, cd1, 0x7632);
}

// 2^-d as fp16 bits, 0 for d above 14.
__device__ __forceinline__ uint32_t half_exp2_neg(int d) {
  return static_cast<uint32_t>(15 - min(d, 15)) << 10;
}

// fp16 2^-d for two blocks. `factors` has what they were multiplied by (bf16 2^(127 - e), or NaN)
// and `targets` their E + 1; d = E - e, from 15 on 0 in the place of 2^-d, and a NaN block may get
// any.
__device__ __forceinline__ uint32_t half2_shifts(uint32_t factors, uint32_t targets) {
  const uint32_t e_plus_1 = ~(factors >> 7) & 0x00FF00FFu;
  return 0x3C003C00u - (__vminu2(targets - e_plus_1, 0x000F000Fu) << 10);
}

// Two finite or NaN codes times fp16 powers of two between 2^-14 and 1, or 0, rounded to nearest
// even: fp16 holds every product exactly.
template <Fp8 kFmt>
__device__ __forceinline__ uint32_t fp8x2_times(uint32_t codes, uint32_t factors) {
  return half2_to_fp8x2<kFmt>(
      __hmul2(fp8x2_to_half2<kFmt>(codes & 0xFFFF), *reinterpret_cast<const __half2*>(&factors)));
}

// The same of four codes; each word has the factors of two.
template <Fp8 kFmt>
__device__ __forceinline__ uint32_t fp8x4_times(uint32_t codes, uint32_t low, uint32_t high) {
  return fp8x2_times<kFmt>(codes, low) | (fp8x2_times<kFmt>(codes >> 16, high) << 16);
}

// 0xFF in every byte of four codes that is NaN or infinite.
template <Fp8 kFmt>
__device__ __forceinline__ uint32_t fp8x4_specials(uint32_t codes) {
  return __vcmpgeu4(codes & 0x7F7F7F7Fu, kFp8Special<kFmt> * kEveryByte);
}

// Divides words of four codes by 2^d, above 14 by infinity, rounding to nearest even once; zeros,
// NaN and infinities stay. Codes that stay normal lose d in their exponent fields; a group of words
// with another code goes through fp16.
template <Fp8 kFmt>
struct CodeShift {
  static constexpr uint32_t kStep = kFp8Step<kFmt>, kSpecial = kFp8Special<kFmt>;
  int d;

  __device__ __forceinline__ uint32_t rounded(uint32_t codes) const {
    const uint32_t keep = fp8x4_specials<kFmt>(codes), factor = half_exp2_neg(d) * 0x10001u;
    return (fp8x4_times<kFmt>(codes, factor, factor) & ~keep) | (codes & keep);
  }

  template <int kWords>
  __device__ __forceinline__ void apply(uint32_t (&codes)[kWords]) const {
    if (d == 0) return;
    // Bit 7 of a byte of `good` stays set while every code there is normal now and after.
    const uint32_t step = d * (kStep * kEveryByte),
                   least = 0x80 * kEveryByte - kStep * kEveryByte - step;
    uint32_t good = 0x80 * kEveryByte;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint32_t magnitude = codes[i] & (0x7F * kEveryByte);
      good &= (magnitude + least) & ~(magnitude + (128 - kSpecial) * kEveryByte);
    }
    if (good == 0x80 * kEveryByte && d < 15) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) codes[i] -= step;
    } else {
#pragma unroll
      for (int i = 0; i < kWords; ++i) codes[i] = rounded(codes[i]);
    }
  }
};

// 2^(e - 127) of a scale byte. Byte 0 is 2^-127, which fp32 holds as a subnormal; 255 is NaN.
__device__ __forceinline__ float e8m0_to_float(uint32_t e) {
  return e == 255 ? __uint_as_float(0x7FC00000u) : __uint_as_float(e == 0 ? 0x00400000u : e << 23);
}

// 2^(127 - e) of a scale byte below 255: what a block is multiplied by before rounding.
__device__ __forceinline__ float e8m0_inverse(uint32_t e) {
  return __uint_as_float(e == 254 ? 0x00400000u : (254u - e) << 23);
}

// The scale byte of a block from its largest magnitude (finite), rounding amax / max up to a power
// of two.
template <Fp8 kFmt>
__device__ __forceinline__ uint32_t e8m0_rceil(float amax) {
  const uint32_t q = __float_as_uint(__fmul_rn(amax, 1.0f / kFp8Max<kFmt>));
  const uint32_t exponent = q >> 23, mantissa = q & 0x7FFFFFu;
  if (exponent == 0) return mantissa > 0x400000u ? 1u : 0u;
  return exponent + (mantissa != 0 ? 1u : 0u);
}

// The OCP rule: floor(log2 amax) - emax.
template <Fp8 kFmt>
__device__ __forceinline__ uint32_t e8m0_floor(float amax) {
  const int e = static_cast<int>(__float_as_uint(amax) >> 23) - kFp8Emax<kFmt>;
  return e > 0 ? static_cast<uint32_t>(e) : 0u;
}

// floor of amax rounded to one bit of mantissa, halves up.
template <Fp8 kFmt>
__device__ __forceinline__ uint32_t e8m0_even(float amax) {
  return e8m0_floor<kFmt>(__uint_as_float(__float_as_uint(amax) + 0x200000u));
}

}  // namespace mxtile::sm90
