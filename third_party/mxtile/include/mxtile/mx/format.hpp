// The 8-bit element formats of MX. A code is sign, exponent, mantissa.
#pragma once

#include <cstdint>

namespace mxtile::mx {

inline constexpr int kBlockSize = 32;        // elements that share one E8M0 scale
inline constexpr uint32_t kScaleNan = 0xFF;  // the E8M0 byte of a block with NaN or Inf
inline constexpr uint32_t kCodeNan = 0x7F;   // NaN in both formats

struct E4M3 {
  static constexpr int kMantissaBits = 3;
  static constexpr int kBias = 7;
  static constexpr int kMaxExponent = 8;      // of the largest value, 448 = 1.75 * 2^8
  static constexpr uint32_t kMaxCode = 0x7E;  // 448
  static constexpr bool kHasInfinity = false;
};

struct E5M2 {
  static constexpr int kMantissaBits = 2;
  static constexpr int kBias = 15;
  static constexpr int kMaxExponent = 15;     // of the largest value, 57344 = 1.75 * 2^15
  static constexpr uint32_t kMaxCode = 0x7B;  // 57344
  static constexpr bool kHasInfinity = true;
};

}  // namespace mxtile::mx
