// Single instructions on packed numbers: FP8 codes from and to fp32 and fp16, magnitudes of 16-bit
// floats.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "mxtile/sm90/wgmma.cuh"

namespace mxtile::sm90 {

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

// Four codes as fp16 numbers, two in a word (exact).
template <Fp8 kFmt>
__device__ __forceinline__ void fp8x4_to_halves(uint32_t codes, uint32_t& low, uint32_t& high) {
  if constexpr (kFmt == Fp8::e4m3) {
    asm("{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, lo;\ncvt.rn.f16x2.e4m3x2 %1, hi;\n}"
        : "=r"(low), "=r"(high)
        : "r"(codes));
  } else {
    asm("{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, %2;\n"
        "cvt.rn.f16x2.e5m2x2 %0, lo;\ncvt.rn.f16x2.e5m2x2 %1, hi;\n}"
        : "=r"(low), "=r"(high)
        : "r"(codes));
  }
}

// min(|a|, |b|) with the sign of a, where b is positive; NaN wins.
__device__ __forceinline__ uint32_t clamp_magnitude_bf16x2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("min.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ __forceinline__ float clamp_magnitude(float a, float b) {
  float r;
  asm("min.NaN.xorsign.abs.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

// Four bytes of `from`, each by the lowest 3 bits of a nibble of the lower half of `selectors`;
// where its bit 3 is set, 0xFF or 0 by the sign of that byte.
__device__ __forceinline__ uint32_t permute_signs(uint32_t from, uint32_t selectors) {
  uint32_t r;
  asm("prmt.b32 %0, %1, %1, %2;" : "=r"(r) : "r"(from), "r"(selectors));
  return r;
}

// The larger magnitude of two, with any sign; NaN wins.
__device__ __forceinline__ float max_magnitude(float a, float b) {
  float r;
  asm("max.NaN.xorsign.abs.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

// Four bytes of `low` and `high`, by nibbles that are at most 7. Unlike __byte_perm it does not
// make them so.
__device__ __forceinline__ uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selectors) {
  uint32_t r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(low), "r"(high), "r"(selectors));
  return r;
}

}  // namespace mxtile::sm90
