// The 128-byte swizzle: in a tile of 128-byte rows, the 16-byte chunk index is xored with the row
// mod 8. TMA, wgmma descriptors and these functions agree when the tile starts at a multiple of
// 1024 bytes.
#pragma once

#include <cstdint>

#include "mxtile/sm90/shared.cuh"

namespace mxtile::sm90 {

__device__ __forceinline__ uint32_t swizzle128(uint32_t row, uint32_t chunk) {
  return row * 128 + ((chunk ^ (row & 7)) << 4);
}

}  // namespace mxtile::sm90
