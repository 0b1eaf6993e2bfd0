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

// The 64-byte swizzle, of tiles of 64-byte rows: the chunk index is xored with the row / 2 mod 4,
// so that eight rows of one chunk lie in different banks.
__device__ __forceinline__ uint32_t swizzle64(uint32_t row, uint32_t chunk) {
  return row * 64 + ((chunk ^ (row >> 1 & 3)) << 4);
}

}  // namespace mxtile::sm90
