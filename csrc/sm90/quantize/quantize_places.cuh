// Where the tiles of several matrices of one size lie, for kernels of one.
#pragma once

#include <algorithm>

#include "quantize/quantize_launch.cuh"

namespace te_mx::sm90 {

// Matrices of one size, each with a pointer of its own.
struct Stack {
  template <class Params>
  using Outputs = Params;
  static constexpr bool kOfWeights = true;
  static constexpr int kMost = 256;  // of one launch
  // From matrix to matrix; words of packed, bytes of plain scales.
  int64_t row_codes, row_scales, col_codes, col_scales;
  int first;
  const void* xs[kMost];
  int64_t row_factors, col_factors;  // numbers, from matrix to matrix

  __device__ __forceinline__ const void* x(const QuantizeParams&, const Tile& t) const {
    return xs[t.matrix];
  }
  template <class Params>
  __device__ __forceinline__ Params outputs(const Params& all, const Tile& t) const {
    Params p = all;
    const int64_t i = first + t.matrix;
    p.row.codes += i * row_codes, p.col.codes += i * col_codes;
    if constexpr (requires { p.row_factors; }) {
      p.row_factors.scales += i * row_factors, p.col_factors.scales += i * col_factors;
    }
    p.a.row_packed.scales += i * row_scales, p.a.col_packed.scales += i * col_scales;
    p.a.row_scales += i * row_scales, p.a.col_scales += i * col_scales;
    return p;
  }
  __device__ __forceinline__ bool find(Tile& t, const QuantizeParams& p) const {
    const bool found = find_tile(t, p, blockIdx.y);
    t.matrix = blockIdx.z;
    return found;
  }
};

// Whether all of several matrices may be read in vectors where the first one may.
inline bool all_aligned(const void* const* xs, int64_t count) {
  return std::all_of(xs, xs + count,
                     [](const void* x) { return reinterpret_cast<uintptr_t>(x) % 16 == 0; });
}

// Calls launch(stack, number of matrices) for as many matrices as a launch takes, one after
// another.
template <class Launch>
Status launch_stacks(Stack stack, const void* const* xs, int64_t count, const Launch& launch) {
  for (int64_t first = 0; first < count; first += Stack::kMost) {
    const int64_t now = std::min<int64_t>(Stack::kMost, count - first);
    stack.first = static_cast<int>(first);
    std::copy(xs + first, xs + first + now, stack.xs);
    const Status launched = launch(stack, now);
    if (launched != Status::ok) return launched;
  }
  return Status::ok;
}

}  // namespace te_mx::sm90
