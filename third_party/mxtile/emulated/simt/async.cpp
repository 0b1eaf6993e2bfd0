#include "simt/async.hpp"

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace simt {
namespace {

uint32_t local(uint32_t address) { return address & ((1u << kRankShift) - 1); }

// A byte of a tile of rows of 128 or 64 bytes under their swizzle: an address inside the CTA's
// shared memory.
uint32_t swizzled(uint32_t address, int row_bytes) {
  return address ^ ((address >> 7 & (row_bytes == 64 ? 3 : 7)) << 4);
}

const TensorMap& checked(const TensorMap& map) {
  if (map.mark != TensorMap::kMark) fail("what should be a tensor map is none");
  return map;
}
TensorMap map_at(const void* p) {
  if (reinterpret_cast<uintptr_t>(p) % 64 != 0) fail("a tensor map is not aligned to 64 bytes");
  TensorMap map;
  std::memcpy(&map, p, sizeof map);
  return checked(map);
}

// Calls run(offset in shared memory without swizzle, address in global memory or null where the
// element is outside, bytes) for every 16 bytes of a box. Inner sizes may end in such a piece.
template <class Run>
void walk(const TensorMap& m, int inner, int outer, const Run& run) {
  const int row_bytes = m.box_inner * m.element_bytes;
  const int64_t inner_bytes = m.inner * m.element_bytes;
  for (int r = 0; r < m.box_outer; ++r) {
    for (int b = 0; b < row_bytes; b += 16) {
      const int64_t row = int64_t{outer} + r, at = int64_t{inner} * m.element_bytes + b;
      const bool there = row >= 0 && row < m.outer && at >= 0 && at < inner_bytes;
      const int64_t left = there ? inner_bytes - at : 0;
      run(static_cast<uint32_t>(r * row_bytes + b), there ? m.base + row * m.pitch + at : nullptr,
          static_cast<uint32_t>(left < 16 ? left : 16));
    }
  }
}

}  // namespace

// -------------------------------------------------------------------------------------- cp.async
void copy_async(void* to, const void* from, uint32_t size, uint32_t bytes) {
  const uint32_t at = address_of(to);
  uint8_t* const dest = place(at, size, size);
  if (bytes > size) fail("cp.async of more bytes than its size");
  if (reinterpret_cast<uintptr_t>(from) % size != 0 && bytes != 0)
    fail("cp.async from an address that is not a multiple of its size");
  std::memset(dest, kPoison, size);
  self().copies.open.push_back({[=] {
    if (bytes != 0) std::memcpy(dest, from, bytes);
    std::memset(dest + bytes, 0, size - bytes);
  }});
}
void copy_async_commit() { self().copies.commit(); }
void copy_async_wait(size_t pending) { self().copies.wait(pending); }
void copy_async_wait_all() {
  CopyGroups& copies = self().copies;
  copies.wait(0);
  for (const Copy& copy : copies.open) copy.run();
  copies.open.clear();
}

// ------------------------------------------------------------------------------ bytes on a barrier
void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t bar, uint32_t mask) {
  place(to, bytes, 16), place(bar, 8, 8);
  if (bytes % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0)
    fail("a bulk copy of other than whole, aligned 16 bytes");
  if (to >> kRankShift != bar >> kRankShift) fail("a bulk copy counts at another CTA's barrier");
  const auto copy = [&](uint32_t there, uint32_t its_bar) {
    uint8_t* const dest = place(there, bytes, 16);
    place(its_bar, 8, 8);
    Cta& cta = cta_of(there);
    std::memset(dest, kPoison, bytes);
    later(&cta, [=, &cta] {
      std::memcpy(dest, from, bytes);
      mbarrier_bytes(cta, its_bar, bytes);
    });
  };
  if (mask == 0) return copy(to, bar);
  const uint32_t ctas = static_cast<uint32_t>(self().cta->cluster->ctas.size());
  if (mask >> ctas != 0) fail("a multicast to CTAs that the cluster does not have");
  for (uint32_t rank = 0; rank < ctas; ++rank)
    if ((mask >> rank & 1) != 0) copy(map_to(to, rank), map_to(bar, rank));
}

void bulk_send(uint32_t to, uint32_t from, uint32_t bytes, uint32_t bar) {
  uint8_t* const dest = place(to, bytes, 16);
  const uint8_t* const source = place(from, bytes, 16);
  place(bar, 8, 8);
  if (bytes % 16 != 0) fail("a bulk copy of other than whole 16 bytes");
  if (to >> kRankShift != bar >> kRankShift) fail("a bulk copy counts at another CTA's barrier");
  Cta &cta = cta_of(to), &mine = *self().cta;
  std::memset(dest, kPoison, bytes);
  ++mine.going;
  later(&cta, [=, &cta, &mine] {
    --mine.going;
    std::memcpy(dest, source, bytes);
    mbarrier_bytes(cta, bar, bytes);
  });
}

