// The launches of kernels with 128 rows of weights a CTA.
#pragma once

#include <algorithm>

#include "common/launch.h"
#include "decode/aligned_rows.cuh"
#include "decode/decode_run.cuh"

namespace te_mx::sm90 {

// Prepares all rows of x, in so many blocks, for a kernel that follows at once.
Status launch_align(const AlignedInput& x, int blocks, void* stream);
// The same, codes at the start of a workspace and their scales behind them: says where in x.
Status launch_align_beside(AlignedInput& x, void* workspace, int blocks, void* stream);

// Shared memory of a CTA. NOTE: two share an SM: those of a product and of the next.
inline constexpr int kWideSmem = 112 * 1024;

inline constexpr int kWholeSpread = 255;  // one pass: whatever lies further below becomes zeros

// What kernels of all these weights are told alike: x, as it is to be prepared, the scales of the
// weights, and where the sums go.
template <class Params>
Params params_of(const DecodeTask& t, bool factors, int spread = kWholeSpread) {
  Params p;
  p.x.in = t.p.in, p.x.rows_of = t.rows, p.x.m = t.rows.m, p.x.k = static_cast<int>(t.k);
  p.x.quads = static_cast<int>(decode_quads(t.k)), p.x.factors = factors, p.x.spread = spread;
  p.words = t.p.w_scales.from, p.words_quad = t.p.w_scales.quad;
  p.n = static_cast<int>(t.n), p.out = t.p.out;
  return p;
}

}  // namespace te_mx::sm90
