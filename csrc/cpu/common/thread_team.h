// A team of std::threads, for processes without an OpenMP runtime and for children of fork().
#pragma once

namespace te_mx::cpu {

// Runs fn(data) on at most `threads` threads, the caller among them. When another call holds the
// team, or the system gives no more threads, fewer take part.
void thread_team_run(int threads, void (*fn)(void*) noexcept, void* data);

}  // namespace te_mx::cpu
