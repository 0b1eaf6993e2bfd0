// GELU and its derivative in fp32, two elements at a time; gemm_gelu_table.cuh has the derivative
// without its formula.
//
// The special function unit does 16 results a cycle and SM, so it limits these loops: where it can,
// a pair shares one reciprocal, 1/a = b * (1 / ab). Nothing that feeds a shared reciprocal may be
// NaN or overflow, or one element would spoil the other.
#pragma once

#include <bit>
#include <type_traits>

#include "gemm/gemm_rows.cuh"
#include "mxtile/sm90/math.cuh"
#include "te_mx/sm90.h"

namespace te_mx::sm90 {

namespace tile = mxtile::sm90;

// Beyond these GELU is x or 0 and GELU' 1 or 0, but for 2^-44.
inline constexpr float kGeluLeast = -7.4f, kGeluMost = 8.0f;
inline constexpr uint32_t kGeluMostBf16 = std::bit_cast<uint32_t>(kGeluMost) >> 16;

// sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3), of two numbers of at least kGeluLeast, where it
// is 2^-59, or of magnitudes up to kGeluMost. `powers` become exp(-2u), so that s * power is 1 - s.
__device__ __forceinline__ float2 gelu_sigmoids(float2 x, float2 square, float2& powers) {
  constexpr float kLinear = -2.302208198f, kCubic = -0.1029432396f;  // -2u in powers of two
  // NOTE: fminf() of a NaN is the other number.
  const float e0 = fminf(x.x * fmaf(square.x, kCubic, kLinear), 60.0f);
  const float e1 = fminf(x.y * fmaf(square.y, kCubic, kLinear), 60.0f);
  powers = make_float2(tile::exp2_approx(e0), tile::exp2_approx(e1));
  const float d0 = 1.0f + powers.x, d1 = 1.0f + powers.y;
  const float r = tile::rcp_approx(d0 * d1);
  return make_float2(d1 * r, d0 * r);
}

// Phi(-y), y >= 0, of the normal distribution: exp(-y^2/2) t P(t), t = 1 / (1 + 0.21 y), with a
// relative error of P below 2e-8. `density` becomes exp(-y^2/2).
__device__ __forceinline__ float normal_tail(float y, float& density) {
  const float t = tile::rcp_approx(fmaf(y, 0.21f, 1.0f));
  float p = -0.07165627609581697f;
  p = fmaf(p, t, 0.28358841615394625f), p = fmaf(p, t, -0.33025308314473817f);
  p = fmaf(p, t, 0.3494006771630662f), p = fmaf(p, t, -0.09392498786955182f);
  p = fmaf(p, t, 0.12487263952884889f), p = fmaf(p, t, 0.06919209105301025f);
  p = fmaf(p, t, 0.08506885521188942f), p = fmaf(p, t, 0.08371157580738124f);
  density = tile::exp2_approx(y * y * -0.7213475204444817f);
  return density * (t * p);
}

// A pair as GELU' takes it, NaN or of magnitudes up to kGeluMost: 0 times infinity would be NaN.
template <class Pair>
__device__ __forceinline__ Pair derivative_input(Pair x) {
  if constexpr (std::is_same_v<Pair, float2>) {
    return make_float2(tile::limit_f32(x.x, kGeluMost), tile::limit_f32(x.y, kGeluMost));
  } else {
    constexpr bool kBf16 = std::is_same_v<Pair, __nv_bfloat162>;
    const uint32_t bits = *reinterpret_cast<const uint32_t*>(&x);
    const uint32_t limited = kBf16 ? tile::limit_bf16x2(bits, kGeluMostBf16 * 0x10001u)
                                   : tile::limit_f16x2(bits, 0x48004800u);
    return *reinterpret_cast<const Pair*>(&limited);
  }
}

// GELU(x) = x * sigmoid(2u); or x * Phi(x) = max(x, 0) - |x| Phi(-|x|).
template <Gelu kKind>
__device__ __forceinline__ float2 gelu_forward(float2 x) {
  if constexpr (kKind == Gelu::tanh) {
    x.x = tile::max_nan(x.x, kGeluLeast), x.y = tile::max_nan(x.y, kGeluLeast);
    float2 powers;
    const float2 s = gelu_sigmoids(x, make_float2(x.x * x.x, x.y * x.y), powers);
    return make_float2(x.x * s.x, x.y * s.y);
  } else {
    const auto one = [](float v) {
      float density;
      // NOTE: not infinity, which would meet a tail of 0.
      const float y = fminf(fabsf(v), 64.0f), tail = normal_tail(y, density);
      return fmaf(-y, tail, tile::max_nan(v, 0.0f));
    };
    return make_float2(one(x.x), one(x.y));
  }
}

// v GELU'(x), x from derivative_input(). With s the sigmoid and p = exp(-2u), GELU' is
// s + x s (1 - s) 2u' = (1 + p (1 + x 2u')) s^2; or Phi(x) + x exp(-x^2/2) / sqrt(2 pi).
template <Gelu kKind>
__device__ __forceinline__ float2 gelu_backward(float2 v, float2 x) {
  if constexpr (kKind == Gelu::tanh) {
    float2 powers;
    const float2 square = make_float2(x.x * x.x, x.y * x.y), s = gelu_sigmoids(x, square, powers);
    // NOTE: in this order nothing waits for s but three products, and nothing overflows.
    const auto one = [](float w, float y, float y2, float sig, float power) {
      const float slope = fmaf(y, fmaf(y2, 0.2140644488f, 1.5957691216f), 1.0f);
      return (w * sig) * (fmaf(power, slope, 1.0f) * sig);
    };
    return make_float2(one(v.x, x.x, square.x, s.x, powers.x),
                       one(v.y, x.y, square.y, s.y, powers.y));
  } else {
    const auto one = [](float w, float y) {
      float density;
      const float tail = normal_tail(fabsf(y), density);
      const float phi = y < 0.0f ? tail : 1.0f - tail;
      return w * fmaf(y * 0.3989422804014327f, density, phi);
    };
    return make_float2(one(v.x, x.x), one(v.y, x.y));
  }
}

}  // namespace te_mx::sm90
