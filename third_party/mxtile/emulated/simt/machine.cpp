#include "simt/machine.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <mutex>
#include <queue>

#include "simt/tensor_cores.hpp"

uint3 threadIdx{}, blockIdx{};
dim3 blockDim, gridDim;

// switch_stacks(from, to): saves what a call must keep on the present stack, whose place goes to
// *from, and goes on with the stack `to`.
asm(R"(
.text
.globl simt_switch_stacks
.type simt_switch_stacks, @function
simt_switch_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size simt_switch_stacks, .-simt_switch_stacks
)");
extern "C" void simt_switch_stacks(void** from, void* to);

namespace simt {
namespace {

constexpr size_t kStack = 256 * 1024;
constexpr int kSpinsAtOnce = 1000, kMostSpins = 500000;

struct Event {
  uint64_t due, number;
  Cta* to;
  std::function<void()> run;
  bool operator<(const Event& other) const {  // the earliest is the largest
    return due != other.due ? due > other.due : number > other.number;
  }
};

// All of a launch.
struct Machine {
  const Launch* launch = nullptr;
  Thread* running = nullptr;
  void* main_stack = nullptr;
  std::vector<Thread*> ready;
  std::priority_queue<Event> events;
  std::vector<std::unique_ptr<Cluster>> clusters;
  uint64_t time = 0, numbers = 0;
  int spins = 0;
  int alive = 0;
  bool finished = false;  // a cluster has
  std::string failure;
};
Machine machine;
uint64_t launched = 0;
uint64_t random_state = 0x9E3779B97F4A7C15u;

std::vector<Thread*> idle_threads;
std::vector<uint8_t*> idle_shared;

[[noreturn]] void enter();

Thread* new_thread() {
  if (idle_threads.empty()) {
    auto* const thread = new Thread;
    void* const memory = mmap(nullptr, kStack, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw Failure("no memory for the stack of a thread");
    mprotect(memory, 4096, PROT_NONE);  // what overflows it ends the process
    thread->stack = static_cast<uint8_t*>(memory);
    return thread;
  }
  Thread* const thread = idle_threads.back();
  idle_threads.pop_back();
  return thread;
}

void prepare(Thread& thread) {
  // As if it had called simt_switch_stacks at the start of enter().
  auto* top = reinterpret_cast<uint64_t*>(thread.stack + kStack);
  *--top = 0;  // where enter() would return to
  *--top = reinterpret_cast<uint64_t>(&enter);
  for (int i = 0; i < 6; ++i) *--top = 0;
  thread.stack_at = top;
}

void resume(Thread* next, void** from) {
  machine.running = next;
  threadIdx = next->index, blockIdx = next->cta->block;
  simt_switch_stacks(from, next->stack_at);
}

// What may happen at this moment, and then whoever is to run; null where nobody can.
Thread* choose() {
  Machine& m = machine;
  for (;;) {
    ++m.time;
    while (!m.events.empty() && (m.events.top().due <= m.time || m.ready.empty())) {
      const auto event = std::move(const_cast<Event&>(m.events.top()));
      m.events.pop();
      if (event.to != nullptr) --event.to->coming;
      event.run();
      m.spins = 0;
    }
    if (m.ready.empty()) return nullptr;
    const size_t i = random_word() % m.ready.size();
    Thread* const next = m.ready[i];
    m.ready[i] = m.ready.back();
    m.ready.pop_back();
    return next;
  }
}

void go_on(Thread& me) {
  Thread* const next = choose();
  if (next == &me) {
    machine.running = &me;
    return;
  }
  if (next == nullptr) {
    simt_switch_stacks(&me.stack_at, machine.main_stack);
  } else {
    resume(next, &me.stack_at);
  }
  threadIdx = me.index, blockIdx = me.cta->block;
}

void check_gathers(Warp& warp);
void check_named(Cta& cta, int id);
void check_cluster(Cluster& cluster);

void leave_kernel(Thread& me) {
  Cta& cta = *me.cta;
  if (!me.copies.empty())
    fail("left the kernel while its copies to shared memory are on their way");
  if (!me.stores.empty()) fail("left the kernel while its bulk stores still read shared memory");
  check_left(me);
  me.warp->there &= ~(1u << me.lane);
  --cta.alive, --cta.cluster->alive, --machine.alive;
  check_gathers(*me.warp);
  for (int id = 0; id < 16; ++id) check_named(cta, id);
  check_cluster(*cta.cluster);
  if (cta.alive == 0 && cta.coming != 0)
    fail("the CTA left while something was on its way to its shared memory");
  if (cta.alive == 0 && cta.going != 0)
    fail("the CTA left while another one was still to be sent its shared memory");
  if (cta.cluster->alive == 0) machine.finished = true;
}

void enter() {
  {
    machine.launch->kernel();
    leave_kernel(*machine.running);
  }
  Thread& me = *machine.running;
  Thread* const next = machine.finished ? nullptr : choose();
  if (next != nullptr) resume(next, &me.stack_at);
  simt_switch_stacks(&me.stack_at, machine.main_stack);
  __builtin_unreachable();
}

uint3 block_at(uint64_t i) {
  const dim3& grid = machine.launch->grid;
  return {static_cast<unsigned>(i % grid.x), static_cast<unsigned>(i / grid.x % grid.y),
          static_cast<unsigned>(i / grid.x / grid.y)};
}

void start_cluster(uint64_t number) {
  const Launch& launch = *machine.launch;
  auto cluster = std::make_unique<Cluster>();
  const unsigned threads = launch.block.x * launch.block.y * launch.block.z;
  for (uint32_t rank = 0; rank < launch.cluster; ++rank) {
    auto cta = std::make_unique<Cta>();
    cta->cluster = cluster.get(), cta->rank = rank;
    cta->block = block_at(number * launch.cluster + rank);
    cta->dynamic_bytes = launch.dynamic_bytes;
    cta->shared_end += launch.dynamic_bytes;
    std::memset(cta->shared, kPoison, cta->shared_end);
    cta->warps.resize((threads + 31) / 32);
    cta->groups.resize((threads + 127) / 128);
    for (unsigned i = 0; i < threads; ++i) {
      Thread* const thread = new_thread();
      thread->cta = cta.get(), thread->warp = &cta->warps[i / 32];
      thread->lane = static_cast<int>(i % 32), thread->number = i;
      thread->index = {i % launch.block.x, i / launch.block.x % launch.block.y,
                       i / launch.block.x / launch.block.y};
      thread->cluster_arrived = false, thread->waits_for = nullptr;
      thread->warp->lanes[i % 32] = thread, thread->warp->there |= 1u << i % 32;
      prepare(*thread);
      cta->threads.push_back(thread);
      machine.ready.push_back(thread);
    }
    cta->alive = static_cast<int>(threads);
    cluster->alive += cta->alive, machine.alive += cta->alive;
    cluster->ctas.push_back(std::move(cta));
  }
  machine.clusters.push_back(std::move(cluster));
}

void retire(Cluster& cluster) {
  for (auto& cta : cluster.ctas) {
    for (Thread* thread : cta->threads) {
      thread->copies = {}, thread->stores = {};
      idle_threads.push_back(thread);
    }
  }
}

std::string who_waits() {
  std::map<std::string, std::pair<int, const Thread*>> by;
  for (const auto& cluster : machine.clusters) {
    for (const auto& cta : cluster->ctas) {
      for (const Thread* thread : cta->threads) {
        if (thread->waits_for == nullptr) continue;
        std::string what = "CTA " + std::to_string(cta->block.x) + "," +
                           std::to_string(cta->block.y) + " warp " +
                           std::to_string(thread->number / 32) + ": " + thread->waits_for + " " +
                           std::to_string(thread->waits_for_which);
        const auto& bars = cta->barriers;
        if (const auto it = bars.find(static_cast<uint32_t>(thread->waits_for_which >> 1));
            it != bars.end() && std::strstr(thread->waits_for, "mbarrier") != nullptr) {
          what = what.substr(0, what.rfind(' ')) + " at " + std::to_string(it->first) +
                 " for parity " + std::to_string(thread->waits_for_which & 1) +
                 " (it is in phase " + std::to_string(it->second.phase) + ", misses " +
                 std::to_string(it->second.pending) + " arrivals and " +
                 std::to_string(it->second.bytes) + " bytes)";
        }
        auto& entry = by[what];
        ++entry.first, entry.second = thread;
      }
    }
  }
  std::string all;
  int lines = 0;
  for (const auto& [what, entry] : by) {
    if (++lines > 40) return all + "\n  ...";
    all += "\n  " + what + " (" + std::to_string(entry.first) + " threads)";
  }
  return all;
}

void clean_up() {
  for (auto& cluster : machine.clusters) retire(*cluster);
  machine.clusters.clear(), machine.ready.clear();
  machine.events = {};
  machine.alive = 0, machine.running = nullptr;
}

}  // namespace

// ---------------------------------------------------------------------------------------- running
uint64_t launches() { return launched; }
void set_seed(uint64_t seed) { random_state = seed * 2 + 0x9E3779B97F4A7C15u; }

uint64_t random_word() {
  uint64_t z = random_state += 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

void run(const Launch& launch) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  Machine& m = machine;
  ++launched;
  m.launch = &launch, m.failure.clear();
  m.time = 0, m.spins = 0, m.finished = false;
  blockDim = launch.block, gridDim = launch.grid;
  const uint64_t ctas = uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
  if (ctas % launch.cluster != 0) throw Failure("a grid has to be of whole clusters");
  if (launch.cluster > 1 && launch.grid.x % launch.cluster != 0)
    throw Failure("clusters have to lie along x");
  if (launch.dynamic_bytes > kSharedEnd - kSharedBase)
    throw Failure("more shared memory than there is");
  const uint64_t clusters = ctas / launch.cluster;
  const uint64_t threads =
      uint64_t{launch.block.x} * launch.block.y * launch.block.z * launch.cluster;
  if (threads == 0 || threads / launch.cluster > 1024) throw Failure("no such block");
  // Two at once where that is cheap: they may run in any order.
  const int at_once = threads <= 1024 && random_word() % 2 == 0 ? 2 : 1;
  uint64_t started = 0;
  const auto start = [&] { start_cluster(started++); };
  start();
  for (;;) {
    while (started < clusters && static_cast<int>(m.clusters.size()) < at_once) start();
    Thread* const next = choose();
    if (next == nullptr) {
      if (m.alive != 0) m.failure = "nobody can go on:" + who_waits();
    } else {
      resume(next, &m.main_stack);
    }
    if (!m.failure.empty()) break;
    if (m.finished) {
      m.finished = false;
      for (size_t i = 0; i < m.clusters.size();) {
        if (m.clusters[i]->alive != 0) {
          ++i;
          continue;
        }
        retire(*m.clusters[i]);
        m.clusters.erase(m.clusters.begin() + static_cast<std::ptrdiff_t>(i));
      }
    } else if (m.spins >= kSpinsAtOnce) {
      // They may wait for what a CTA writes that has not started.
      if (started < clusters) {
        start(), m.spins = 0;
      } else if (m.spins > kMostSpins) {
        m.failure = "threads wait in vain for a value in global memory";
        break;
      }
    }
    if (m.clusters.empty() && started == clusters) break;
  }
  const std::string failure = m.failure;
  clean_up();
  if (!failure.empty()) throw Failure(failure);
}

Thread& self() { return *machine.running; }

std::string place_of(const Thread& thread) {
  const uint3& b = thread.cta->block;
  return "block (" + std::to_string(b.x) + ", " + std::to_string(b.y) + ", " + std::to_string(b.z) +
         ") thread " + std::to_string(thread.number);
}

void fail(const std::string& what) {
  Machine& m = machine;
  if (m.running == nullptr) throw Failure(what);
  m.failure = place_of(*m.running) + ": " + what;
  void* nowhere;
  simt_switch_stacks(&nowhere, m.main_stack);
  __builtin_unreachable();
}

void block(const char* what, uint64_t which) {
  Thread& me = self();
  me.waits_for = what, me.waits_for_which = which;
  go_on(me);
  me.waits_for = nullptr;
}

void wake(Thread* thread) { machine.ready.push_back(thread); }

void wake_all(std::vector<Thread*>& threads) {
  for (Thread* thread : threads) wake(thread);
  threads.clear();
}

void yield(bool spin) {
  Thread& me = self();
  machine.ready.push_back(&me);
  if (spin && ++machine.spins % kSpinsAtOnce == 0) {
    simt_switch_stacks(&me.stack_at, machine.main_stack);
    threadIdx = me.index, blockIdx = me.cta->block;
    return;
  }
  go_on(me);
}

void later(Cta* to, std::function<void()> run) {
  Machine& m = machine;
  const uint64_t draw = random_word();
  const uint64_t delay = draw % 4 == 0 ? 0 : draw % 4 == 1 ? UINT64_MAX / 4 : draw / 4 % 400;
  if (to != nullptr) ++to->coming;
  m.events.push({m.time + delay, draw % 4 == 1 ? random_word() : ++m.numbers, to, std::move(run)});
}

// ------------------------------------------------------------------------------------------ warps
namespace {

void check_gathers(Warp& warp) {
  for (size_t i = 0; i < warp.open.size();) {
    Gather& g = *warp.open[i];
    if ((g.mask & warp.there & ~g.arrived) != 0) {
      ++i;
      continue;
    }
    wake_all(g.waiting);
    warp.idle.push_back(std::move(warp.open[i]));
    warp.open.erase(warp.open.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

}  // namespace

Gather& gather(uint32_t mask, const char* what, const void* value, size_t bytes) {
  Thread& me = self();
  Warp& warp = *me.warp;
  const uint32_t mine = 1u << me.lane;
  if ((mask & mine) == 0) fail(std::string(what) + " by a lane that its mask leaves out");
  Gather* found = nullptr;
  for (auto& open : warp.open) {
    if (open->mask == mask) found = open.get();
  }
  if (found == nullptr) {
    for (size_t i = 0; i < warp.idle.size() && found == nullptr; ++i) {
      if (warp.idle[i]->left != 0) continue;
      warp.open.push_back(std::move(warp.idle[i]));
      warp.idle.erase(warp.idle.begin() + static_cast<std::ptrdiff_t>(i));
      found = warp.open.back().get();
    }
    if (found == nullptr) {
      warp.open.push_back(std::make_unique<Gather>());
      found = warp.open.back().get();
    }
    found->mask = mask, found->arrived = 0, found->left = 0, found->what = what;
    std::memset(found->values, kPoison, sizeof found->values);
  }
  if (std::strcmp(found->what, what) != 0)
    fail(std::string("lanes of a warp part: ") + what + " here, " + found->what + " there");
  found->arrived |= mine, ++found->left;
  std::memcpy(found->values[me.lane], value, bytes);
  if ((mask & warp.there & ~found->arrived) != 0) {
    found->waiting.push_back(&me);
    block(what, mask);
  } else {
    check_gathers(warp);
  }
  return *found;
}

void leave(Gather& gather) { --gather.left; }

// -------------------------------------------------------------------------------- CTAs and
// clusters
namespace {

void check_named(Cta& cta, int id) {
  NamedBarrier& bar = cta.named[id];
  if (bar.arrived == 0) return;
  const int needed = bar.expected == 0 ? cta.alive : bar.expected;
  if (bar.arrived < needed) return;
  if (bar.arrived > needed)
    fail("more arrivals at named barrier " + std::to_string(id) + " than it counts to");
  for (Thread* thread : bar.waiting) thread->result = static_cast<uint64_t>(bar.count);
  bar.arrived = 0, bar.count = 0;
  wake_all(bar.waiting);
}

void check_cluster(Cluster& cluster) {
  if (cluster.alive == 0 || cluster.arrived < cluster.alive) return;
  cluster.arrived = 0, ++cluster.phase;
  wake_all(cluster.waiting);
}

}  // namespace

int named_barrier(int id, int count, bool wait, bool predicate) {
  Thread& me = self();
  if (id < 0 || id > 15) fail("there is no named barrier " + std::to_string(id));
  if (count % 32 != 0) fail("a named barrier counts whole warps");
  if (id == 0 && count == static_cast<int>(me.cta->threads.size())) count = 0;
  NamedBarrier& bar = me.cta->named[id];
  if (bar.arrived != 0 && bar.expected != count)
    fail("named barrier " + std::to_string(id) + " counts to " + std::to_string(bar.expected) +
         " for others, to " + std::to_string(count) + " here");
  bar.expected = count, ++bar.arrived;
  if (predicate) ++bar.count;
  me.result = 0;
  if (wait) bar.waiting.push_back(&me);
  check_named(*me.cta, id);
  if (wait) {
    // It is on the ready list where the barrier is complete.
    block(id == 0 ? "__syncthreads" : "named barrier", static_cast<uint64_t>(id));
  }
  return static_cast<int>(me.result);
}

void cluster_arrive() {
  Thread& me = self();
  if (me.cluster_arrived) fail("arrives twice at the cluster barrier without waiting");
  me.cluster_arrived = true;
  Cluster& cluster = *me.cta->cluster;
  me.cluster_phase = cluster.phase;
  ++cluster.arrived;
  check_cluster(cluster);
}

void cluster_wait() {
  Thread& me = self();
  if (!me.cluster_arrived) fail("waits at the cluster barrier without having arrived");
  me.cluster_arrived = false;
  Cluster& cluster = *me.cta->cluster;
  if (cluster.phase != me.cluster_phase) return;
  cluster.waiting.push_back(&me);
  block("the cluster barrier", cluster.phase);
}

}  // namespace simt
