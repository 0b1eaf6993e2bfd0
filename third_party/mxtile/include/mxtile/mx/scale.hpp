// The E8M0 scale byte of a block from the fp32 bits of its largest magnitude.
//
// With q = fp32(amax * fp32(1/max)), rceil is the exponent of q rounded up. For max = s * 2^n and
// normal q that is the exponent of amax less n, plus one when the significand of amax exceeds s:
// the rounding of the product moves no block across the line. Just below the normal range, where
// the product rounds more coarsely, s + 2^-23 still counts as s.
//
// floor is the exponent of amax less n, even the same of amax rounded to one bit of mantissa.
#pragma once

#include <cstdint>

#include "mxtile/mx/format.hpp"
#include "mxtile/mx/inline.hpp"
#include "mxtile/mx/round.hpp"

namespace mxtile::mx {

// NOTE: the numbers are those of files and interfaces.
enum class Rule : int32_t { rceil = 0, floor = 1, even = 2 };

// Mantissa of the largest value, in the place of fp32's.
template <class F>
inline constexpr uint32_t kMaxMantissa =
    (F::kMaxCode & ((1u << F::kMantissaBits) - 1)) << (23 - F::kMantissaBits);

// Added to the bits of amax so that the mantissas from which on a rule goes up carry into the
// exponent.
template <class F>
MXTILE_INLINE constexpr uint32_t carry_of(Rule rule) {
  return rule == Rule::floor ? 0 : rule == Rule::even ? 0x200000 : 0x7FFFFF - kMaxMantissa<F>;
}

// amax: bits without sign. NaN and Inf give 255.
template <class F>
MXTILE_INLINE constexpr uint32_t scale_byte(uint32_t amax, Rule rule) {
  constexpr uint32_t kMax = F::kMaxExponent;
  if (amax >= kF32Inf) return kScaleNan;
  if (rule == Rule::rceil && amax == (kMax << 23) + kMaxMantissa<F> + 1) return 0;
  const uint32_t exponent = (amax + carry_of<F>(rule)) >> 23;
  return exponent > kMax ? exponent - kMax : 0;
}

}  // namespace mxtile::mx
