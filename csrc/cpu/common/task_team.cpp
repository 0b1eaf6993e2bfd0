#include "common/task_team.h"

#include <thread>

#include "common/job.h"
#include "te_mx/cpu.h"

namespace te_mx::cpu {
namespace {

constexpr int kMostMembers = 64;
constexpr int kSpins = 2000;  // 20 to 70 us, longer than what a task does between two steps

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
  const std::thread::id caller = std::this_thread::get_id();
  std::atomic<int64_t> next_task{0}, done{0};
  std::atomic<int> joined{0};
  bool next_is_last = false;             // of the only task
  bool more_follow = false;              // whatever its problem says
  std::atomic<bool> last{false};         // its last job was shown
  alignas(64) std::atomic<int> news{0};  // counts jobs that were shown, and the end of the tasks
  Board boards[kMostMembers];
};

thread_local TaskTeam* my_team = nullptr;
thread_local Board* my_board = nullptr;
std::atomic<int64_t> late{0};

void set_more_follow(bool more) {
  if (my_team != nullptr && my_team->n_tasks == 1) my_team->more_follow = more;
}

// Whoever waits spins for a while, then sleeps: on a busy machine others need its core, perhaps the
// very thread that it waits for, and one that slept comes back first.
template <class Ready>
void await(const std::atomic<int>& value, int seen, const Ready& ready) {
  for (int i = 0; i < kSpins; ++i) {
    if (ready()) return;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  while (!ready()) {
    value.wait(seen);
    seen = value.load();
  }
}

void tell(TaskTeam& team) {
  team.news.fetch_add(1);
  team.news.notify_all();
}

// The job cannot end while it is looked at: its owner takes it down and then waits for `helpers`.
void help(Board& board) {
  if (board.job.load(std::memory_order_relaxed) == nullptr) return;
  board.helpers.fetch_add(1);
  Job* const job = board.job.load();
  if (job != nullptr) run_items(*job);
  if (board.helpers.fetch_sub(1) == 1) board.helpers.notify_one();
}

void serve(void* data) noexcept {
  TaskTeam& team = *static_cast<TaskTeam*>(data);
  // The caller runs a task in any case: others may come late.
  const bool caller = std::this_thread::get_id() == team.caller;
  const int me = caller ? 0 : 1 + team.joined.fetch_add(1);
  if (me < team.members) {
    my_team = &team;
    my_board = &team.boards[me];
    for (;;) {
      const int64_t task = team.next_task.fetch_add(1);
      if (task >= team.n_tasks) break;
      team.fn(team.ctx, task, me);
      if (team.done.fetch_add(1) + 1 == team.n_tasks) tell(team);
    }
    my_board = nullptr;
    my_team = nullptr;
  }
  const auto all_done = [&] { return team.done.load() >= team.n_tasks; };
  while (!all_done()) {
    const int seen = team.news.load();
    const bool last = team.last.load();
    for (int i = 1; i <= team.members; ++i) help(team.boards[(me + i) % team.members]);
    if (last) return;  // to the end of the region, so that the caller will not wait there
    await(team.news, seen, [&] { return team.news.load() != seen || all_done(); });
  }
}

}  // namespace

void parallel_tasks(int threads, int64_t n_tasks, int members,
                    void (*fn)(void* ctx, int64_t task, int member), void* ctx) {
  if (n_tasks <= 0) return;
  if (threads <= 1 || my_board != nullptr) {  // a task of a task is a part of it
    for (int64_t task = 0; task < n_tasks; ++task) fn(ctx, task, 0);
    return;
  }
  TaskTeam team{};
  team.fn = fn;
  team.ctx = ctx;
  team.n_tasks = n_tasks;
  team.members = members < 1 ? 1 : members < kMostMembers ? members : kMostMembers;
  run_on_team(threads, threads, serve, &team);
}

void last_step() {
  if (my_board == nullptr || my_team->n_tasks != 1) return;
  my_team->next_is_last = !my_team->more_follow;
}

MoreSteps::MoreSteps(bool follow) { set_more_follow(follow); }
MoreSteps::~MoreSteps() { set_more_follow(false); }

int64_t late_steps() { return late.load(std::memory_order_relaxed); }

bool share_with_team(Job& job) {
  Board* const board = my_board;
  if (board == nullptr) return false;
  my_board = nullptr;  // a parallel_for inside an item runs by itself
  if (my_team->last.load(std::memory_order_relaxed)) late.fetch_add(1, std::memory_order_relaxed);
  board->job.store(&job);
  if (my_team->next_is_last) my_team->last.store(true);
  tell(*my_team);
  run_items(job);
  board->job.store(nullptr);
  for (int helpers; (helpers = board->helpers.load()) != 0;) {
    await(board->helpers, helpers, [&] { return board->helpers.load() != helpers; });
  }
  my_board = board;
  return true;
}

}  // namespace te_mx::cpu
