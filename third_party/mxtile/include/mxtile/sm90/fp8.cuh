// FP8 and E8M0 element maths on the device: conversions, shifts of codes by powers of two, block
// scales.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "mxtile/sm90/wgmma.cuh"

namespace mxtile::sm90 {

template <Fp8 kFmt>
inline constexpr float kFp8Max = kFmt == Fp8::e4m3 ? 448.0f : 57344.0f;
template <Fp8 kFmt>
inline constexpr int kFp8Emax = kFmt == Fp8::e4m3 ? 8 : 15;

// Two codes, lo in bits 0-7: round to nearest even, saturating, NaN to 0x7F.
template <Fp8 kFmt>
__device__ __forceinline__ uint32_t fp8x2(float lo, float hi) {
  uint16_t r;
  if constexpr (kFmt == Fp8::e4m3) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(hi), "f"(lo));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(r) : "f"(hi), "f"(lo));
  }
  return r;
}

// Four codes, a in bits 0-7.
template <Fp8 kFmt>
__device__ __forceinline__ uint32_t fp8x4(float a, float b, float c, float d) {
  uint32_t r;
  if constexpr (kFmt == Fp8::e4m3) {
    asm("{\n.reg .b16 lo, hi;\n"
        "cvt.rn.satfinite.e4m3x2.f32 lo, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 hi, %4, %3;\n"
        "mov.b32 %0, {lo, hi};\n}"
        : "=r"(r)
        : "f"(a), "f"(b), "f"(c), "f"(d));
  } else {
    asm("{\n.reg .b16 lo, hi;\n"
        "cvt.rn.satfinite.e5m2x2.f32 lo, %2, %1;\n"
        "cvt.rn.satfinite.e5m2x2.f32 hi, %4, %3;\n"
        "mov.b32 %0, {lo, hi};\n}"
        : "=r"(r)
        : "f"(a), "f"(b), "f"(c), "f"(d));
  }
  return r;
}

// Bit 7 of every byte of the answer is set when no code of that byte in `words` is zero or
// subnormal.
template <Fp8 kFmt, int kWords>
__device__ __forceinline__ uint32_t fp8x4_normal(const uint32_t (&words)[kWords]) {
  uint32_t normal = 0x80808080u;
#pragma unroll
  for (int i = 0; i < kWords; ++i)
    normal &= (words[i] | 0x80808080u) - (kFmt == Fp8::e4m3 ? 0x08080808u : 0x04040404u);
  return normal;
}

// max(|a|, |b|) of two 16-bit floats at once; NaN wins. NOTE: signs come out mixed, the next
// maximum ignores them.
__device__ __forceinline__ uint32_t max_magnitude_bf16x2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ __forceinline__ uint32_t max_magnitude_f16x2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// Two codes as two fp16 values (exact).
template <Fp8 kFmt>
__device__ __forceinline__ __half2 fp8x2_to_half2(uint16_t codes) {
  uint32_t r;
  if constexpr (kFmt == Fp8::e4m3) {
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(codes));
  } else {
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(r) : "h"(codes));
  }
  return *reinterpret_cast<__half2*>(&r);
}

template <Fp8 kFmt>
__device__ __forceinline__ uint32_t half2_to_fp8x2(__half2 v) {
  uint16_t r;
  const uint32_t bits = *reinterpret_cast<uint32_t*>(&v);
  if constexpr (kFmt == Fp8::e4m3) {
    asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(r) : "r"(bits));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f16x2 %0, %1;" : "=h"(r) : "r"(bits));
  }
  return r;
}

// 2^-d in both halves, d in [0, 14].
__device__ __forceinline__ __half2 half2_exp2_neg(int d) {
  const uint32_t h = static_cast<uint32_t>(15 - d) << 10;
  const uint32_t bits = h | (h << 16);
  return *reinterpret_cast<const __half2*>(&bits);
}

// 0xFF in every byte of four codes that is NaN or infinite.
template <Fp8 kFmt>
__device__ __forceinline__ uint32_t fp8x4_specials(uint32_t codes) {
  return __vcmpgeu4(codes & 0x7F7F7F7Fu, kFmt == Fp8::e4m3 ? 0x7F7F7F7Fu : 0x7C7C7C7Cu);
}

// Shifts words of four codes down by 2^d, d <= 8, rounding to nearest even once; NaN and infinities
// stay. Where no code leaves the normal range that is a subtraction from the exponent fields; other
// words go through fp16, which holds every product exactly. kSpecials = false promises that no code
// is NaN or infinite unless d is 0.
template <Fp8 kFmt, bool kSpecials>
struct CodeShift {
  // 1 in the exponent fields of four codes.
  static constexpr uint32_t kOne = kFmt == Fp8::e4m3 ? 0x08080808u : 0x04040404u;
  uint32_t subtract, least;
  __half2 factor;

  __device__ __forceinline__ explicit CodeShift(int d)
      : subtract(d * kOne), least(d == 0 ? 0 : (d + 1) * kOne), factor(half2_exp2_neg(d)) {}

  __device__ __forceinline__ uint32_t rounded(uint32_t codes) const {
    const uint32_t lo = half2_to_fp8x2<kFmt>(__hmul2(fp8x2_to_half2<kFmt>(codes & 0xFFFF), factor));
    const uint32_t hi = half2_to_fp8x2<kFmt>(__hmul2(fp8x2_to_half2<kFmt>(codes >> 16), factor));
    const uint32_t r = lo | (hi << 16);
    if constexpr (!kSpecials) return r;
    const uint32_t keep = fp8x4_specials<kFmt>(codes);
    return (r & ~keep) | (codes & keep);
  }

  template <int kWords>
  __device__ __forceinline__ void apply(uint32_t (&codes)[kWords]) const {
    // Bit 7 of a byte stays set while every code in its place stays normal.
    uint32_t normal = 0x80808080u;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      normal &= (codes[i] | 0x80808080u) - least;
      if constexpr (kSpecials) normal &= ~fp8x4_specials<kFmt>(codes[i]);
    }
    if (normal == 0x80808080u) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) codes[i] -= subtract;
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

}  // namespace mxtile::sm90
