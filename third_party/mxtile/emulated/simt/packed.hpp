// Packed 16-bit floats: minima and maxima of magnitudes as PTX has them.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace simt {

template <class Make>
uint32_t halves(uint32_t a, uint32_t b, const Make& make) {
  const uint16_t low = make(static_cast<uint16_t>(a), static_cast<uint16_t>(b));
  const uint16_t high = make(static_cast<uint16_t>(a >> 16), static_cast<uint16_t>(b >> 16));
  return uint32_t{high} << 16 | low;
}

// min and max .NaN.xorsign.abs of 16-bit floats whose infinity is kInfinity: magnitudes are ordered
// like their bits; a NaN wins.
template <uint16_t kInfinity>
uint16_t min_xorsign_16(uint16_t a, uint16_t b) {
  const uint16_t x = a & 0x7FFF, y = b & 0x7FFF;
  if (x > kInfinity || y > kInfinity) return 0x7FFF;
  return static_cast<uint16_t>((x < y ? x : y) | ((a ^ b) & 0x8000));
}
template <uint16_t kInfinity>
uint16_t max_xorsign_16(uint16_t a, uint16_t b) {
  const uint16_t x = a & 0x7FFF, y = b & 0x7FFF;
  if (x > kInfinity || y > kInfinity) return 0x7FFF;
  return static_cast<uint16_t>((x > y ? x : y) | ((a ^ b) & 0x8000));
}

// bf16 bits of a + b to nearest even, rounded once.
inline uint16_t bf16_of_sum(double a, double b) {
  double sum = a + b;
  if (std::isfinite(sum)) {
    // To odd: what is lost below stays visible to the next rounding.
    const double t = sum - a, lost = (a - (sum - t)) + (b - t);
    if (lost != 0) {
      auto bits = std::bit_cast<uint64_t>(sum);
      if ((lost > 0) != (sum > 0)) --bits;  // towards zero
      sum = std::bit_cast<double>(bits | 1);
    }
  }
  // Likewise to fp32, whose range is that of bf16.
  float f = static_cast<float>(sum);
  if (f != sum && std::isfinite(f)) {
    auto bits = std::bit_cast<uint32_t>(f);
    if (std::fabs(static_cast<double>(f)) > std::fabs(sum)) --bits;
    f = std::bit_cast<float>(bits | 1);
  }
  const auto bits = std::bit_cast<uint32_t>(f);
  if (f != f) return 0x7FFF;
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

inline float min_xorsign(float a, float b) {
  if (a != a || b != b) return std::bit_cast<float>(0x7FFFFFFFu);
  const float least = std::fmin(std::fabs(a), std::fabs(b));
  return std::signbit(a) != std::signbit(b) ? -least : least;
}

}  // namespace simt
