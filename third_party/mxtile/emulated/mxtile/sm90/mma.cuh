// mxtile/sm90/mma.cuh on the CPU.
#pragma once

#include <cstdint>

#include "mxtile/sm90/convert.cuh"

namespace mxtile::sm90 {

inline uint4 load_shared16(uint32_t at) {
  return *reinterpret_cast<const uint4*>(simt::place(at, 16, 16));
}
inline uint2 load_shared8(uint32_t at) {
  return *reinterpret_cast<const uint2*>(simt::place(at, 8, 8));
}

inline void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  simt::mma_16x8x16(simt::Operand::f16, d, a, b0, b1);
}
inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  simt::mma_16x8x16(simt::Operand::bf16, d, a, b0, b1);
}

}  // namespace mxtile::sm90
