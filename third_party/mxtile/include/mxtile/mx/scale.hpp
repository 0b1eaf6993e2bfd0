// The E8M0 scale byte of a block from the fp32 bits of its largest magnitude.
//
// With q = fp32(amax * fp32(1/max)), rceil is the exponent of q rounded up. max is 1.75 * 2^n in
// both formats, so for normal q that is the exponent of amax less n, plus one when the significand
// of amax exceeds 1.75: the rounding of the product moves no block across the line. Just below the
// normal range, where the product rounds more coarsely, 1.75 + 2^-23 still counts as 1.75.
#pragma once

#include <cstdint>

#include "mxtile/mx/format.hpp"
#include "mxtile/mx/inline.hpp"
#include "mxtile/mx/round.hpp"

namespace mxtile::mx {

// Added to the bits of amax so that a significand above 1.75 carries into the exponent.
inline constexpr uint32_t kRceilCarry = 0x1FFFFF;

// amax: bits without sign. NaN and Inf give 255.
template <class F>
MXTILE_INLINE constexpr uint32_t rceil_byte(uint32_t amax) {
  constexpr uint32_t kMax = F::kMaxExponent;
  if (amax >= kF32Inf) return kScaleNan;
  if (amax <= (kMax << 23) + 0x600001) return 0;
  return ((amax + kRceilCarry) >> 23) - kMax;
}

template <class F>
MXTILE_INLINE constexpr uint32_t floor_byte(uint32_t amax) {
  constexpr uint32_t kMax = F::kMaxExponent;
  if (amax >= kF32Inf) return kScaleNan;
  const uint32_t exponent = amax >> 23;
  return exponent > kMax ? exponent - kMax : 0;
}

}  // namespace mxtile::mx
