// mxtile/sm90/convert.cuh on the CPU.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "mxtile/sm90/wgmma.cuh"
#include "simt/packed.hpp"
#include "simt/tensor_cores.hpp"

namespace mxtile::sm90 {

template <Fp8 kFmt>
inline constexpr simt::Operand kOperand =
    kFmt == Fp8::e4m3 ? simt::Operand::e4m3 : simt::Operand::e5m2;

template <Fp8 kFmt>
uint32_t fp8x2(float lo, float hi) {
  return simt::fp8_code(kOperand<kFmt>, lo) | simt::fp8_code(kOperand<kFmt>, hi) << 8;
}
template <Fp8 kFmt>
uint32_t fp8x4(float a, float b, float c, float d) {
  return fp8x2<kFmt>(a, b) | fp8x2<kFmt>(c, d) << 16;
}

inline uint32_t max_magnitude_bf16x2(uint32_t a, uint32_t b) {
  return simt::halves(a, b, simt::max_xorsign_16<0x7F80>);
}
inline uint32_t max_magnitude_f16x2(uint32_t a, uint32_t b) {
  return simt::halves(a, b, simt::max_xorsign_16<0x7C00>);
}

template <Fp8 kFmt>
uint32_t halves_of(uint32_t codes) {
  return simt::fp8_half(kOperand<kFmt>, static_cast<uint8_t>(codes)) |
         uint32_t{simt::fp8_half(kOperand<kFmt>, static_cast<uint8_t>(codes >> 8))} << 16;
}
template <Fp8 kFmt>
__half2 fp8x2_to_half2(uint16_t codes) {
  const uint32_t bits = halves_of<kFmt>(codes);
  return *reinterpret_cast<const __half2*>(&bits);
}
template <Fp8 kFmt>
uint32_t half2_to_fp8x2(__half2 v) {
  return fp8x2<kFmt>(__half2float(v.x), __half2float(v.y));
}
template <Fp8 kFmt>
void fp8x4_to_halves(uint32_t codes, uint32_t& low, uint32_t& high) {
  low = halves_of<kFmt>(codes), high = halves_of<kFmt>(codes >> 16);
}

inline uint32_t clamp_magnitude_bf16x2(uint32_t a, uint32_t b) {
  return simt::halves(a, b, simt::min_xorsign_16<0x7F80>);
}
inline float clamp_magnitude(float a, float b) { return simt::min_xorsign(a, b); }

inline float max_magnitude(float a, float b) {
  a = __builtin_fabsf(a), b = __builtin_fabsf(b);
  return a != a || a > b ? a : b;
}

inline uint32_t permute_signs(uint32_t from, uint32_t selectors) {
  return simt::permuted(from, from, selectors, true);
}
inline uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selectors) {
  return simt::permuted(low, high, selectors, true);
}

}  // namespace mxtile::sm90
