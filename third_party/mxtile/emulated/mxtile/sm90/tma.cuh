// mxtile/sm90/tma.cuh on the CPU.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "mxtile/sm90/barrier.cuh"
#include "simt/async.hpp"

namespace mxtile::sm90 {

inline void tma_prefetch(const CUtensorMap*) {}

inline void tma_load(uint32_t smem, const CUtensorMap* map, uint32_t bar, int inner, int outer) {
  simt::tensor_load(smem, map, bar, inner, outer, 0);
}
inline void tma_load(void* smem, const CUtensorMap* map, uint64_t* bar, int inner, int outer) {
  tma_load(smem_addr(smem), map, smem_addr(bar), inner, outer);
}
inline void tma_load_multicast(uint32_t smem, const CUtensorMap* map, uint32_t bar, int inner,
                               int outer, uint16_t mask) {
  simt::tensor_load(smem, map, bar, inner, outer, mask);
}
inline void bulk_load(uint32_t smem, const void* gmem, uint32_t bytes, uint32_t bar) {
  simt::bulk_load(smem, gmem, bytes, bar);
}
inline void tma_prefetch_l2(const CUtensorMap*, int, int) {}
inline void tma_store(const CUtensorMap* map, const void* smem, int inner, int outer) {
  simt::tensor_store(map, smem_addr(smem), inner, outer, false);
}
inline void tma_reduce_add(const CUtensorMap* map, const void* smem, int inner, int outer) {
  simt::tensor_store(map, smem_addr(smem), inner, outer, true);
}
inline void tma_store_commit() { simt::store_commit(); }
template <int kPending>
void tma_store_wait_read() {
  simt::store_wait(kPending);
}
inline void tma_store_wait_all() { simt::store_wait(0); }

}  // namespace mxtile::sm90
