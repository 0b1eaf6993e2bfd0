// mxtile/sm90/wgmma.cuh on the CPU.
#pragma once

#include <cstdint>

#include "mxtile/mx/element.hpp"
#include "mxtile/sm90/barrier.cuh"
#include "simt/tensor_cores.hpp"

namespace mxtile::sm90 {

using Fp8 = mx::Element;
constexpr bool is_fp8(Fp8 v) { return v == Fp8::e4m3 || v == Fp8::e5m2; }

inline uint32_t wgmma_desc(const void* tile) {
  return ((smem_addr(tile) & 0x3FFFF) >> 4) | (1u << 16);
}
inline constexpr uint32_t kDescHigh = 0x40000040u;

inline void wgmma_fence() { simt::wgmma_fence(); }
inline void wgmma_commit() { simt::wgmma_commit(); }
template <int kPending>
void wgmma_wait() {
  simt::wgmma_wait(kPending);
}
template <int kCount>
void wgmma_pin(float (&)[kCount]) {}

constexpr simt::Operand wgmma_operand(Fp8 v) {
  return v == Fp8::e4m3 ? simt::Operand::e4m3 : simt::Operand::e5m2;
}

// Both operands in shared memory, N = 2 * kCount columns.
template <Fp8 kA, Fp8 kB, int kCount>
void wgmma_fp8(float (&d)[kCount], uint32_t a, uint32_t b, int accumulate) {
  static_assert(is_fp8(kA) && is_fp8(kB));
  const uint64_t high = uint64_t{kDescHigh} << 32;
  simt::wgmma({wgmma_operand(kA), wgmma_operand(kB), 2 * kCount, high | a, high | b, nullptr, false,
               accumulate != 0},
              d);
}
template <Fp8 kA, Fp8 kB>
void wgmma_64x128x32(float (&d)[64], uint32_t a, uint32_t b, int accumulate) {
  wgmma_fp8<kA, kB>(d, a, b, accumulate);
}
template <Fp8 kA, Fp8 kB>
void wgmma_64x64x32(float (&d)[32], uint32_t a, uint32_t b, int accumulate) {
  wgmma_fp8<kA, kB>(d, a, b, accumulate);
}

// A in registers, [64, 32]: thread t (warp w, lane l) has of row 16w + l/4 the k from 4(l%4) on in
// a[0], from 16 + 4(l%4) on in a[2]; of the row 8 below a[1] and a[3].
template <Fp8 kA, Fp8 kB, int kCount>
void wgmma_fp8_rs(float (&d)[kCount], const uint32_t (&a)[4], uint32_t b, int accumulate) {
  static_assert(is_fp8(kA) && is_fp8(kB));
  simt::wgmma({wgmma_operand(kA), wgmma_operand(kB), 2 * kCount, 0, uint64_t{kDescHigh} << 32 | b,
               a, false, accumulate != 0},
              d);
}

inline uint64_t wgmma_plain_desc(const void* tile) {
  return ((smem_addr(tile) & 0x3FFFF) >> 4) | (128u / 16 << 16);
}

template <bool kHalf>
void wgmma_64x8x16(float (&d)[4], uint32_t a, uint64_t b, int accumulate) {
  constexpr simt::Operand kType = kHalf ? simt::Operand::f16 : simt::Operand::bf16;
  simt::wgmma({kType, kType, 8, uint64_t{kDescHigh} << 32 | a, b, nullptr, true, accumulate != 0},
              d);
}

}  // namespace mxtile::sm90
