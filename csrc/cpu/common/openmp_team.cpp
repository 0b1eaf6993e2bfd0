#include "common/openmp_team.h"

#include <dlfcn.h>
#include <sys/types.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace te_mx::cpu {
namespace {

// libgomp's entry for `#pragma omp parallel`; libomp and libiomp5 export it too.
using GompParallel = void (*)(void (*fn)(void*), void* data, unsigned threads, unsigned flags);

GompParallel find_gomp_parallel() {
  // torch loads its runtime with global visibility. Asking for it by name must not load a second
  // one.
  void* symbol = dlsym(RTLD_DEFAULT, "GOMP_parallel");
  for (const char* name : {"libgomp.so.1", "libomp.so", "libomp.so.5", "libiomp5.so",
                           "libomp.dylib", "libiomp5.dylib"}) {
    if (symbol != nullptr) break;
    if (void* library = dlopen(name, RTLD_LAZY | RTLD_NOLOAD)) {
      symbol = dlsym(library, "GOMP_parallel");
      dlclose(library);
    }
  }
  return reinterpret_cast<GompParallel>(symbol);
}

// True when this process came out of fork() and never ran exec: the kernel's PF_FORKNOEXEC flag,
// field 9 of /proc/self/stat. Catches a library that is first loaded in the child, where no saved
// pid can tell.
bool forked_without_exec() {
  char line[512];
  std::FILE* file = std::fopen("/proc/self/stat", "r");
  if (file == nullptr) return false;
  const size_t size = std::fread(line, 1, sizeof line - 1, file);
  std::fclose(file);
  line[size] = 0;
  const char* field = std::strrchr(line, ')');  // the end of field 2, which may hold spaces
  for (int i = 2; field != nullptr && i < 9; ++i) field = std::strchr(field + 1, ' ');
  constexpr unsigned long kForkNoExec = 0x40;
  return field != nullptr && (std::strtoul(field, nullptr, 10) & kForkNoExec) != 0;
}

// NOTE: a runtime's workers do not survive fork() and it waits for them forever, so a team is only
// asked of it in the process that loaded this library. Plain globals: set before any thread can
// call in.
const pid_t load_pid = getpid();
const bool load_forked = forked_without_exec();

}  // namespace

bool openmp_team_run(int threads, void (*fn)(void*) noexcept, void* data) {
  if (load_forked || getpid() != load_pid) return false;
  static const GompParallel gomp_parallel = find_gomp_parallel();
  if (gomp_parallel == nullptr) return false;
  gomp_parallel(fn, data, static_cast<unsigned>(threads), 0);
  return true;
}

}  // namespace te_mx::cpu
