// Shared memory and the barriers in it.
#include <algorithm>

#include "simt/machine.hpp"
#include "simt/tensor_cores.hpp"

namespace simt {
namespace {

std::vector<uint8_t*>& idle_memory() {
  static std::vector<uint8_t*> all;
  return all;
}

// What an mbarrier looks like in memory: whoever writes over it is found out.
uint64_t mark_of(uint32_t offset) { return 0x6D62617272696572u ^ (uint64_t{offset} << 20); }

MBarrier& barrier_at(Cta& cta, uint32_t offset, const char* what) {
  const auto found = cta.barriers.find(offset);
  if (found == cta.barriers.end())
    fail(std::string(what) + ": there is no mbarrier at " + std::to_string(offset) +
         " of CTA rank " + std::to_string(cta.rank) + " (was it initialised before?)");
  uint64_t there;
  std::memcpy(&there, cta.shared + offset, 8);
  if (there != mark_of(offset))
    fail(std::string(what) + ": something was written over the mbarrier at " +
         std::to_string(offset));
  return found->second;
}

uint32_t offset_of(uint32_t address) { return address & ((1u << kRankShift) - 1); }

void complete_if_done(MBarrier& bar) {
  if (bar.pending != 0 || bar.bytes != 0) return;
  ++bar.phase, bar.pending = bar.expected;
  // They ask again: the phase may be over once more when they run.
  wake_all(bar.waiting);
}

}  // namespace

Cta::Cta() {
  auto& idle = idle_memory();
  if (idle.empty()) {
    shared = static_cast<uint8_t*>(std::aligned_alloc(1024, kSharedEnd));
  } else {
    shared = idle.back(), idle.pop_back();
  }
}
Cta::~Cta() { idle_memory().push_back(shared); }

// ----------------------------------------------------------------------------------------
// addresses
uint32_t address_of(const void* p) {
  const Cta& cta = *self().cta;
  const auto* const at = static_cast<const uint8_t*>(p);
  // NOTE: an address that nobody uses may lie behind the end; place() looks closer.
  if (at < cta.shared + kSharedBase || at >= cta.shared + 2 * kSharedEnd)
    fail("takes the shared address of what is not in shared memory of its CTA");
  return static_cast<uint32_t>(at - cta.shared);
}

Cta& cta_of(uint32_t address) {
  const uint32_t rank = address >> kRankShift;
  Cta& mine = *self().cta;
  if (rank == 0) return mine;
  auto& all = mine.cluster->ctas;
  if (rank > all.size()) fail("the cluster has no CTA of rank " + std::to_string(rank - 1));
  Cta& other = *all[rank - 1];
  if (other.alive == 0) fail("reaches into the shared memory of a CTA that has left");
  return other;
}

uint8_t* place(uint32_t address, size_t bytes, size_t aligned) {
  Cta& cta = cta_of(address);
  const uint32_t offset = offset_of(address);
  if (offset % aligned != 0)
    fail("shared address " + std::to_string(offset) + " is not a multiple of " +
         std::to_string(aligned));
  if (offset < kSharedBase || offset + bytes > cta.shared_end)
    fail("shared address " + std::to_string(offset) + " with " + std::to_string(bytes) +
         " bytes is outside of " + std::to_string(kSharedBase) + " .. " +
         std::to_string(cta.shared_end));
  return cta.shared + offset;
}

uint32_t map_to(uint32_t address, uint32_t rank) {
  if (rank >= self().cta->cluster->ctas.size())
    fail("the cluster has no CTA of rank " + std::to_string(rank));
  return offset_of(address) | (rank + 1) << kRankShift;
}

void* static_shared(const void* key, size_t bytes, size_t aligned) {
  Cta& cta = *self().cta;
  const auto [found, is_new] = cta.static_places.try_emplace(key, 0);
  if (is_new) {
    const uint32_t at = (cta.shared_end + static_cast<uint32_t>(aligned) - 1) / aligned * aligned;
    if (at + bytes > kSharedEnd) fail("more shared memory than there is");
    found->second = at, cta.shared_end = at + static_cast<uint32_t>(bytes);
    std::memset(cta.shared + at, kPoison, bytes);
  }
  return cta.shared + found->second;
}

void* dynamic_shared(size_t aligned) {
  if (kSharedBase % aligned != 0) fail("dynamic shared memory is aligned to 1024 at most");
  return self().cta->shared + kSharedBase;
}

// ----------------------------------------------------------------------------------------
// mbarriers
void mbarrier_init(uint32_t address, uint32_t arrivals) {
  uint8_t* const at = place(address, 8, 8);
  if (arrivals == 0 || arrivals >= 1u << 20) fail("an mbarrier of no or too many arrivals");
  Cta& cta = cta_of(address);
  MBarrier& bar = cta.barriers[offset_of(address)];
  if (!bar.waiting.empty()) fail("initialises an mbarrier where others wait");
  bar = {}, bar.expected = arrivals, bar.pending = arrivals;
  const uint64_t mark = mark_of(offset_of(address));
  std::memcpy(at, &mark, 8);
}

void mbarrier_arrive(uint32_t address, uint32_t count, uint32_t bytes) {
  place(address, 8, 8);
  MBarrier& bar = barrier_at(cta_of(address), offset_of(address), "arrival");
  if (bar.pending < count)
    fail("more arrivals than the mbarrier at " + std::to_string(offset_of(address)) + " of " +
         std::to_string(bar.expected) + " expects");
  bar.bytes += bytes;
  if (bar.bytes >= 1 << 20) fail("more bytes than an mbarrier can count");
  bar.pending -= count;
  complete_if_done(bar);
  if (random_word() % 8 == 0) yield();
}

void mbarrier_wait(uint32_t address, uint32_t parity) {
  place(address, 8, 8);
  if (address >> kRankShift != 0) fail("waits at an mbarrier of another CTA");
  if (parity > 1) fail("a parity is 0 or 1");
  Cta& cta = *self().cta;
  bool waited = false;
  for (;;) {
    MBarrier& bar = barrier_at(cta, offset_of(address), "wait");
    if ((bar.phase & 1) != parity) break;
    bar.waiting.push_back(&self());
    block("an mbarrier", uint64_t{offset_of(address)} << 1 | parity);
    waited = true;
  }
  if (!waited && random_word() % 8 == 0) yield();
}

void mbarrier_bytes(Cta& cta, uint32_t address, uint32_t bytes) {
  MBarrier& bar = barrier_at(cta, offset_of(address), "bytes that arrive");
  bar.bytes -= bytes;
  if (bar.bytes <= -(1 << 20)) fail("more bytes arrive than an mbarrier can count");
  complete_if_done(bar);
}

// -------------------------------------------------------------------------------------------
// copies
void CopyGroups::wait(size_t pending) {
  while (groups.size() > pending) {
    for (const Copy& copy : groups.front()) copy.run();
    groups.pop_front();
  }
}

bool CopyGroups::empty() const {
  return open.empty() &&
         std::all_of(groups.begin(), groups.end(), [](const auto& g) { return g.empty(); });
}

}  // namespace simt
