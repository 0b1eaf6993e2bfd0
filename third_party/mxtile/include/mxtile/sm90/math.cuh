// Single instructions of the CUDA cores that C++ has no exact word for. Subnormals count as zero.
#pragma once

#include <cstdint>

#include "mxtile/sm90/barrier.cuh"

namespace mxtile::sm90 {

// 2^x, relative error 2^-22.
__device__ __forceinline__ float exp2_approx(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// 1 / x, one unit in the last place.
__device__ __forceinline__ float rcp_approx(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// The larger one; NaN when either is. (fmaxf takes the other one.)
__device__ __forceinline__ float max_nan(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

// x, or `most` with the sign of x where the magnitude of x is more; `most` > 0. NaN stays.
__device__ __forceinline__ float limit_f32(float x, float most) {
  float r;
  asm("min.NaN.xorsign.abs.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(most));
  return r;
}

// The same of two 16-bit numbers in a word each.
__device__ __forceinline__ uint32_t limit_bf16x2(uint32_t x, uint32_t most) {
  uint32_t r;
  asm("min.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(most));
  return r;
}
__device__ __forceinline__ uint32_t limit_f16x2(uint32_t x, uint32_t most) {
  uint32_t r;
  asm("min.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(most));
  return r;
}

// Magnitudes of two bf16 numbers, or `least` where it is more. NaN becomes `least`.
__device__ __forceinline__ uint32_t magnitude_bf16x2(uint32_t x, uint32_t least) {
  uint32_t r;
  asm("{\n"
      ".reg .b32 a;\n"
      "abs.bf16x2 a, %1;\n"
      "max.bf16x2 %0, a, %2;\n"
      "}"
      : "=r"(r)
      : "r"(x), "r"(least));
  return r;
}

// Starts a copy of the first `bytes` (0..4) of a word to shared memory, zeros behind them. Both
// addresses are multiples of 4; nothing is read when bytes is 0.
__device__ __forceinline__ void copy_word_async(void* smem, const void* gmem, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(smem_addr(smem)), "l"(gmem),
               "r"(bytes)
               : "memory");
}

// Until this thread's copies of words have arrived.
__device__ __forceinline__ void copy_words_wait() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace mxtile::sm90
