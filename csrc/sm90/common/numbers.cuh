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

}  // namespace te_mx::sm90
