// Several vectors as one word set: chains of dependent instructions that stand next to each other
// in the program, so that a CPU whose window holds few of them has others to run.
#pragma once

#include <utility>

#include "mxtile/simd/portable.hpp"

namespace mxtile::simd {

// The words that functions of one argument need, on N vectors of S.
template <class S, int N>
struct Wide {
  static constexpr int kLanes = N * S::kLanes;
  struct F {
    typename S::F v[N];
  };
  struct I {
    typename S::I v[N];
  };

  MXTILE_WORD F set(float x) {
    return each<F>([&](int) { return S::set(x); });
  }
  MXTILE_WORD I iset(int32_t x) {
    return each<I>([&](int) { return S::iset(x); });
  }
  MXTILE_WORD F as_float(I x) {
    return each<F>([&](int i) { return S::as_float(x.v[i]); });
  }
  MXTILE_WORD I as_int(F x) {
    return each<I>([&](int i) { return S::as_int(x.v[i]); });
  }

  MXTILE_WORD F load(const float* p) {
    return each<F>([&](int i) { return S::load(p + i * S::kLanes); });
  }
  MXTILE_WORD void store(float* p, F x) { store_of(p, x, std::make_integer_sequence<int, N>{}); }

  MXTILE_WORD F add(F a, F b) {
    return each<F>([&](int i) { return S::add(a.v[i], b.v[i]); });
  }
  MXTILE_WORD F sub(F a, F b) {
    return each<F>([&](int i) { return S::sub(a.v[i], b.v[i]); });
  }
  MXTILE_WORD F mul(F a, F b) {
    return each<F>([&](int i) { return S::mul(a.v[i], b.v[i]); });
  }
  MXTILE_WORD F reciprocal(F x) {
    return each<F>([&](int i) { return S::reciprocal(x.v[i]); });
  }
  MXTILE_WORD F scale_by(F x, F n)
    requires requires(typename S::F y) { S::scale_by(y, y); }
  {
    return each<F>([&](int i) { return S::scale_by(x.v[i], n.v[i]); });
  }
  MXTILE_WORD F fma(F a, F b, F c) {
    return each<F>([&](int i) { return S::fma(a.v[i], b.v[i], c.v[i]); });
  }
  MXTILE_WORD F max(F a, F b) {
    return each<F>([&](int i) { return S::max(a.v[i], b.v[i]); });
  }
  MXTILE_WORD F min(F a, F b) {
    return each<F>([&](int i) { return S::min(a.v[i], b.v[i]); });
  }
  MXTILE_WORD F select_lt(F a, F b, F x, F y) {
    return each<F>([&](int i) { return S::select_lt(a.v[i], b.v[i], x.v[i], y.v[i]); });
  }

  MXTILE_WORD I iadd(I a, I b) {
    return each<I>([&](int i) { return S::iadd(a.v[i], b.v[i]); });
  }
  MXTILE_WORD I isub(I a, I b) {
    return each<I>([&](int i) { return S::isub(a.v[i], b.v[i]); });
  }
  MXTILE_WORD I iand(I a, I b) {
    return each<I>([&](int i) { return S::iand(a.v[i], b.v[i]); });
  }
  MXTILE_WORD I ior(I a, I b) {
    return each<I>([&](int i) { return S::ior(a.v[i], b.v[i]); });
  }
  template <int Bits>
  MXTILE_WORD I shl(I a) {
    return each<I>([&](int i) { return S::template shl<Bits>(a.v[i]); });
  }
  template <int Bits>
  MXTILE_WORD I sar(I a) {
    return each<I>([&](int i) { return S::template sar<Bits>(a.v[i]); });
  }

 private:
  template <int... i>
  MXTILE_WORD void store_of(float* p, F x, std::integer_sequence<int, i...>) {
    (S::store(p + i * S::kLanes, x.v[i]), ...);
  }
  // Constant indices from the start: with a loop, gcc 12 keeps the vectors in memory.
  template <class T, class Body, int... i>
  MXTILE_WORD T each_of(Body body, std::integer_sequence<int, i...>) {
    return T{{body(i)...}};
  }
  template <class T, class Body>
  MXTILE_WORD T each(Body body) {
    return each_of<T>(body, std::make_integer_sequence<int, N>{});
  }
};

}  // namespace mxtile::simd
