// CUDA's, and what it leaves to the device.
#pragma once

#include_next <cuda_bf16.h>

#include "simt/packed.hpp"

// Rounds once.
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
  const auto one = [](__nv_bfloat16 x, __nv_bfloat16 y, __nv_bfloat16 z) {
    const double v = static_cast<double>(__bfloat162float(x)) * __bfloat162float(y);
    __nv_bfloat16_raw raw;
    raw.x = simt::bf16_of_sum(v, __bfloat162float(z));
    return __nv_bfloat16(raw);
  };
  return {one(a.x, b.x, c.x), one(a.y, b.y, c.y)};
}
