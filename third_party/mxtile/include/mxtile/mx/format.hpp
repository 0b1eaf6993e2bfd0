// The MX formats: blocks of elements that share a scale of 8 bits, an exponent (E8M0).
#pragma once

#include <cstdint>

#include "mxtile/mx/element.hpp"

namespace mxtile::mx {

inline constexpr int kBlockSize = 32;        // elements that share one E8M0 scale
inline constexpr uint32_t kScaleNan = 0xFF;  // the E8M0 byte of a block with NaN or Inf

}  // namespace mxtile::mx
