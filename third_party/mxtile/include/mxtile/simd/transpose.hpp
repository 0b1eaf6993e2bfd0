// A square of f32 lanes, transposed in registers.
#pragma once

#include "mxtile/simd/portable.hpp"

namespace mxtile::simd {

// x[i] lane j <-> x[j] lane i: log2(lanes) rounds of a perfect shuffle of the rows.
template <class S>
MXTILE_WORD void transpose(typename S::F (&x)[S::kLanes]) {
  constexpr int kHalf = S::kLanes / 2;
  for (int round = 1; round < S::kLanes; round *= 2) {
    typename S::F y[S::kLanes];
    for (int i = 0; i < kHalf; ++i) S::zip(x[i], x[i + kHalf], y[2 * i], y[2 * i + 1]);
    for (int i = 0; i < S::kLanes; ++i) x[i] = y[i];
  }
}

}  // namespace mxtile::simd
