// mxtile/sm90/copy_async.cuh on the CPU.
#pragma once

#include "mxtile/sm90/math.cuh"

namespace mxtile::sm90 {

inline void copy16_async(void* smem, const void* gmem, bool there) {
  simt::copy_async(smem, gmem, 16, there ? 16 : 0);
}
// To shared memory by its address, as the device counts, or by a pointer.
inline void copy4_async(uint32_t smem, const void* gmem) {
  simt::copy_async(simt::place(smem, 4, 4), gmem, 4, 4);
}
inline void copy4_async(void* smem, const void* gmem) { simt::copy_async(smem, gmem, 4, 4); }
inline void end_copy_group() { simt::copy_async_commit(); }
template <int kPending>
void wait_copy_groups() {
  simt::copy_async_wait(kPending);
}

inline void prefetch_l2(const void*) {}

}  // namespace mxtile::sm90
