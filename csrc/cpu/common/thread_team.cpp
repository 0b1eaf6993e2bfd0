#include "common/thread_team.h"

#include <pthread.h>
#include <signal.h>
#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <new>
#include <thread>

namespace te_mx::cpu {
namespace {

struct Team {
  const pid_t pid = getpid();
  std::atomic<bool> taken{false};
  std::mutex mutex;
  std::condition_variable start, finish;
  int workers = 0;          // threads that exist
  int active = 0;           // of these, how many the current round uses
  int running = 0;          // of these, how many have not finished it
  unsigned long round = 0;  // counts calls
  void (*fn)(void*) noexcept = nullptr;
  void* data = nullptr;
};

// One worker's life: it ends with the process only.
void serve(Team* team, int index, unsigned long seen) {
  std::unique_lock lock(team->mutex);
  for (;;) {
    team->start.wait(lock, [&] { return team->round != seen; });
    seen = team->round;
    if (index >= team->active) continue;
    const auto fn = team->fn;
    void* const data = team->data;
    lock.unlock();
    fn(data);
    lock.lock();
    if (--team->running == 0) team->finish.notify_one();
  }
}

// Starts workers up to `count`, or as many as the system allows. The caller holds the mutex.
void grow(Team* team, int count) {
  if (team->workers >= count) return;
  // Signals belong to the threads of the application (Python handles them on its main thread).
  sigset_t all, previous;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &previous);
  try {
    while (team->workers < count) {
      std::thread(serve, team, team->workers, team->round).detach();
      ++team->workers;
    }
  } catch (...) {
    // No more threads to be had: the round runs on those there are.
  }
  pthread_sigmask(SIG_SETMASK, &previous, nullptr);
}

// The team of this process. NOTE: never freed, so that exit() cannot pull it from under a sleeping
// worker; the team a forked child inherits has no threads and perhaps a locked mutex, so the child
// makes its own.
Team* current_team() {
  static std::atomic<Team*> slot{nullptr};
  Team* team = slot.load(std::memory_order_acquire);
  while (team == nullptr || team->pid != getpid()) {
    Team* fresh = new (std::nothrow) Team;
    if (fresh == nullptr || slot.compare_exchange_strong(team, fresh)) return fresh;
    delete fresh;
  }
  return team;
}

}  // namespace

void thread_team_run(int threads, void (*fn)(void*) noexcept, void* data) {
  Team* team = current_team();
  if (team == nullptr || team->taken.exchange(true, std::memory_order_acquire)) {
    fn(data);
    return;
  }
  {
    std::lock_guard lock(team->mutex);
    grow(team, threads - 1);
    team->active = threads - 1 < team->workers ? threads - 1 : team->workers;
    team->running = team->active;
    team->fn = fn;
    team->data = data;
    ++team->round;
  }
  team->start.notify_all();
  fn(data);
  {
    std::unique_lock lock(team->mutex);
    team->finish.wait(lock, [&] { return team->running == 0; });
  }
  team->taken.store(false, std::memory_order_release);
}

}  // namespace te_mx::cpu
