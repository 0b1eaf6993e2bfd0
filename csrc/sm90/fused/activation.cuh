// Activations and their derivatives, one element at a time in fp32; the formulas are those of
// te_mx/backends/reference/fused.py.
//
// NOTE: every operation is spelled out, so that a value has the same bits in whichever kernel it is
// computed: nothing is left to contract.
#pragma once

#include <cstdint>

#include "mxtile/sm90/math.cuh"
#include "te_mx/fused.h"

namespace te_mx::sm90 {

namespace tile = mxtile::sm90;

__device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float sub(float a, float b) { return __fsub_rn(a, b); }

struct ActWords {
  Act act;
  bool gated;
  float limit, alpha, offset;
};

struct ValueSlope {
  float value, slope;
};

// 1 / (1 + exp(-u)). kPrecise: for results in fp32.
template <bool kPrecise>
__device__ __forceinline__ float sigmoid(float u) {
  const float e = kPrecise ? expf(-u) : tile::exp2_approx(mul(u, -1.4426950408889634f));
  return tile::rcp_approx(add(1.0f, e));
}

// What a gate column multiplies by, and whether its gradient passes. NaN stays.
struct PlainGate {
  static __device__ __forceinline__ float gate(float b) { return b; }
  static __device__ __forceinline__ float passed(float, float d) { return d; }
};

// x * sigmoid(slope * x).
template <bool kPrecise>
struct Swish : PlainGate {
  float alpha;
  __device__ __forceinline__ explicit Swish(float alpha) : alpha(alpha) {}
  __device__ __forceinline__ ValueSlope operator()(float x) const {
    const float u = mul(alpha, x), s = sigmoid<kPrecise>(u);
    return {mul(x, s), add(mul(u, mul(s, sub(1.0f, s))), s)};
  }
};

// Swish of min(x, limit); the gate is clamp(b, -limit, limit) + offset.
template <bool kPrecise>
struct ClampedSwish {
  Swish<kPrecise> swish;
  float limit, offset;
  __device__ __forceinline__ ValueSlope operator()(float x) const {
    ValueSlope r = swish(x > limit ? limit : x);
    if (x > limit) r.slope = 0.0f;
    return r;
  }
  __device__ __forceinline__ float gate(float b) const {
    return add(b > limit ? limit : (b < -limit ? -limit : b), offset);
  }
  __device__ __forceinline__ float passed(float b, float d) const {
    return mul(d, b > limit || b < -limit ? 0.0f : 1.0f);
  }
};

// x / 2 * (1 + tanh(u)) = x * sigmoid(2 u), u = sqrt(2/pi) (x + 0.044715 x^3). NOTE: far out, where
// the sigmoid is 0 or 1, a bounded square keeps 0 times infinity away.
template <bool kPrecise>
struct GeluTanh : PlainGate {
  __device__ __forceinline__ ValueSlope operator()(float x) const {
    constexpr float kTwo = 1.5957691216057308f;  // 2 sqrt(2/pi)
    const float x2 = fminf(mul(x, x), 1e4f);
    const float s = sigmoid<kPrecise>(mul(x, __fmaf_rn(x2, kTwo * 0.044715f, kTwo)));
    const float inner = __fmaf_rn(x2, 3.0f * kTwo * 0.044715f, kTwo);
    return {mul(x, s), add(mul(mul(x, mul(s, sub(1.0f, s))), inner), s)};
  }
};

struct GeluErf : PlainGate {
  __device__ __forceinline__ ValueSlope operator()(float x) const {
    const float half = mul(0.5f, add(1.0f, erff(mul(x, 0.7071067811865475f))));
    const float density = mul(0.3989422804014327f, expf(mul(-0.5f, mul(x, x))));
    return {mul(x, half), density == 0.0f ? half : add(half, mul(x, density))};
  }
};

struct Relu : PlainGate {
  __device__ __forceinline__ ValueSlope operator()(float x) const {
    return {x < 0.0f ? 0.0f : x, x > 0.0f ? 1.0f : 0.0f};
  }
};

struct SquaredRelu : PlainGate {
  __device__ __forceinline__ ValueSlope operator()(float x) const {
    const float y = x < 0.0f ? 0.0f : x, twice = add(x, x);
    return {mul(y, y), twice < 0.0f ? 0.0f : twice};
  }
};

template <bool kPrecise>
struct Sigmoid : PlainGate {
  __device__ __forceinline__ ValueSlope operator()(float x) const {
    const float s = sigmoid<kPrecise>(x);
    return {s, mul(s, sub(1.0f, s))};
  }
};

// Calls f with the activation.
template <bool kPrecise, class F>
__device__ __forceinline__ void with_activation(const ActWords& a, const F& f) {
  switch (a.act) {
    case Act::gelu:
      return f(GeluTanh<kPrecise>{});
    case Act::gelu_erf:
      return f(GeluErf{});
    case Act::relu:
      return f(Relu{});
    case Act::squared_relu:
      return f(SquaredRelu{});
    case Act::sigmoid:
      return f(Sigmoid<kPrecise>{});
    case Act::clamped_silu:
      return f(ClampedSwish<kPrecise>{Swish<kPrecise>(a.alpha), a.limit, a.offset});
    case Act::silu:
    case Act::quick_gelu:
      return f(Swish<kPrecise>(a.act == Act::silu ? 1.0f : 1.702f));
  }
}

}  // namespace te_mx::sm90
