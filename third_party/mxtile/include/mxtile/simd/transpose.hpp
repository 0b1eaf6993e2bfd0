// A square of f32 lanes in registers: transposed, or every row summed.
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

// Lane i: the sum of the lanes of x[i], added in halves: l to l + lanes / 2, then to l + lanes / 4,
// .. as one row after the other would be. Overwrites x.
template <class S>
MXTILE_WORD typename S::F row_sums(typename S::F (&x)[S::kLanes]) {
  for (int half = S::kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) {
      typename S::F low, high;  // the lower and the upper lanes of both rows, side by side
      S::zip(x[i], x[i + half], low, high);
      x[i] = S::add(low, high);
    }
  }
  return x[0];
}

}  // namespace mxtile::simd
