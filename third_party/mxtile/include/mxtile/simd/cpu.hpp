// What this CPU and its operating system can run. All false on other architectures than x86-64.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace mxtile {

struct CpuFeatures {
  bool avx2;         // AVX2, FMA and F16C
  bool avx512;       // AVX-512 F, BW, DQ, VL, CD (and avx2)
  bool avx512_vbmi;  // byte permutes
  bool avx512_bf16;  // bfloat16 dot products
  bool amx_bf16;     // AMX tiles with bfloat16 products; use them after request_amx()
};

// Asks the kernel for the right to use tile registers in this process; false when it refuses.
inline bool request_amx() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

inline CpuFeatures cpu_features() {
  CpuFeatures found{};
#if defined(__x86_64__)
  const auto bit = [](unsigned word, int index) { return ((word >> index) & 1u) != 0; };
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0) return found;
  const bool os_saves = bit(c, 27), avx = bit(c, 28), fma = bit(c, 12), f16c = bit(c, 29);
  if (!os_saves) return found;
  // XCR0 says which registers the system saves on a task switch.
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  const bool os_ymm = (low & 0x6u) == 0x6u;
  const bool os_zmm = os_ymm && (low & 0xe0u) == 0xe0u;
  const bool os_tiles = (low & 0x60000u) == 0x60000u;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return found;
  found.avx2 = os_ymm && avx && fma && f16c && bit(b, 5);
  found.avx512 =
      found.avx2 && os_zmm && bit(b, 16) && bit(b, 17) && bit(b, 28) && bit(b, 30) && bit(b, 31);
  found.avx512_vbmi = found.avx512 && bit(c, 1);
  found.amx_bf16 = os_tiles && bit(d, 22) && bit(d, 24);
  if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0) {
    found.avx512_bf16 = found.avx512 && bit(a, 5);
  }
#endif
  return found;
}

}  // namespace mxtile
