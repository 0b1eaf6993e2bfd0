// Dequantization words for any CPU.
#pragma once

#include <array>
#include <cstdint>

#include "mxtile/mx/code.hpp"
#include "mxtile/mx/format.hpp"
#include "mxtile/mx/inline.hpp"

namespace mxtile::quant {

// Scale bytes with which every code is a normal bf16 number: no rounding, no overflow.
template <class F>
inline constexpr uint32_t kPlainByteMin = F::kBias + F::kMantissaBits;
template <class F>
inline constexpr uint32_t kPlainByteMax = 254 - F::kMaxExponent;

template <class F>
MXTILE_INLINE constexpr bool plain_byte(uint32_t byte) {
  return byte - kPlainByteMin<F> <= kPlainByteMax<F> - kPlainByteMin<F>;
}

// fp32 patterns of all codes at scale 1.
template <class F>
inline constexpr std::array<uint32_t, 256> kCodeValues = [] {
  std::array<uint32_t, 256> table{};
  for (uint32_t code = 0; code < 256; ++code) {
    table[code] = mx::decode<F>(static_cast<uint8_t>(code), 127);
  }
  return table;
}();

// decode() for a byte that is plain: a product of normal numbers, so no mode of the FPU matters.
template <class F>
MXTILE_INLINE uint32_t decode_plain(uint8_t code, uint32_t byte) {
  return mx::as_bits(mx::as_float(kCodeValues<F>[code]) * mx::as_float(byte << 23));
}

template <class F>
MXTILE_INLINE uint32_t decode_any(uint8_t code, uint32_t byte) {
  return plain_byte<F>(byte) ? decode_plain<F>(code, byte) : mx::decode<F>(code, byte);
}

}  // namespace mxtile::quant
