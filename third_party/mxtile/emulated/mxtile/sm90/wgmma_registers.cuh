// mxtile/sm90/wgmma_registers.cuh on the CPU.
#pragma once

#include "mxtile/sm90/wgmma.cuh"

namespace mxtile::sm90 {

inline uint32_t wgmma_desc_at(uint32_t tile) { return ((tile & 0x3FFFF) >> 4) | (1u << 16); }

inline void wgmma_pin(uint32_t (&)[4]) {}

template <Fp8 kA, bool kAdd, int kFloats>
void wgmma_registers(float (&d)[kFloats], const uint32_t (&a)[4], uint32_t b) {
  simt::wgmma({wgmma_operand(kA), simt::Operand::e4m3, 2 * kFloats, 0,
               uint64_t{kDescHigh} << 32 | b, a, false, kAdd},
              d);
}

template <bool kAdd, int kFloats>
void wgmma_registers_f16(float (&d)[kFloats], const uint32_t (&a)[4], uint32_t b) {
  simt::wgmma({simt::Operand::f16, simt::Operand::f16, 2 * kFloats, 0,
               uint64_t{kDescHigh} << 32 | b, a, false, kAdd},
              d);
}

template <bool kAdd, int kFloats>
void wgmma_registers_bf16(float (&d)[kFloats], const uint32_t (&a)[4], uint32_t b) {
  simt::wgmma({simt::Operand::bf16, simt::Operand::bf16, 2 * kFloats, 0,
               uint64_t{kDescHigh} << 32 | b, a, false, kAdd},
              d);
}

}  // namespace mxtile::sm90
