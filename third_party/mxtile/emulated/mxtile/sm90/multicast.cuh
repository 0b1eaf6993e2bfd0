// mxtile/sm90/multicast.cuh on the CPU.
#pragma once

#include "mxtile/sm90/tma.cuh"

namespace mxtile::sm90 {

inline void bulk_load_multicast(uint32_t smem, const void* gmem, uint32_t bytes, uint32_t bar,
                                uint16_t mask) {
  simt::bulk_load(smem, gmem, bytes, bar, mask);
}

inline void bulk_send(uint32_t to, uint32_t from, uint32_t bytes, uint32_t bar, uint32_t cta) {
  simt::bulk_send(simt::map_to(to, cta), from, bytes, simt::map_to(bar, cta));
}

}  // namespace mxtile::sm90
