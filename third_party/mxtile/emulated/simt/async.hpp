// The asynchronous instructions. What they write is kPoison from the moment they are issued, what
// they read is read when they complete: at some random time where an mbarrier counts their bytes,
// else at the wait that they must have been completed for.
#pragma once

#include "simt/machine.hpp"

namespace simt {

// cp.async: the first `bytes` of `size` bytes, zeros behind them.
void copy_async(void* to, const void* from, uint32_t size, uint32_t bytes);
void copy_async_commit();
void copy_async_wait(size_t pending);  // groups
void copy_async_wait_all();            // what no group has, too

// cp.async.bulk to shared memory of this CTA.
// To the CTAs in `mask` (0: this one).
void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t bar, uint32_t mask = 0);
// cp.async.bulk from shared memory of this CTA to that of another one.
void bulk_send(uint32_t to, uint32_t from, uint32_t bytes, uint32_t bar);
// st.async: `bytes` of `value` (4, 8 or 16).
void send(uint32_t to, const void* value, uint32_t bytes, uint32_t bar);

// A 2-D tensor map as the emulated encoder writes it: into a CUtensorMap.
struct TensorMap {
  uint64_t mark;
  uint8_t* base;
  int64_t inner, outer, pitch;  // elements, rows, bytes
  int32_t box_inner, box_outer, element_bytes, type;
  static constexpr uint64_t kMark = 0x746E736F724D6170u;
};
// cp.async.bulk.tensor.2d under the 128-byte swizzle, to the CTAs in `mask` (0: this one).
void tensor_load(uint32_t to, const void* map, uint32_t bar, int inner, int outer, uint32_t mask);
// Stores and sums from shared memory, of bulk groups.
void tensor_store(const void* map, uint32_t from, int inner, int outer, bool add);
void store_commit();
void store_wait(size_t pending);

}  // namespace simt
