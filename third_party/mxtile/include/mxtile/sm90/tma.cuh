// The bulk copy engine: 2-D tiles through tensor maps, flat byte ranges, stores and reductions.
// Coordinates are (inner, outer) elements of the tensor map.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "mxtile/sm90/barrier.cuh"

namespace mxtile::sm90 {

__device__ __forceinline__ void tma_prefetch(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(map)) : "memory");
}

// Loads take shared addresses, of the destination and of the barrier that counts the bytes.
__device__ __forceinline__ void tma_load(uint32_t smem, const CUtensorMap* map, uint32_t bar,
                                         int inner, int outer) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4}], [%2];" ::"r"(smem),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(bar), "r"(inner), "r"(outer)
      : "memory");
}
__device__ __forceinline__ void tma_load(void* smem, const CUtensorMap* map, uint64_t* bar,
                                         int inner, int outer) {
  tma_load(smem_addr(smem), map, smem_addr(bar), inner, outer);
}

// The same bytes to the same offsets of every CTA in `mask`; each one's own barrier counts them.
__device__ __forceinline__ void tma_load_multicast(uint32_t smem, const CUtensorMap* map,
                                                   uint32_t bar, int inner, int outer,
                                                   uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%4, %5}], [%2], %3;" ::"r"(smem),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(bar), "h"(mask), "r"(inner), "r"(outer)
      : "memory");
}

// `bytes` and both addresses are multiples of 16.
__device__ __forceinline__ void bulk_load(uint32_t smem, const void* gmem, uint32_t bytes,
                                          uint32_t bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(smem),
      "l"(gmem), "r"(bytes), "r"(bar)
      : "memory");
}

// Asks for a tile to be fetched to L2: reads and reductions that come later find it there.
__device__ __forceinline__ void tma_prefetch_l2(const CUtensorMap* map, int inner, int outer) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(
                   reinterpret_cast<uint64_t>(map)),
               "r"(inner), "r"(outer)
               : "memory");
}

__device__ __forceinline__ void tma_store(const CUtensorMap* map, const void* smem, int inner,
                                          int outer) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(
          reinterpret_cast<uint64_t>(map)),
      "r"(smem_addr(smem)), "r"(inner), "r"(outer)
      : "memory");
}

__device__ __forceinline__ void tma_reduce_add(const CUtensorMap* map, const void* smem, int inner,
                                               int outer) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3}], "
      "[%1];" ::"l"(reinterpret_cast<uint64_t>(map)),
      "r"(smem_addr(smem)), "r"(inner), "r"(outer)
      : "memory");
}

__device__ __forceinline__ void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until at most kPending groups of this thread's stores still read shared memory.
template <int kPending>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Until this thread's stores are complete in global memory.
__device__ __forceinline__ void tma_store_wait_all() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace mxtile::sm90
