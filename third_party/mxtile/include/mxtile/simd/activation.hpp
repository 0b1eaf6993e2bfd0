// Activations and their derivatives on f32 vectors; GELU and the sigmoid are in math.hpp.
//
// Stated error, tested in tests/test_simd.cpp: sigmoid 4 ulp, its derivative 6; x * sigmoid(alpha
// x) (6 + |alpha x|) ulp, because alpha x is rounded. relu and its square are exact. NaN stays NaN
// in every value.
#pragma once

#include "mxtile/simd/math.hpp"

namespace mxtile::simd {

// A functor has value(x) and derivative(x).
template <class S>
struct SigmoidWord {
  using F = typename S::F;
  MXTILE_MEMBER F value(F x) const { return Sigmoid<S>::of(x).value; }
  MXTILE_MEMBER F derivative(F x) const { return Sigmoid<S>::of(x).slope; }
};

// x * sigmoid(alpha x).
template <class S>
struct Swish {
  using F = typename S::F;
  F alpha;
  MXTILE_MEMBER F value(F x) const { return S::mul(x, Sigmoid<S>::of(S::mul(alpha, x)).value); }
  MXTILE_MEMBER F derivative(F x) const {
    const auto u = S::mul(alpha, x);
    const auto s = Sigmoid<S>::of(u);
    return S::add(S::mul(u, s.slope), s.value);
  }
};

template <class S>
struct Relu {
  using F = typename S::F;
  MXTILE_MEMBER F value(F x) const { return S::max(S::set(0.0f), x); }
  MXTILE_MEMBER F derivative(F x) const {
    return S::select_lt(S::set(0.0f), x, S::set(1.0f), S::set(0.0f));
  }
};

template <class S>
struct SquaredRelu {
  using F = typename S::F;
  MXTILE_MEMBER F value(F x) const {
    const F y = S::max(S::set(0.0f), x);
    return S::mul(y, y);
  }
  MXTILE_MEMBER F derivative(F x) const { return S::max(S::set(0.0f), S::mul(S::set(2.0f), x)); }
};

template <class S>
struct GeluTanhWord {
  using F = typename S::F;
  MXTILE_MEMBER F value(F x) const { return GeluTanh<S>::value(x); }
  MXTILE_MEMBER F derivative(F x) const { return GeluTanh<S>::derivative(x); }
};

template <class S>
struct GeluErfWord {
  using F = typename S::F;
  MXTILE_MEMBER F value(F x) const { return GeluErf<S>::value(x); }
  MXTILE_MEMBER F derivative(F x) const { return GeluErf<S>::derivative(x); }
};

// Swish of min(x, limit); its derivative is 0 beyond.
template <class S>
struct ClampedSwish {
  using F = typename S::F;
  F limit;
  Swish<S> swish;
  MXTILE_MEMBER F value(F x) const { return swish.value(S::min(limit, x)); }
  MXTILE_MEMBER F derivative(F x) const {
    return S::select_lt(limit, x, S::set(0.0f), swish.derivative(S::min(limit, x)));
  }
};

}  // namespace mxtile::simd
