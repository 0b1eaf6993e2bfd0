// Codes of four bits, two a byte: the first in the low bits.
#pragma once

#include <cstdint>

#include "mxtile/mx/inline.hpp"

namespace mxtile::mx {

// kBytes bytes to 2 * kBytes codes, one a byte.
template <int kBytes>
MXTILE_INLINE void unpack_nibbles(const uint8_t* packed, uint8_t* codes) {
  constexpr int kWhole = kBytes / 4 * 4;
  for (int i = 0; i < kWhole; i += 4) {  // four at a time, which compilers turn into vectors
    uint32_t four;
    __builtin_memcpy(&four, packed + i, 4);
    uint64_t wide = four;
    wide = (wide | wide << 16) & 0x0000FFFF0000FFFF;
    wide = (wide | wide << 8) & 0x00FF00FF00FF00FF;
    wide = (wide | wide << 4) & 0x0F0F0F0F0F0F0F0F;
    __builtin_memcpy(codes + 2 * i, &wide, 8);
  }
  for (int i = kWhole; i < kBytes; ++i) {
    codes[2 * i] = packed[i] & 0x0F;
    codes[2 * i + 1] = packed[i] >> 4;
  }
}

// The other way; the upper bits of codes are zero.
template <int kBytes>
MXTILE_INLINE void pack_nibbles(const uint8_t* codes, uint8_t* packed) {
  for (int i = 0; i < kBytes; ++i) {
    packed[i] = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
  }
}

}  // namespace mxtile::mx
