// mxtile/sm90/barrier.cuh on the CPU.
#pragma once

#include <cstdint>

#include "simt/machine.hpp"

namespace mxtile::sm90 {

inline uint32_t smem_addr(const void* p) { return simt::address_of(p); }

inline void mbar_init(uint64_t* bar, uint32_t arrivals) {
  simt::mbarrier_init(smem_addr(bar), arrivals);
}
inline void mbar_init_fence() {}
inline void mbar_arrive_expect(uint32_t bar, uint32_t bytes) {
  simt::mbarrier_arrive(bar, 1, bytes);
}
inline void mbar_arrive_expect(uint64_t* bar, uint32_t bytes) {
  mbar_arrive_expect(smem_addr(bar), bytes);
}
inline void mbar_arrive(uint64_t* bar) { simt::mbarrier_arrive(smem_addr(bar)); }
inline void mbar_arrive_at(uint64_t* bar, uint32_t cta) {
  simt::mbarrier_arrive(simt::map_to(smem_addr(bar), cta));
}
inline void mbar_wait(uint32_t bar, uint32_t parity) { simt::mbarrier_wait(bar, parity); }
inline void mbar_wait(uint64_t* bar, uint32_t parity) {
  simt::mbarrier_wait(smem_addr(bar), parity);
}
inline void mbar_wait_asleep(uint32_t bar, uint32_t parity) { simt::mbarrier_wait(bar, parity); }
inline void mbar_wait_asleep(uint64_t* bar, uint32_t parity) {
  simt::mbarrier_wait(smem_addr(bar), parity);
}

inline void named_barrier(int id, int threads) { simt::named_barrier(id, threads, true); }
inline void named_arrive(int id, int threads) { simt::named_barrier(id, threads, false); }

inline void cluster_sync() { simt::cluster_arrive(), simt::cluster_wait(); }
inline uint32_t cluster_rank() { return simt::self().cta->rank; }
inline uint32_t cluster_index() {
  return blockIdx.x / static_cast<uint32_t>(simt::self().cta->cluster->ctas.size());
}
inline uint32_t cluster_count() {
  return gridDim.x / static_cast<uint32_t>(simt::self().cta->cluster->ctas.size());
}

// Kernels run one after another.
inline void let_dependents_start() {}
inline void await_predecessors() {}
inline void fence_async_proxy() {}

inline void compiler_fence() { asm volatile("" ::: "memory"); }
inline int opaque(int v) {
  asm volatile("" : "+r"(v));
  return v;
}

template <class T>
void touch(T) {}

inline bool elect_one() {
  simt::leave(simt::gather(~0u, "elect.sync", "", 0));
  return simt::self().lane == 0;
}

template <int kRegs>
void registers_down() {
  simt::leave(simt::gather(~0u, "setmaxnreg", "", 0));
}
template <int kRegs>
void registers_up() {
  simt::leave(simt::gather(~0u, "setmaxnreg", "", 0));
}

}  // namespace mxtile::sm90
