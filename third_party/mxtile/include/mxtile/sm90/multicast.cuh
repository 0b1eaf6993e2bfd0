// Flat byte ranges to several CTAs of a cluster at once, or from one to another.
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

// `bytes` of this CTA's shared memory to an offset in that of CTA `cta`, whose barrier `bar`, an
// offset too, counts them. What they are read from must stay until then.
__device__ __forceinline__ void bulk_send(uint32_t to, uint32_t from, uint32_t bytes, uint32_t bar,
                                          uint32_t cta) {
  asm volatile(
      "{\n"
      ".reg .b32 place, count;\n"
      "mapa.shared::cluster.u32 place, %0, %4;\n"
      "mapa.shared::cluster.u32 count, %3, %4;\n"
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
      " [place], [%1], %2, [count];\n"
      "}\n" ::"r"(to),
      "r"(from), "r"(bytes), "r"(bar), "r"(cta)
      : "memory");
}

}  // namespace mxtile::sm90