void send(uint32_t to, const void* value, uint32_t bytes, uint32_t bar) {
  uint8_t* const dest = place(to, bytes, bytes);
  place(bar, 8, 8);
  if (to >> kRankShift != bar >> kRankShift) fail("a remote store counts at another CTA's barrier");
  Cta& cta = cta_of(to);
  std::array<uint8_t, 16> kept{};
  std::memcpy(kept.data(), value, bytes);
  std::memset(dest, kPoison, bytes);
  later(&cta, [=, &cta] {
    std::memcpy(dest, kept.data(), bytes);
    mbarrier_bytes(cta, bar, bytes);
  });
}

// ---------------------------------------------------------------------------------------- tensor
// maps
void tensor_load(uint32_t to, const void* map_at_, uint32_t bar, int inner, int outer,
                 uint32_t mask) {
  const TensorMap map = map_at(map_at_);
  const uint32_t bytes = static_cast<uint32_t>(map.box_inner * map.element_bytes * map.box_outer);
  Cta& mine = *self().cta;
  const auto& all = mine.cluster->ctas;
  if (mask >> all.size() != 0) fail("a multicast to CTAs that the cluster does not have");
  if (to % 1024 != 0) fail("a swizzled tile does not start at a multiple of 1024 bytes");
  if (inner * map.element_bytes % 16 != 0) fail("a box starts inside of 16 bytes");
  for (uint32_t rank = 0; rank < all.size(); ++rank) {
    if (mask == 0 ? rank != mine.rank : (mask >> rank & 1) == 0) continue;
    const uint32_t there = map_to(to, rank), its_bar = map_to(bar, rank);
    place(there, bytes, 1024), place(its_bar, 8, 8);
    Cta& cta = *all[rank];
    std::memset(cta.shared + local(there), kPoison, bytes);
    later(&cta, [=, &cta] {
      walk(map, inner, outer, [&](uint32_t at, const uint8_t* from, uint32_t count) {
        uint8_t* const dest =
            cta.shared + swizzled(local(there) + at, map.box_inner * map.element_bytes);
        if (count != 0) std::memcpy(dest, from, count);
        std::memset(dest + count, 0, 16 - count);
      });
      mbarrier_bytes(cta, its_bar, bytes);
    });
  }
}

namespace {

template <class T, class Add>
void add_to(uint8_t* to, const uint8_t* from, uint32_t bytes, const Add& add) {
  for (uint32_t i = 0; i < bytes; i += sizeof(T)) {
    T a, b;
    std::memcpy(&a, to + i, sizeof(T)), std::memcpy(&b, from + i, sizeof(T));
    a = add(a, b);
    std::memcpy(to + i, &a, sizeof(T));
  }
}

}  // namespace

void tensor_store(const void* map_at_, uint32_t from, int inner, int outer, bool add) {
  const TensorMap map = map_at(map_at_);
  if (from % 1024 != 0) fail("a swizzled tile does not start at a multiple of 1024 bytes");
  if (inner * map.element_bytes % 16 != 0) fail("a box starts inside of 16 bytes");
  place(from, static_cast<size_t>(map.box_inner * map.element_bytes * map.box_outer), 1024);
  const uint8_t* const shared = self().cta->shared;
  self().stores.open.push_back({[=] {
    walk(map, inner, outer, [&](uint32_t at, uint8_t* to, uint32_t count) {
      if (to == nullptr) return;
      const uint8_t* const source =
          shared + swizzled(local(from) + at, map.box_inner * map.element_bytes);
      if (!add) {
        // NOTE: the copy engine writes whole 16 bytes, past the end of a row, too.
        std::memcpy(to, source, 16);
      } else if (map.type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32) {
        add_to<float>(to, source, count, [](float a, float b) { return a + b; });
      } else if (map.type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16) {
        add_to<__nv_bfloat16>(to, source, count, [](auto a, auto b) {
          return __float2bfloat16(__bfloat162float(a) + __bfloat162float(b));
        });
      } else if (map.type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16) {
        add_to<__half>(to, source, count, [](auto a, auto b) {
          return __float2half(__half2float(a) + __half2float(b));
        });
      } else {
        fail("a sum of elements of an unknown type");
      }
      (void)count;
    });
  }});
}

void store_commit() { self().stores.commit(); }
void store_wait(size_t pending) { self().stores.wait(pending); }

}  // namespace simt
