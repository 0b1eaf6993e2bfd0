// fp32, bf16 and fp16 as bit patterns, by integer arithmetic: the same under any rounding, DAZ or
// FTZ mode.
#pragma once

#include <cstdint>

#include "mxtile/mx/inline.hpp"

namespace mxtile::mx {

inline constexpr uint32_t kF32Nan = 0x7FC00000;
inline constexpr uint32_t kF32Inf = 0x7F800000;
inline constexpr uint32_t kF32Hidden = 0x00800000;  // the leading 1 of a normal significand

MXTILE_INLINE constexpr float as_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
MXTILE_INLINE constexpr uint32_t as_bits(float value) {
  return __builtin_bit_cast(uint32_t, value);
}

// Position of the highest set bit of x > 0.
MXTILE_INLINE constexpr int high_bit(uint32_t x) {
  int n = 0;
  for (int step = 16; step > 0; step >>= 1) {
    if (x >> step) {
      x >>= step;
      n += step;
    }
  }
  return n;
}

// value / 2^shift, ties to even, for value < 2^31.
MXTILE_INLINE constexpr uint32_t round_shift(uint32_t value, int shift) {
  if (shift <= 0) return value << -shift;
  if (shift > 31) return 0;
  const uint32_t odd = (value >> shift) & 1;
  return (value + (1u << (shift - 1)) - 1 + odd) >> shift;
}

MXTILE_INLINE constexpr uint32_t bf16_to_f32(uint16_t h) { return static_cast<uint32_t>(h) << 16; }

// NaN becomes the canonical NaN with its sign.
MXTILE_INLINE constexpr uint16_t f32_to_bf16(uint32_t f) {
  if ((f & 0x7FFFFFFF) > kF32Inf) return static_cast<uint16_t>(((f >> 16) & 0x8000) | 0x7FC0);
  return static_cast<uint16_t>((f + 0x7FFF + ((f >> 16) & 1)) >> 16);
}

MXTILE_INLINE constexpr uint32_t f16_to_f32(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
  const uint32_t exponent = (h >> 10) & 31;
  const uint32_t mantissa = h & 0x3FF;
  if (exponent == 31) return sign | kF32Inf | (mantissa << 13);
  if (exponent != 0) return sign | ((exponent + 112) << 23) | (mantissa << 13);
  if (mantissa == 0) return sign;
  const int top = high_bit(mantissa);
  return sign | (static_cast<uint32_t>(top + 103) << 23) | ((mantissa << (23 - top)) & 0x7FFFFF);
}

// NaN becomes the canonical NaN with its sign, what exceeds 65504 after rounding Inf.
MXTILE_INLINE constexpr uint16_t f32_to_f16(uint32_t f) {
  const uint32_t sign = (f >> 16) & 0x8000;
  const uint32_t a = f & 0x7FFFFFFF;
  if (a > kF32Inf) return static_cast<uint16_t>(sign | 0x7E00);
  if (a >= 0x477FF000) return static_cast<uint16_t>(sign | 0x7C00);
  const int exponent = static_cast<int>(a >> 23);
  if (exponent > 112) {
    return static_cast<uint16_t>(sign | round_shift(a - (112u << 23), 13));
  }
  const uint32_t significand = exponent ? (a & 0x7FFFFF) | kF32Hidden : 0;  // 2^-127 rounds to 0
  return static_cast<uint16_t>(sign | round_shift(significand, 126 - exponent));
}

}  // namespace mxtile::mx
