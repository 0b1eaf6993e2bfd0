// Switches flush-to-zero and denormals-are-zero off for a scope, on this thread.
#pragma once

#include <cstdint>

#if defined(__SSE__) || defined(_M_X64)
#include <xmmintrin.h>
#endif

namespace mxtile::mx {

// The arithmetic it protects must sit behind a call the compiler cannot see through: compilers do
// not know that it depends on this mode.
class KeepDenormals {
 public:
#if defined(__SSE__) || defined(_M_X64)
  KeepDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(static_cast<unsigned>(saved_) & ~0x8040u); }
  ~KeepDenormals() { _mm_setcsr(static_cast<unsigned>(saved_)); }
#elif defined(__aarch64__)
  KeepDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(saved_ & ~(uint64_t{1} << 24)));
  }
  ~KeepDenormals() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }
#else
  KeepDenormals() : saved_(0) {}
  ~KeepDenormals() {}
#endif
  KeepDenormals(const KeepDenormals&) = delete;
  KeepDenormals& operator=(const KeepDenormals&) = delete;

 private:
  uint64_t saved_;
};

}  // namespace mxtile::mx
