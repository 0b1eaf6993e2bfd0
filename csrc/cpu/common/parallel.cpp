#include "common/parallel.h"

#include <algorithm>
#include <atomic>
#include <thread>

#include "common/job.h"
#include "common/openmp_team.h"
#include "common/task_team.h"
#include "common/thread_team.h"
#include "te_mx/cpu.h"

namespace te_mx::cpu {
namespace {

void work(void* data) noexcept { run_items(*static_cast<Job*>(data)); }

std::atomic<const char*> last_team{"inline"};
std::atomic<int64_t> regions{0};

// A team of more members than this has no use, and a runtime that cannot start them ends the
// process.
int most_threads() {
  static const int most = std::max(64, static_cast<int>(std::thread::hardware_concurrency()));
  return most;
}

}  // namespace

void run_on_team(int threads, int64_t n_items, void (*fn)(void*) noexcept, void* data) {
  regions.fetch_add(1, std::memory_order_relaxed);
  // NOTE: the team keeps `threads` members even for fewer items: libgomp ends the threads that a
  // smaller team leaves out and must start them again for the next torch operator.
  threads = std::min(threads, most_threads());
  if (openmp_team_run(threads, fn, data)) {
    last_team.store("openmp", std::memory_order_relaxed);
    return;
  }
  last_team.store("threads", std::memory_order_relaxed);
  thread_team_run(n_items < threads ? static_cast<int>(n_items) : threads, fn, data);
}

void parallel_for(int threads, int64_t n_items, void (*fn)(void*, int64_t), void* ctx) {
  if (threads <= 1 || n_items <= 1) {
    for (int64_t item = 0; item < n_items; ++item) fn(ctx, item);
    return;
  }
  Job job{fn, ctx, n_items};
  if (!share_with_team(job)) run_on_team(threads, n_items, work, &job);
}

int64_t parallel_regions() { return regions.load(std::memory_order_relaxed); }

const char* parallel_team() { return last_team.load(std::memory_order_relaxed); }

}  // namespace te_mx::cpu
