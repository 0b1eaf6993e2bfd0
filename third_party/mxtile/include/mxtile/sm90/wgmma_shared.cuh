// D[64, N] (+)= A[64, 32] @ B[N, 32]^T of E4M3 codes, both in shared memory as in wgmma.cuh, N = 8,
// 16, 32, 64 or 128.
#pragma once

#include "mxtile/sm90/wgmma.cuh"

namespace mxtile::sm90 {

template <bool kAdd>
__device__ __forceinline__ void wgmma_shared(float (&d)[4], uint32_t a, uint32_t b) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 a, b;\n"
      "setp.ne.b32 p, %6, 0;\nmov.b64 a, {%4, %7};\nmov.b64 b, {%5, %7};\n"
      "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, a, b, p, 1, 1;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a), "r"(b), "n"(kAdd ? 1 : 0), "n"(kDescHigh));
}
template <bool kAdd>
__device__ __forceinline__ void wgmma_shared(float (&d)[8], uint32_t a, uint32_t b) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 a, b;\n"
      "setp.ne.b32 p, %10, 0;\nmov.b64 a, {%8, %11};\nmov.b64 b, {%9, %11};\n"
      "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7}, a, "
      "b, p, 1, 1;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7])
      : "r"(a), "r"(b), "n"(kAdd ? 1 : 0), "n"(kDescHigh));
}
template <bool kAdd>
__device__ __forceinline__ void wgmma_shared(float (&d)[16], uint32_t a, uint32_t b) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 a, b;\n"
      "setp.ne.b32 p, %18, 0;\nmov.b64 a, {%16, %19};\nmov.b64 b, {%17, %19};\n"
      "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15}, a, b, p, 1, 1;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15])
      : "r"(a), "r"(b), "n"(kAdd ? 1 : 0), "n"(kDescHigh));
}
template <bool kAdd>
__device__ __forceinline__ void wgmma_shared(float (&d)[32], uint32_t a, uint32_t b) {
  wgmma_64x64x32<Fp8::e4m3, Fp8::e4m3>(d, a, b, kAdd);
}
template <bool kAdd>
__device__ __forceinline__ void wgmma_shared(float (&d)[64], uint32_t a, uint32_t b) {
  wgmma_64x128x32<Fp8::e4m3, Fp8::e4m3>(d, a, b, kAdd);
}

}  // namespace mxtile::sm90
