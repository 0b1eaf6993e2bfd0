// Items that a counter hands out: what parallel_for and parallel_tasks share.
#pragma once

#include <atomic>
#include <cstdint>

namespace te_mx::cpu {

struct Job {
  void (*fn)(void*, int64_t);
  void* ctx;
  int64_t n_items;
  std::atomic<int64_t> next{0};
};

// Runs items until none is left. True when it ran one.
inline bool run_items(Job& job) noexcept {
  bool any = false;
  for (;;) {
    const int64_t item = job.next.fetch_add(1, std::memory_order_relaxed);
    if (item >= job.n_items) return any;
    job.fn(job.ctx, item);
    any = true;
  }
}

// Runs fn(data) on the team of the process: that of torch, else our own threads.
void run_on_team(int threads, int64_t n_items, void (*fn)(void*) noexcept, void* data);

}  // namespace te_mx::cpu
