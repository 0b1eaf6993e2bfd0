// One streaming multiprocessor on the CPU, as far as CUDA's promises go: threads are fibers of one
// thread of the host, and only what a program may rely on happens in order. Who runs next is drawn
// at every wait, and what is asynchronous is late on purpose (async.hpp).
//
// A mistake that shows (a barrier that nobody completes, an address outside shared memory, lanes of
// a warp at different collectives) ends the launch with a Failure that says who did what.
#pragma once

#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include <vector_types.h>

namespace simt {

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Shared memory: addresses are offsets into that of the CTA, with the rank of a CTA of the cluster,
// plus 1, above them where they name another one's.
inline constexpr uint32_t kSharedBase = 1024, kSharedEnd = 228 * 1024, kRankShift = 24;

struct Cta;
struct Cluster;
struct Thread;

// What lanes of a warp do together: all of `mask` bring a value and get those of all.
struct Gather {
  uint32_t mask = 0, arrived = 0, left = 0;
  const char* what = nullptr;
  alignas(16) uint8_t values[32][64];
  std::vector<Thread*> waiting;
};

struct Warp {
  Thread* lanes[32] = {};
  uint32_t there = 0;  // lanes that have not left
  std::vector<std::unique_ptr<Gather>> open, idle;
};

struct WarpGroup;  // tensor_cores.cpp
struct WarpGroupDelete {
  void operator()(WarpGroup* group) const;
};

// bar.sync and its kin.
struct NamedBarrier {
  int expected = 0, arrived = 0;
  std::vector<Thread*> waiting;
  int count = 0;  // threads whose predicate is true
};

struct MBarrier {
  uint32_t expected = 0;
  int64_t pending = 0, bytes = 0;
  uint32_t phase = 0;
  std::vector<Thread*> waiting;
};

// A copy that a thread waits for by groups.
struct Copy {
  std::function<void()> run;
};
struct CopyGroups {
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
  void commit() { groups.push_back(std::move(open)), open.clear(); }
  void wait(size_t pending);
  bool empty() const;
};

struct Thread {
  void* stack_at = nullptr;  // of a thread that does not run
  uint8_t* stack = nullptr;
  Cta* cta = nullptr;
  Warp* warp = nullptr;
  int lane = 0;
  uint32_t number = 0;  // in the CTA
  uint3 index{};
  const char* waits_for = nullptr;
  uint64_t waits_for_which = 0;
  uint64_t result = 0;  // what the one that woke it says
  CopyGroups copies, stores;
  bool cluster_arrived = false;
  uint32_t cluster_phase = 0;
};

struct Cta {
  Cluster* cluster = nullptr;
  uint32_t rank = 0;
  uint3 block{};
  uint8_t* shared = nullptr;  // kSharedEnd bytes
  uint32_t shared_end = kSharedBase, dynamic_bytes = 0;
  std::map<const void*, uint32_t> static_places;
  std::unordered_map<uint32_t, MBarrier> barriers;
  NamedBarrier named[16];
  std::vector<Warp> warps;
  std::vector<std::unique_ptr<WarpGroup, WarpGroupDelete>> groups;
  std::vector<Thread*> threads;
  int alive = 0;
  int coming = 0;  // asynchronous writes on their way to its shared memory
  int going = 0;   // copies that have still to read it for another CTA

  Cta();
  ~Cta();
};

struct Cluster {
  std::vector<std::unique_ptr<Cta>> ctas;
  int alive = 0, arrived = 0;
  uint32_t phase = 0;
  std::vector<Thread*> waiting;
};

struct Launch {
  dim3 grid, block;
  uint32_t cluster = 1, dynamic_bytes = 0;
  std::function<void()> kernel;
};

// Runs a kernel to its end. Throws Failure.
void run(const Launch& launch);

uint64_t launches();  // so far

// Of all launches from now on: where the order of things is drawn from.
void set_seed(uint64_t seed);
uint64_t random_word();

// ------------------------------------------------------------------ for the thread that runs
Thread& self();
[[noreturn]] void fail(const std::string& what);
// Until wake() of this thread.
void block(const char* what, uint64_t which);
void wake(Thread* thread);
void wake_all(std::vector<Thread*>& threads);
// Lets others run. `spin`: because this one waits for a value that another one writes.
void yield(bool spin = false);
std::string place_of(const Thread& thread);

// An asynchronous event, at some time from now on. `to`: the CTA whose shared memory it writes.
void later(Cta* to, std::function<void()> run);

// ------------------------------------------------------------------ warps
Gather& gather(uint32_t mask, const char* what, const void* value, size_t bytes);
void leave(Gather& gather);

template <class T>
struct Values {
  const Gather& of;
  T operator[](int lane) const {
    T value;
    std::memcpy(&value, of.values[lane], sizeof(T));
    return value;
  }
};

// make(values of the lanes in `mask`), in every one of them.
template <class T, class F>
auto together(uint32_t mask, const char* what, const T& value, const F& make) {
  static_assert(sizeof(T) <= 64);
  Gather& g = gather(mask, what, &value, sizeof(T));
  const auto made = make(Values<T>{g});
  leave(g);
  return made;
}

// ------------------------------------------------------------------ CTAs and clusters
// arrives, and waits where `wait`; count 0: all threads of the CTA. Of __syncthreads_*: how many
// threads' predicate is true.
int named_barrier(int id, int count, bool wait, bool predicate = false);
void cluster_arrive();
void cluster_wait();

// ------------------------------------------------------------------ shared memory
uint32_t address_of(const void* p);  // of this CTA's
Cta& cta_of(uint32_t address);
// Where `bytes` bytes at an address lie, which has to be a multiple of `aligned`.
uint8_t* place(uint32_t address, size_t bytes, size_t aligned);
uint32_t map_to(uint32_t address, uint32_t rank);
void* static_shared(const void* key, size_t bytes, size_t aligned);
void* dynamic_shared(size_t aligned);
inline constexpr uint8_t kPoison = 0xFF;  // NaN in every format

// ------------------------------------------------------------------ mbarriers
void mbarrier_init(uint32_t address, uint32_t arrivals);
void mbarrier_arrive(uint32_t address, uint32_t count = 1, uint32_t bytes = 0);
void mbarrier_wait(uint32_t address, uint32_t parity);
void mbarrier_bytes(Cta& cta, uint32_t address, uint32_t bytes);  // have arrived

}  // namespace simt

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
