#include "common/task_team.h"

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

struct TaskTeam {
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
  TaskTeam& team = *static_cast<TaskTeam*>(data);
  const int me = team.joined.fetch_add(1);
  if (me < team.members) {
    my_board = &team.boards[me];
    for (;;) {
      const int64_t task = team.next_task.fetch_add(1);
      if (task >= team.n_tasks) break;
      team.fn(team.ctx, task, me);
      team.done.fetch_add(1);
    }
    my_board = nullptr;
  }
  while (team.done.load() < team.n_tasks) {
    bool any = false;
    for (int i = 1; i <= team.members; ++i) {
      any = help(team.boards[(me + i) % team.members]) || any;
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
  TaskTeam team;
  team.fn = fn;
  team.ctx = ctx;
  team.n_tasks = n_tasks;
  team.members = members < 1 ? 1 : members < kMostMembers ? members : kMostMembers;
  run_on_team(threads, threads, serve, &team);
}

bool share_with_team(Job& job) {
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
