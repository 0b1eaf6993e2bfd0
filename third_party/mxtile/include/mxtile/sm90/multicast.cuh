// Flat byte ranges to several CTAs of a cluster at once.
#pragma once

#include "mxtile/sm90/tma.cuh"

namespace mxtile::sm90 {

// bulk_load to the same offsets of every CTA in `mask`; each one's own barrier counts the bytes.
__device__ __forceinline__ void bulk_load_multicast(uint32_t smem, const void* gmem, uint32_t bytes,
                                                    uint32_t bar, uint16_t mask) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1], %2, [%3], %4;" ::"r"(smem),
      "l"(gmem), "r"(bytes), "r"(bar), "h"(mask)
      : "memory");
}

}  // namespace mxtile::sm90
