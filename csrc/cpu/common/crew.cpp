#include "common/crew.h"

#include <thread>

#include "common/job.h"

namespace te_mx::cpu {
namespace {

constexpr int kMostMembers = 64;

// Where a member that runs a task shows the job whose items others may take.
struct alignas(64) Board {
  std::atomic<Job*> job{nullptr};
  std::atomic<int> helpers{0};  // that may be reading the job
};

struct Crew {
  void (*fn)(void*, int64_t, int);
  void* ctx;
  int64_t n_tasks;
  int members;
  std::atomic<int64_t> next_task{0}, done{0};
  std::atomic<int> joined{0};
  Board boards[kMostMembers];
};

thread_local Board* my_board = nullptr;

// The job cannot end while it is looked at: its owner takes it down and then waits for `helpers`.
bool help(Board& board) {
  if (board.job.load(std::memory_order_relaxed) == nullptr) return false;
  board.helpers.fetch_add(1);
  Job* const job = board.job.load();
  const bool any = job != nullptr && run_items(*job);
  board.helpers.fetch_sub(1);
  return any;
}

void serve(void* data) noexcept {
  Crew& crew = *static_cast<Crew*>(data);
  const int me = crew.joined.fetch_add(1);
  if (me < crew.members) {
    my_board = &crew.boards[me];
    for (;;) {
      const int64_t task = crew.next_task.fetch_add(1);
      if (task >= crew.n_tasks) break;
      crew.fn(crew.ctx, task, me);
      crew.done.fetch_add(1);
    }
    my_board = nullptr;
  }
  while (crew.done.load() < crew.n_tasks) {
    bool any = false;
    for (int i = 1; i <= crew.members; ++i) {
      any = help(crew.boards[(me + i) % crew.members]) || any;
    }
    if (!any) std::this_thread::yield();
  }
}

}  // namespace

void parallel_tasks(int threads, int64_t n_tasks, int members,
                    void (*fn)(void* ctx, int64_t task, int member), void* ctx) {
  if (n_tasks <= 0) return;
  if (threads <= 1 || n_tasks == 1) {  // one task shares its items in the ordinary way
    for (int64_t task = 0; task < n_tasks; ++task) fn(ctx, task, 0);
    return;
  }
  Crew crew;
  crew.fn = fn;
  crew.ctx = ctx;
  crew.n_tasks = n_tasks;
  crew.members = members < 1 ? 1 : members < kMostMembers ? members : kMostMembers;
  run_on_team(threads, threads, serve, &crew);
}

bool offer_to_crew(Job& job) {
  Board* const board = my_board;
  if (board == nullptr) return false;
  my_board = nullptr;  // a parallel_for inside an item runs by itself
  board->job.store(&job);
  run_items(job);
  board->job.store(nullptr);
  while (board->helpers.load() != 0) std::this_thread::yield();
  my_board = board;
  return true;
}

}  // namespace te_mx::cpu
