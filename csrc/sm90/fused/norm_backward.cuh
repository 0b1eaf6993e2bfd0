// What both ways through the backward pass of a normalization share: where rows stay in the shared
// memory of a cluster (norm_backward_strips.cu), for the matrices that suit it, and by tiles.
#pragma once

#include "fused/activation.cuh"
#include "fused/fused_task.h"
#include "te_mx/sm90.h"

namespace te_mx::sm90 {

// Whether norm_backward_strips() takes it.
bool fits_strips(const NormGradTask& args);
Status norm_backward_strips(const NormGradTask& args);

// Of a row {mean, rstd, both sums}: d, eight of dz, become those of dx, and h, of x, the
// normalized; what they add to dweight and dbias.
__device__ __forceinline__ void finish_gradients(float (&d)[8], float (&h)[8],
                                                 const float (&weight)[8], const float4& row,
                                                 bool rms, float2 (&dweight)[4],
                                                 float2 (&dbias)[4]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    h[j] = mul(sub(h[j], row.x), row.y);
    float& dw = j % 2 == 0 ? dweight[j / 2].x : dweight[j / 2].y;
    float& db = j % 2 == 0 ? dbias[j / 2].x : dbias[j / 2].y;
    dw = add(dw, mul(d[j], h[j])), db = add(db, d[j]);
    const float drift = mul(h[j], row.w);
    d[j] = mul(sub(mul(d[j], weight[j]), rms ? drift : add(row.z, drift)), row.y);
  }
}

}  // namespace te_mx::sm90
