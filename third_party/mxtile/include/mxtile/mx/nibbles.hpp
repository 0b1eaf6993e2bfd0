// Codes of four bits, two a byte: the first in the low bits.
#pragma once

#include <cstdint>

#include "mxtile/mx/inline.hpp"

namespace mxtile::mx {

// kBytes bytes to 2 * kBytes codes, one a byte.
template <int kBytes>
MXTILE_INLINE void unpack_nibbles(const uint8_t* packed, uint8_t* codes) {
  for (int i = 0; i < kBytes; ++i) {
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
