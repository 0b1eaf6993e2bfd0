// Warpgroup matrix multiply-accumulate on FP8 codes: D[64, N] (+)= A[64, 32] @ B[N, 32]^T, N = 64
// or 128. And one on 16-bit numbers, for sums of columns.
//
// Both operands lie in shared memory as rows of 128 bytes under the 128-byte swizzle. Accumulators
// of a warpgroup's thread t (warp w = t / 32, lane l = t % 32), for j < N / 8:
//   d[4j + 0], d[4j + 1]: row 16w + l/4,     columns 8j + 2(l%4), +1
//   d[4j + 2], d[4j + 3]: row 16w + l/4 + 8, the same columns
#pragma once

#include <cstdint>

#include "mxtile/mx/element.hpp"
#include "mxtile/sm90/barrier.cuh"

namespace mxtile::sm90 {

using Fp8 = mx::Element;
constexpr bool is_fp8(Fp8 v) { return v == Fp8::e4m3 || v == Fp8::e5m2; }

// Low word of the descriptor of a K-major tile; adding 2 steps 32 bytes along K, adding bytes / 16
// goes elsewhere. The high word is the same for all: 8-row groups 1024 bytes apart, 128-byte
// swizzle.
__device__ __forceinline__ uint32_t wgmma_desc(const void* tile) {
  return ((smem_addr(tile) & 0x3FFFF) >> 4) | (1u << 16);
}
inline constexpr uint32_t kDescHigh = 0x40000040u;

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// NOTE: without it the compiler may move reads of the accumulators across the wait.
template <int kCount>
__device__ __forceinline__ void wgmma_pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

#define MXTILE_WGMMA_128(TYPES)                                                                    \
  asm volatile(                                                                                    \
      "{\n"                                                                                        \
      ".reg .pred p;\n"                                                                            \
      ".reg .b64 a, b;\n"                                                                          \
      "setp.ne.b32 p, %66, 0;\n"                                                                   \
      "mov.b64 a, {%64, %67};\n"                                                                   \
      "mov.b64 b, {%65, %67};\n"                                                                   \
      "wgmma.mma_async.sync.aligned.m64n128k32.f32." TYPES                                         \
      " {"                                                                                         \
      "%0, %1, %2, %3, %4, %5, %6, %7, "                                                           \
      "%8, %9, %10, %11, %12, %13, %14, %15, "                                                     \
      "%16, %17, %18, %19, %20, %21, %22, %23, "                                                   \
      "%24, %25, %26, %27, %28, %29, %30, %31, "                                                   \
      "%32, %33, %34, %35, %36, %37, %38, %39, "                                                   \
      "%40, %41, %42, %43, %44, %45, %46, %47, "                                                   \
      "%48, %49, %50, %51, %52, %53, %54, %55, "                                                   \
      "%56, %57, %58, %59, %60, %61, %62, %63}, "                                                  \
      "a, b, p, 1, 1;\n"                                                                           \
      "}\n"                                                                                        \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),        \
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),    \
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), \
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), \
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), \
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), \
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), \
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), \
        "+f"(d[63])                                                                                \
      : "r"(a), "r"(b), "r"(accumulate), "n"(kDescHigh))

template <Fp8 kA, Fp8 kB>
__device__ __forceinline__ void wgmma_64x128x32(float (&d)[64], uint32_t a, uint32_t b,
                                                int accumulate) {
  static_assert(is_fp8(kA) && is_fp8(kB));
  if constexpr (kA == Fp8::e4m3 && kB == Fp8::e4m3) {
    MXTILE_WGMMA_128("e4m3.e4m3");
  } else if constexpr (kA == Fp8::e5m2 && kB == Fp8::e4m3) {
    MXTILE_WGMMA_128("e5m2.e4m3");
  } else if constexpr (kA == Fp8::e4m3 && kB == Fp8::e5m2) {
    MXTILE_WGMMA_128("e4m3.e5m2");
  } else {
    MXTILE_WGMMA_128("e5m2.e5m2");
  }
}
#undef MXTILE_WGMMA_128

#define MXTILE_WGMMA_64(TYPES)                                                                     \
  asm volatile(                                                                                    \
      "{\n"                                                                                        \
      ".reg .pred p;\n"                                                                            \
      ".reg .b64 a, b;\n"                                                                          \
      "setp.ne.b32 p, %34, 0;\n"                                                                   \
      "mov.b64 a, {%32, %35};\n"                                                                   \
      "mov.b64 b, {%33, %35};\n"                                                                   \
      "wgmma.mma_async.sync.aligned.m64n64k32.f32." TYPES                                          \
      " {"                                                                                         \
      "%0, %1, %2, %3, %4, %5, %6, %7, "                                                           \
      "%8, %9, %10, %11, %12, %13, %14, %15, "                                                     \
      "%16, %17, %18, %19, %20, %21, %22, %23, "                                                   \
      "%24, %25, %26, %27, %28, %29, %30, %31}, "                                                  \
      "a, b, p, 1, 1;\n"                                                                           \
      "}\n"                                                                                        \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),        \
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),    \
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), \
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), \
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])                                         \
      : "r"(a), "r"(b), "r"(accumulate), "n"(kDescHigh))

template <Fp8 kA, Fp8 kB>
__device__ __forceinline__ void wgmma_64x64x32(float (&d)[32], uint32_t a, uint32_t b,
                                               int accumulate) {
  static_assert(is_fp8(kA) && is_fp8(kB));
  if constexpr (kA == Fp8::e4m3 && kB == Fp8::e4m3) {
    MXTILE_WGMMA_64("e4m3.e4m3");
  } else if constexpr (kA == Fp8::e5m2 && kB == Fp8::e4m3) {
    MXTILE_WGMMA_64("e5m2.e4m3");
  } else if constexpr (kA == Fp8::e4m3 && kB == Fp8::e5m2) {
    MXTILE_WGMMA_64("e4m3.e5m2");
  } else {
    MXTILE_WGMMA_64("e5m2.e5m2");
  }
}
#undef MXTILE_WGMMA_64

// 16-bit floats: D[64, 8] (+)= A[16, 64]^T @ B[8, 16]^T. A is 16 rows of 128 bytes under the
// 128-byte swizzle (wgmma_desc; 16 rows further on: 128). B is two blocks of 8 rows of 16 bytes,
// without swizzle.
__device__ __forceinline__ uint64_t wgmma_plain_desc(const void* tile) {
  return ((smem_addr(tile) & 0x3FFFF) >> 4) | (128u / 16 << 16);
}

#define MXTILE_WGMMA_8(TYPES)                            \
  asm volatile(                                          \
      "{\n"                                              \
      ".reg .pred p;\n"                                  \
      ".reg .b64 a;\n"                                   \
      "setp.ne.b32 p, %6, 0;\n"                          \
      "mov.b64 a, {%4, %7};\n"                           \
      "wgmma.mma_async.sync.aligned.m64n8k16.f32." TYPES \
      " {%0, %1, %2, %3}, a, %5, p, 1, 1, 1, 0;\n"       \
      "}\n"                                              \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])   \
      : "r"(a), "l"(b), "r"(accumulate), "n"(kDescHigh))

template <bool kHalf>
__device__ __forceinline__ void wgmma_64x8x16(float (&d)[4], uint32_t a, uint64_t b,
                                              int accumulate) {
  if constexpr (kHalf) {
    MXTILE_WGMMA_8("f16.f16");
  } else {
    MXTILE_WGMMA_8("bf16.bf16");
  }
}
#undef MXTILE_WGMMA_8

}  // namespace mxtile::sm90
