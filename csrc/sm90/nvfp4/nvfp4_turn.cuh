// The Hadamard transforms of formats/hadamard.py, of sixteen numbers of a lane or of 32 of two, and
// the largest magnitudes of what they give.
#pragma once

#include "common/numbers.cuh"
#include "nvfp4/nvfp4_blocks.cuh"

namespace te_mx::sm90 {

__device__ __forceinline__ uint32_t magnitude(float v) { return __float_as_uint(v) & 0x7FFFFFFFu; }

// The transform of 16 in two parts: all sums but the last ones, these and what
// follows, rounded to the dtype of x.
__device__ __forceinline__ void begin_turn(float (&v)[16], const float* signs) {
#pragma unroll
  for (int i = 0; i < 16; i += 2) {
    // Products with signs are exact.
    const float a = __fmul_rn(v[i], signs[i]), b = v[i + 1], sign = signs[i + 1];
    v[i] = __fmaf_rn(b, sign, a), v[i + 1] = __fmaf_rn(-b, sign, a);
  }
#pragma unroll
  for (int h = 2; h < 8; h *= 2) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (i & h) continue;
      const float a = v[i], b = v[i + h];
      v[i] = __fadd_rn(a, b), v[i + h] = __fsub_rn(a, b);
    }
  }
}
__device__ __forceinline__ float2 rounded(float a, float b, DType dtype) {
  if (dtype == DType::bf16) {
    const auto two = as<uint32_t>(__floats2bfloat162_rn(a, b));
    return make_float2(__uint_as_float(two << 16), __uint_as_float(two & 0xFFFF0000u));
  }
  return dtype == DType::f16 ? __half22float2(__floats2half2_rn(a, b)) : make_float2(a, b);
}
__device__ __forceinline__ void end_turn(float (&v)[16], DType dtype) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float a = v[i], b = v[i + 8];
    v[i] = __fadd_rn(a, b), v[i + 8] = __fsub_rn(a, b);
  }
#pragma unroll
  for (int i = 0; i < 16; i += 2) {
    const float2 two = rounded(__fmul_rn(v[i], transform_factor(16)),
                               __fmul_rn(v[i + 1], transform_factor(16)), dtype);
    v[i] = two.x, v[i + 1] = two.y;
  }
}
__device__ __forceinline__ void turn(float (&v)[16], const float* signs, DType dtype) {
  begin_turn(v, signs);
  end_turn(v, dtype);
}

// One half of a transform of 32, all of its sums but the last ones.
__device__ __forceinline__ void half_turn(float (&v)[16], const float* signs) {
  begin_turn(v, signs);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float a = v[i], b = v[i + 8];
    v[i] = __fadd_rn(a, b), v[i + 8] = __fsub_rn(a, b);
  }
}
// These: other(i) is element i of the other half, before which this one lies, or not.
template <class Other>
__device__ __forceinline__ void join_halves(float (&v)[16], bool before, DType dtype,
                                            const Other& other) {
#pragma unroll
  for (int i = 0; i < 16; i += 2) {
    float two[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float there = other(i + j);
      two[j] = __fmul_rn(before ? __fadd_rn(v[i + j], there) : __fsub_rn(there, v[i + j]),
                         transform_factor(32));
    }
    const float2 made = rounded(two[0], two[1], dtype);
    v[i] = made.x, v[i + 1] = made.y;
  }
}

// NaN and Inf come on top.
__device__ __forceinline__ uint32_t largest_of(const float (&v)[16]) {
  float largest = v[0];
#pragma unroll
  for (int i = 1; i < 16; ++i) largest = tile::max_magnitude(largest, v[i]);
  return magnitude(largest);
}
// Without these.
__device__ __forceinline__ uint32_t largest_finite(const float (&v)[16]) {
  const uint32_t largest = largest_of(v);
  if (largest < kInfinite) return largest;
  uint32_t most = 0;
#pragma unroll
  for (const float one : v)
    if (magnitude(one) < kInfinite) most = max(most, magnitude(one));
  return most;
}

// The same after a transform. The larger magnitude of a sum and a difference is the sum of
// magnitudes, and what follows keeps the order.
__device__ __forceinline__ uint32_t largest_turned(float (&v)[16], const float* signs,
                                                   DType dtype) {
  begin_turn(v, signs);
  float most = __fadd_rn(fabsf(v[0]), fabsf(v[8]));
#pragma unroll
  for (int i = 1; i < 8; ++i)
    most = tile::max_magnitude(most, __fadd_rn(fabsf(v[i]), fabsf(v[i + 8])));
  const uint32_t largest = magnitude(rounded(__fmul_rn(most, transform_factor(16)), 0.0f, dtype).x);
  if (largest < kInfinite) return largest;
  end_turn(v, dtype);
  return largest_finite(v);
}

}  // namespace te_mx::sm90
