// Copies to shared memory that a thread starts and waits for by groups, in order.
#pragma once

#include "mxtile/sm90/math.cuh"

namespace mxtile::sm90 {

// Starts a copy of 16 bytes past L1, or of zeros; both addresses are multiples of 16. Nothing is
// read for zeros.
__device__ __forceinline__ void copy16_async(void* smem, const void* gmem, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem_addr(smem)), "l"(gmem),
               "r"(there ? 16 : 0)
               : "memory");
}

// Starts a copy of 4 bytes; both addresses are multiples of 4.
__device__ __forceinline__ void copy4_async(uint32_t smem, const void* gmem) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(smem), "l"(gmem) : "memory");
}
__device__ __forceinline__ void copy4_async(void* smem, const void* gmem) {
  copy4_async(smem_addr(smem), gmem);
}

// Ends a group: what this thread started since the last one, perhaps nothing.
__device__ __forceinline__ void end_copy_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Until all but the last kPending groups of this thread have arrived.
template <int kPending>
__device__ __forceinline__ void wait_copy_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Asks for the line of an address to be fetched to L2: reads that come later find it there, as it
// is by then.
__device__ __forceinline__ void prefetch_l2(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

}  // namespace mxtile::sm90
