// Who asks for what the warps of a CTA multiply: one thread, stage after stage.
#pragma once

#include "mxtile/sm90/barrier.cuh"

namespace te_mx::sm90 {

// Asks for `length` quads of weights and of x, quad i to stage s by weights(i, s) and x(i, s): as
// many as there are stages at once, weights before between(), which waits for the kernel that wrote
// x; then each where one was read. empty: shared address of the barriers that say so. NOTE:
// tiles_kernel.cuh has the loop itself, of which ptxas makes fewer instructions.
template <class Weights, class Between, class X>
__device__ __forceinline__ void ask_stages(int stages, int length, uint32_t empty,
                                           const Weights& weights, const Between& between,
                                           const X& x) {
  const int ahead = min(stages, length);
  for (int i = 0; i < ahead; ++i) weights(i, i);
  between();
  for (int i = 0; i < ahead; ++i) x(i, i);
  int s = 0, phase = 0;
  for (int i = ahead; i < length; ++i) {
    mxtile::sm90::mbar_wait(empty + 8 * s, phase);
    weights(i, s);
    x(i, s);
    if (++s == stages) s = 0, phase ^= 1;
  }
}

}  // namespace te_mx::sm90
