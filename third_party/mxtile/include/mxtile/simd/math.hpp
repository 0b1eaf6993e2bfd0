// exp, the normal distribution and GELU on f32 vectors: one formula for every backend.
//
// Stated error against exact arithmetic, tested in tests/test_simd.cpp: exp 2 ulp; gelu and its
// derivative 16 ulp of the result where |x| <= 2, and (16 + 4 x^2) * 2^-24 relative below that,
// where the result itself falls like exp(-x^2/2) (the tanh form feels a rounding of its cubic
// argument).
#pragma once

#include "mxtile/simd/portable.hpp"

namespace mxtile::simd {

// The nearest integer (ties to even) of |x| < 2^22.
template <class S>
MXTILE_WORD typename S::I nearest_int(typename S::F x) {
  const auto magic = S::set(0x1.8p23f);
  return S::isub(S::as_int(S::add(x, magic)), S::as_int(magic));
}

template <class S>
MXTILE_WORD typename S::F abs(typename S::F x) {
  return S::as_float(S::iand(S::as_int(x), S::iset(0x7fffffff)));
}

// c[0] + x (c[1] + x (...)).
template <class S, int N>
MXTILE_WORD typename S::F polynomial(typename S::F x, const float (&c)[N]) {
  auto sum = S::set(c[N - 1]);
  for (int i = N - 2; i >= 0; --i) sum = S::fma(sum, x, S::set(c[i]));
  return sum;
}

// e^(x + low) of -105 <= x <= 89, |low| <= 0.1: `low`, if given, carries bits of the argument that
// x cannot hold.
template <class S, class... Low>
MXTILE_WORD typename S::F exp_inside(typename S::F x, Low... low) {
  const auto magic = S::set(0x1.8p23f);
  const auto shifted = S::fma(x, S::set(0x1.715476p0f), magic);
  const auto n = S::sub(shifted, magic);
  // x = n ln2 + r; n * 0x1.63p-1 is exact.
  auto r = S::fma(n, S::set(0x1.bd0106p-13f), S::fma(n, S::set(-0x1.63p-1f), x));
  ((r = S::add(r, low)), ...);
  static constexpr float kTail[] = {0.49999994f, 0.16666521f, 0.041668389f, 0.0083687156f,
                                    0.00138146011f};
  const auto tail = S::fma(S::mul(r, r), polynomial<S>(r, kTail), r);
  const auto power = S::add(S::set(1.0f), tail);
  if constexpr (requires { S::scale_by(power, n); }) {
    return S::scale_by(power, n);
  } else {
    // 2^n in two factors: n itself may lie past the exponents of a float.
    const auto whole = S::isub(S::as_int(shifted), S::as_int(magic));
    const auto half = S::template sar<1>(whole);
    const auto first = S::template shl<23>(S::iadd(half, S::iset(127)));
    const auto second = S::template shl<23>(S::iadd(S::isub(whole, half), S::iset(127)));
    return S::mul(S::mul(power, S::as_float(first)), S::as_float(second));
  }
}

// Bounds come first in max and min so that NaN stays.
template <class S>
MXTILE_WORD typename S::F exp(typename S::F x) {
  return exp_inside<S>(S::min(S::set(89.0f), S::max(S::set(-105.0f), x)));
}

// e^(-|x|)
template <class S>
MXTILE_WORD typename S::F exp_falling(typename S::F x) {
  const auto negative = S::as_float(S::ior(S::as_int(x), S::iset(INT32_MIN)));
  return exp_inside<S>(S::max(S::set(-105.0f), negative));
}

// s = 1 / (1 + exp(-x)) and s (1 - s), without cancellation.
template <class S>
struct Sigmoid {
  using F = typename S::F;
  F value, slope;

  MXTILE_WORD Sigmoid of(F x) {
    const F e = exp_falling<S>(x);
    const F upper = S::reciprocal(S::add(S::set(1.0f), e)), lower = S::mul(e, upper);
    return {S::select_lt(x, S::set(0.0f), lower, upper), S::mul(lower, upper)};
  }
};

// x / (1 + exp(-2u)) = x/2 (1 + tanh u) with u = sqrt(2/pi) (x + 0.044715 x^3), and its derivative.
template <class S>
struct GeluTanh {
  using F = typename S::F;

  MXTILE_WORD F value(F x) {
    const Parts p = parts(x);
    return S::mul(x, p.sigmoid);
  }
  MXTILE_WORD F derivative(F x) {
    const Parts p = parts(x);
    const F slope = S::fma(S::mul(p.x, p.x), S::set(6 * kRoot * kCubic), S::set(2 * kRoot));
    return S::fma(S::mul(p.x, p.sigmoid_slope), slope, p.sigmoid);
  }

 private:
  static constexpr float kRoot = 0.797884561f;  // sqrt(2/pi)
  static constexpr float kCubic = 0.044715f;
  struct Parts {
    F x, sigmoid, sigmoid_slope;  // of 2u; x limited to where the sigmoid is neither 0 nor 1
  };
  MXTILE_WORD Parts parts(F x) {
    x = S::min(S::set(20.0f), S::max(S::set(-20.0f), x));
    const F u2 = S::mul(x, S::fma(S::mul(x, x), S::set(2 * kRoot * kCubic), S::set(2 * kRoot)));
    const auto s = Sigmoid<S>::of(u2);
    return {x, s.value, s.slope};
  }
};

// x Phi(x) = x/2 (1 + erf(x / sqrt 2)), and its derivative Phi(x) + x phi(x).
template <class S>
struct GeluErf {
  using F = typename S::F;

  MXTILE_WORD F value(F x) { return S::mul(x, parts(x).cdf); }
  MXTILE_WORD F derivative(F x) {
    const Parts p = parts(x);
    return S::fma(S::mul(p.x, p.bell), S::set(0.398942280f), p.cdf);
  }

 private:
  struct Parts {
    F x, bell, cdf;  // x limited to +-15; exp(-x^2/2); Phi(x)
  };
  MXTILE_WORD Parts parts(F x) {
    x = S::min(S::set(15.0f), S::max(S::set(-15.0f), x));
    const F zero = S::set(0.0f), one = S::set(1.0f), minus_half = S::set(-0.5f);
    const F a = abs<S>(x);
    // a^2 = high^2 + (a - high)(a + high) with an exact high^2: exp of a rounded a^2 would be off
    // by a^2 ulp.
    const F high = S::as_float(S::iand(S::as_int(a), S::iset(~0xfff)));
    const F low = S::mul(S::mul(S::sub(a, high), S::add(a, high)), minus_half);
    const F bell = exp_inside<S>(S::mul(S::mul(high, high), minus_half), low);
    // 1 - Phi(a) = exp(-a^2/2) t P(t), t = 1 / (1 + 0.3 a): a fit of Mills' ratio on [0, 14.5].
    static constexpr float kMills[] = {0.119686693f,  0.119571812f,   0.110235468f, 0.0783894435f,
                                       0.0961574391f, -0.0794246346f, 0.191785932f, -0.228214651f,
                                       0.112436064f,  -0.0206235517f};
    const F t = S::reciprocal(S::fma(a, S::set(0.3f), one));
    const F upper = S::mul(bell, S::mul(t, polynomial<S>(t, kMills)));
    return {x, bell, S::select_lt(x, zero, upper, S::sub(one, upper))};
  }
};

}  // namespace mxtile::simd
