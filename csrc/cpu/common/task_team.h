// Several parallel problems in one parallel region: whole tasks go to members of a team, and
// members without a task help with the items of tasks that still run.
//
//   task 0 on member 0: pack [items] -> multiply [items] -> ...   <- items taken by members 2 and 3
//   task 1 on member 1: pack [items] -> multiply [items] -> ...
//
// So many small tasks run next to each other without a barrier between their steps, and one large
// task among them still gets every thread. A problem of several steps is one task: its caller goes
// on with the next step without those threads that have not come yet, which on a busy machine may
// take milliseconds.
#pragma once

#include <cstdint>
#include <type_traits>

namespace te_mx::cpu {

// Calls fn(ctx, task, member) for every task in [0, n_tasks), each exactly once, on at most
// `threads` threads; members of [0, members) run whole tasks, one at a time each, so scratch memory
// of a task may be that of its member. parallel_for inside fn shares its items with the team. fn
// must not throw; what it computes must not depend on who runs it.
void parallel_tasks(int threads, int64_t n_tasks, int members,
                    void (*fn)(void* ctx, int64_t task, int member), void* ctx);

template <class F>
void parallel_tasks(int threads, int64_t n_tasks, int members, F&& body) {
  using Body = std::remove_reference_t<F>;
  parallel_tasks(
      threads, n_tasks, members,
      [](void* ctx, int64_t task, int member) noexcept {
        (*static_cast<Body*>(ctx))(task, member);
      },
      const_cast<void*>(static_cast<const void*>(&body)));
}

// Says that the next parallel_for of this task is its last one, so that nobody stays for more.
// Others after it run on this thread alone.
void last_step();

// While one lives, last_step() says nothing: this task goes on after the problem that says it.
class MoreSteps {
 public:
  explicit MoreSteps(bool follow);
  ~MoreSteps();
};

// For parallel_for: offers a job to the team that runs the calling task and returns true when its
// items are done; false outside of tasks.
struct Job;
bool share_with_team(Job& job);

}  // namespace te_mx::cpu
