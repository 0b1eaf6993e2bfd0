// One element at a time, exact at both ends of the range: the definition the fast words must equal.
#pragma once

#include <cstdint>

#include "mxtile/mx/format.hpp"
#include "mxtile/mx/inline.hpp"
#include "mxtile/mx/round.hpp"

namespace mxtile::mx {

// Code of x * 2^(127 - byte), x finite fp32 bits: nearest, ties to even, clamped to the largest
// value. byte 255 gives NaN whatever x is, and 0 where the element has none.
template <class F>
MXTILE_INLINE constexpr uint8_t encode(uint32_t x, uint32_t byte) {
  if (byte == kScaleNan) return F::kTraits.nan_code == kNoCode ? 0 : F::kNanCode;
  const uint8_t sign = static_cast<uint8_t>((x >> 31) * F::kSign);
  const uint32_t a = x & 0x7FFFFFFF;
  if (a == 0) return sign;
  int exponent = static_cast<int>(a >> 23);
  uint32_t significand = (a & 0x7FFFFF) | kF32Hidden;
  if (exponent == 0) {
    const int up = 23 - high_bit(a);
    significand = a << up;
    exponent = 1 - up;
  }
  // The exponent field of the code; below 1 the element is subnormal there.
  const int field = exponent - static_cast<int>(byte) + F::kBias;
  if (field > 31) return sign | static_cast<uint8_t>(F::kMaxCode);
  const int base = field > 1 ? field : 1;
  const uint32_t rounded = round_shift(significand, 23 - F::kMantissaBits + base - field);
  const uint32_t code = rounded + (static_cast<uint32_t>(base - 1) << F::kMantissaBits);
  return sign | static_cast<uint8_t>(code < F::kMaxCode ? code : F::kMaxCode);
}

// fp32 bits of code * 2^(byte - 127), correctly rounded. byte 255 gives the canonical NaN, a NaN
// code the same with its sign.
template <class F>
MXTILE_INLINE constexpr uint32_t decode(uint8_t code, uint32_t byte) {
  constexpr uint32_t kMantissaMask = (1u << F::kMantissaBits) - 1;
  const uint32_t sign = static_cast<uint32_t>(code & F::kSign) << (32 - F::kBits);
  const uint32_t a = code & (F::kSign - 1);
  if (byte == kScaleNan) return kF32Nan;
  if (!F::kHasNegativeZero && code == F::kNanCode) return kF32Nan;
  if (a > F::kMaxCode) {
    return sign | (F::kHasInfinity && a == F::kMaxCode + 1 ? kF32Inf : kF32Nan);
  }
  if (a == 0) return sign;
  int field = static_cast<int>(a >> F::kMantissaBits);
  uint32_t significand = (a & kMantissaMask) | (field ? kMantissaMask + 1 : 0);
  field = field ? field : 1;
  // Value = significand * 2^unit; no more than four bits of significand, so fp32 subnormals hold
  // it.
  const int unit = field - F::kBias - F::kMantissaBits + static_cast<int>(byte) - 127;
  const int top = high_bit(significand);
  const int exponent = unit + top + 127;
  if (exponent >= 255) return sign | kF32Inf;
  if (exponent <= 0) return sign | round_shift(significand, -149 - unit);
  return sign | (static_cast<uint32_t>(exponent) << 23) | ((significand << (23 - top)) & 0x7FFFFF);
}

}  // namespace mxtile::mx
