// Numbers of a dtype that is known at run time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "te_mx/types.h"

namespace te_mx::sm90 {

__device__ __forceinline__ float load_number(const void* from, int64_t i, DType dtype) {
  if (dtype == DType::bf16) return __bfloat162float(static_cast<const __nv_bfloat16*>(from)[i]);
  if (dtype == DType::f16) return __half2float(static_cast<const __half*>(from)[i]);
  return static_cast<const float*>(from)[i];
}
__device__ __forceinline__ void store_number(void* to, int64_t i, DType dtype, float v) {
  if (dtype == DType::bf16) {
    static_cast<__nv_bfloat16*>(to)[i] = __float2bfloat16(v);
  } else if (dtype == DType::f16) {
    static_cast<__half*>(to)[i] = __float2half(v);
  } else {
    static_cast<float*>(to)[i] = v;
  }
}

// Two of 16 bits side by side.
__device__ __forceinline__ uint32_t pair_of(DType dtype, float low, float high) {
  if (dtype == DType::bf16) {
    const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&two);
  }
  const __half2 two = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&two);
}

// Eight numbers side by side, of which `count` exist.
__device__ __forceinline__ void store_eight(void* to, int64_t i, DType dtype, const float (&v)[8],
                                            int count) {
  char* const at = static_cast<char*>(to) + i * (dtype == DType::f32 ? 4 : 2);
  if (count == 8 && reinterpret_cast<uintptr_t>(at) % 16 == 0) {
    uint4* const whole = reinterpret_cast<uint4*>(at);
    if (dtype == DType::f32) {
      whole[0] = {__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                  __float_as_uint(v[3])};
      whole[1] = {__float_as_uint(v[4]), __float_as_uint(v[5]), __float_as_uint(v[6]),
                  __float_as_uint(v[7])};
    } else {
      *whole = {pair_of(dtype, v[0], v[1]), pair_of(dtype, v[2], v[3]), pair_of(dtype, v[4], v[5]),
                pair_of(dtype, v[6], v[7])};
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < 8; ++j)
    if (j < count) store_number(to, i + j, dtype, v[j]);
}

}  // namespace te_mx::sm90
