// Items that counters hand out: what parallel_for and parallel_tasks share.
//
// The caller takes items from the front and whoever helps from the back, so that a thread finds
// much of what it wrote in the step or the call before in its own cache. Written by another core, a
// line costs more to take over than to fill.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

namespace te_mx::cpu {

struct Job {
  void (*fn)(void*, int64_t);
  void* ctx;
  int64_t n_items;
  std::atomic<int64_t> taken{0}, front{0}, back{0};  // no more than n_items of both ends
  const std::thread::id caller = std::this_thread::get_id();
};

// Runs items until none is left. True when it ran one.
inline bool run_items(Job& job) noexcept {
  const bool caller = std::this_thread::get_id() == job.caller;
  bool any = false;
  while (job.taken.fetch_add(1, std::memory_order_relaxed) < job.n_items) {
    const int64_t done = (caller ? job.front : job.back).fetch_add(1, std::memory_order_relaxed);
    job.fn(job.ctx, caller ? done : job.n_items - 1 - done);
    any = true;
  }
  return any;
}

// Runs fn(data) on the team of the process: that of torch, else our own threads.
void run_on_team(int threads, int64_t n_items, void (*fn)(void*) noexcept, void* data);

}  // namespace te_mx::cpu
