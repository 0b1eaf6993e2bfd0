// Products: mma.sync of a warp, wgmma of a warpgroup.
#pragma once

#include "simt/machine.hpp"

namespace simt {

enum class Operand : int { e4m3, e5m2, f16, bf16 };

float half_value(uint16_t bits);
float fp8_value(Operand type, uint8_t code);    // e4m3 or e5m2
uint16_t fp8_half(Operand type, uint8_t code);  // bits of the same number as fp16
// To nearest even, saturating, NaN to 0x7F.
uint8_t fp8_code(Operand type, float value);

// m16n8k16 of fp16 numbers with fp32 sums; registers as PTX has them.
void mma_16x8x16(Operand type, float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
// m16n8k32 of FP8 codes.
void mma_16x8x32(Operand a_type, Operand b_type, float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                 uint32_t b1);

// D[64, n] (+)= A[64, k] @ B[n, k]^T, k = 32 codes or 16 numbers of 16 bits; d: n / 2 registers.
struct Wgmma {
  Operand a_type, b_type;
  int n;
  uint64_t a, b;                // descriptors of shared memory
  const uint32_t* a_registers;  // four, instead of a; or null
  bool a_transposed;            // 16 bits: A lies as [k, 64]
  bool accumulate;
};
void wgmma(const Wgmma& what, float* d);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(size_t pending);  // groups of this thread

void check_left(Thread& thread);  // that nothing is in flight

}  // namespace simt
