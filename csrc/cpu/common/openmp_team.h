// The OpenMP runtime that torch has loaded, used as a plain thread team. Nothing links OpenMP.
#pragma once

namespace te_mx::cpu {

// Runs fn(data) on a team of `threads` members, the caller among them, and returns true; returns
// false, having run nothing, when no runtime is loaded or this process was forked from one that had
// it.
bool openmp_team_run(int threads, void (*fn)(void*) noexcept, void* data);

}  // namespace te_mx::cpu
