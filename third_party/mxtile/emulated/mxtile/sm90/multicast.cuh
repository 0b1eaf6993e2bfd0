// mxtile/sm90/multicast.cuh on the CPU.
#pragma once

#include "mxtile/sm90/tma.cuh"

namespace mxtile::sm90 {

inline void bulk_load_multicast(uint32_t smem, const void* gmem, uint32_t bytes, uint32_t bar,
                                uint16_t mask) {
  simt::bulk_load(smem, gmem, bytes, bar, mask);
}

}  // namespace mxtile::sm90
