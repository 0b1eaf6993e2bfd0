// Fast fp32 functions of one instruction each. Subnormal arguments and results become 0.
#pragma once

namespace mxtile::sm90 {

// 2^x within 2 ulp.
__device__ __forceinline__ float exp2_approx(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// 1 / x within 1 ulp.
__device__ __forceinline__ float rcp_approx(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

}  // namespace mxtile::sm90
