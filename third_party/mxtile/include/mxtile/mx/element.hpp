// The elements of narrow formats: what a code of 4, 6 or 8 bits stands for. Everything else here is
// derived from this table.
//
// A code is sign, exponent, mantissa; magnitudes are ordered like their codes. Above the code of
// the largest value come Inf, where there is one, and NaNs. The "fnuz" elements have neither Inf
// nor a negative zero, whose code is their only NaN.
#pragma once

#include <cstdint>

namespace mxtile::mx {

// NOTE: the numbers are those of the table, and of files and interfaces.
enum class Element : int32_t {
  e4m3 = 0,  // OCP: no Inf, NaN is 0x7F
  e5m2 = 1,
  e4m3fnuz = 2,
  e5m2fnuz = 3,
  e3m2 = 4,
  e2m3 = 5,
  e2m1 = 6,
};
inline constexpr int kElements = 7;
inline constexpr int kNoCode = -1;

struct ElementTraits {
  const char* name;
  int exponent_bits, mantissa_bits, bias;
  int max_code;  // of the largest finite value,
  double max;    // which it is
  int nan_code;  // the NaN that quantizing writes, or kNoCode
  bool has_infinity, has_negative_zero;
};

inline constexpr ElementTraits kElementTraits[kElements] = {
    {"e4m3", 4, 3, 7, 0x7E, 448.0, 0x7F, false, true},
    {"e5m2", 5, 2, 15, 0x7B, 57344.0, 0x7F, true, true},
    {"e4m3fnuz", 4, 3, 8, 0x7F, 240.0, 0x80, false, false},
    {"e5m2fnuz", 5, 2, 16, 0x7F, 57344.0, 0x80, false, false},
    {"e3m2", 3, 2, 3, 0x1F, 28.0, kNoCode, false, true},
    {"e2m3", 2, 3, 1, 0x1F, 7.5, kNoCode, false, true},
    {"e2m1", 2, 1, 1, 0x07, 6.0, kNoCode, false, true},
};

// An element as a type, for templates.
template <Element kElement_>
struct ElementOf {
  static constexpr Element kElement = kElement_;
  static constexpr ElementTraits kTraits = kElementTraits[static_cast<int>(kElement)];
  static constexpr int kMantissaBits = kTraits.mantissa_bits;
  static constexpr int kExponentBits = kTraits.exponent_bits;
  static constexpr int kBits = 1 + kExponentBits + kMantissaBits;
  static constexpr uint32_t kSign = 1u << (kBits - 1);
  static constexpr int kBias = kTraits.bias;
  static constexpr uint32_t kMaxCode = kTraits.max_code;
  static constexpr int kMaxExponent = static_cast<int>(kMaxCode >> kMantissaBits) - kBias;
  static constexpr uint32_t kNanCode = static_cast<uint32_t>(kTraits.nan_code);
  static constexpr bool kHasInfinity = kTraits.has_infinity;
  static constexpr bool kHasNegativeZero = kTraits.has_negative_zero;
};
using E4M3 = ElementOf<Element::e4m3>;
using E5M2 = ElementOf<Element::e5m2>;
using E4M3FNUZ = ElementOf<Element::e4m3fnuz>;
using E5M2FNUZ = ElementOf<Element::e5m2fnuz>;
using E2M1 = ElementOf<Element::e2m1>;

}  // namespace mxtile::mx
