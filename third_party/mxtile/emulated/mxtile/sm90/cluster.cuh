// mxtile/sm90/cluster.cuh on the CPU.
#pragma once

#include "mxtile/sm90/barrier.cuh"
#include "simt/async.hpp"

namespace mxtile::sm90 {

inline void cluster_arrive() { simt::cluster_arrive(); }
inline void cluster_arrive_relaxed() { simt::cluster_arrive(); }
inline void cluster_wait() { simt::cluster_wait(); }

template <class T>
void send(void* to, T v, uint64_t* bar, uint32_t cta) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);
  simt::send(simt::map_to(smem_addr(to), cta), &v, sizeof(T), simt::map_to(smem_addr(bar), cta));
}

inline float4 ld_cluster_f32x4(uint32_t addr, uint32_t cta) {
  float4 v;
  std::memcpy(&v, simt::place(simt::map_to(addr, cta), sizeof v, sizeof v), sizeof v);
  return v;
}

inline void mbar_wait_sent(uint64_t* bar, uint32_t parity) { mbar_wait(bar, parity); }

}  // namespace mxtile::sm90
