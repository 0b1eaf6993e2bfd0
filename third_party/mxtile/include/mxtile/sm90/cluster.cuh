// What the CTAs of a cluster say to each other: the cluster barrier in two halves, words sent into
// the shared memory of another CTA.
#pragma once

#include "mxtile/sm90/barrier.cuh"

namespace mxtile::sm90 {

// Both halves together are cluster_sync().
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// The first half without waiting for what was written before: that this CTA runs.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Writes to the same place in the shared memory of CTA `cta`, whose barrier `bar` counts the bytes
// as they arrive: whoever has waited there may read them. No memory barrier is needed.
__device__ __forceinline__ void send(void* to, uint32_t v, uint64_t* bar, uint32_t cta) {
  asm volatile(
      "{\n"
      ".reg .b32 place, count;\n"
      "mapa.shared::cluster.u32 place, %0, %2;\n"
      "mapa.shared::cluster.u32 count, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [place], %3, [count];\n"
      "}\n" ::"r"(smem_addr(to)),
      "r"(smem_addr(bar)), "r"(cta), "r"(v)
      : "memory");
}
__device__ __forceinline__ void send(void* to, uint2 v, uint64_t* bar, uint32_t cta) {
  asm volatile(
      "{\n"
      ".reg .b32 place, count;\n"
      "mapa.shared::cluster.u32 place, %0, %2;\n"
      "mapa.shared::cluster.u32 count, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [place], {%3, %4}, [count];\n"
      "}\n" ::"r"(smem_addr(to)),
      "r"(smem_addr(bar)), "r"(cta), "r"(v.x), "r"(v.y)
      : "memory");
}
__device__ __forceinline__ void send(void* to, uint4 v, uint64_t* bar, uint32_t cta) {
  asm volatile(
      "{\n"
      ".reg .b32 place, count;\n"
      "mapa.shared::cluster.u32 place, %0, %2;\n"
      "mapa.shared::cluster.u32 count, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [place], {%3, %4, %5, %6}, "
      "[count];\n"
      "}\n" ::"r"(smem_addr(to)),
      "r"(smem_addr(bar)), "r"(cta), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
      : "memory");
}

// Reads from the same place in the shared memory of CTA `cta`, which must not leave meanwhile.
__device__ __forceinline__ float4 ld_cluster_f32x4(uint32_t addr, uint32_t cta) {
  float4 v;
  asm volatile(
      "{\n"
      ".reg .b32 place;\n"
      "mapa.shared::cluster.u32 place, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [place];\n"
      "}\n"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
      : "r"(addr), "r"(cta)
      : "memory");
  return v;
}

// mbar_wait for what other CTAs sent.
__device__ __forceinline__ void mbar_wait_sent(uint64_t* bar, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n"
      "}\n" ::"r"(smem_addr(bar)),
      "r"(parity)
      : "memory");
}

}  // namespace mxtile::sm90
