// mxtile/sm90/wgmma_shared.cuh on the CPU.
#pragma once

#include "mxtile/sm90/wgmma.cuh"

namespace mxtile::sm90 {

template <bool kAdd, int kFloats>
void wgmma_shared(float (&d)[kFloats], uint32_t a, uint32_t b) {
  wgmma_fp8<Fp8::e4m3, Fp8::e4m3>(d, a, b, kAdd);
}

}  // namespace mxtile::sm90
