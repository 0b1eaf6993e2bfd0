// What the 256 codes of E4M3 stand for, as scales are looked up.
#pragma once

#include <cstdint>

#include "mxtile/mx/code.hpp"

namespace mxtile::mx {

struct ScaleValues {
  float of[256];
};
constexpr ScaleValues make_scale_values() {
  ScaleValues v{};
  for (int i = 0; i < 256; ++i) {
    v.of[i] = __builtin_bit_cast(float, decode<E4M3>(static_cast<uint8_t>(i), 127));
  }
  return v;
}
inline constexpr ScaleValues kScaleValues = make_scale_values();

}  // namespace mxtile::mx
