// main() of every test. It is compiled without the instructions of the test, which a compiler may
// use anywhere in a file that has them, before it is asked whether the CPU has any.
#include <cstdio>

int run();  // the exit status of the test

int main() {
#if MXTILE_TEST_LANES == 16
  const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#elif MXTILE_TEST_LANES == 8
  const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  const bool has = true;
#endif
  if (has) return run();
  std::printf("skipped: this CPU has no such instructions\n");
  return 0;
}
