// FP4 (E2M1) on the device, as E4M3: every E2M1 number times 2^d is an E4M3 number for d from -8
// to 6, so that the tensor cores of FP8 multiply it exactly. Rounding to E2M1, codes of one format
// to those of the other, nibbles.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "mxtile/sm90/fp8.cuh"

namespace mxtile::sm90 {

// d = kFp4Headroom - u for u from 0 to kFp4Spread.
inline constexpr uint32_t kFp4Spread = 14, kFp4Headroom = 6;

// ---------------------------------------------------------------------------------------- rounding
// What rounds numbers of two blocks of scale 2^(T + d) to E2M1 numbers times 2^d, each half of a
// word that of one block in bf16: `factor` 2^-T, NaN for a block of NaN, and `magic`
// 1.5 * 2^(d + 6). Adding that cuts a bf16 number off at 2^(d - 1), the step of E2M1's smallest
// numbers; larger ones are rounded with a larger one.
struct Fp4Rounding {
  uint32_t factor, magic;
};

// Of blocks that were to be multiplied by the bf16 numbers `factors`, 2^(127 - e) or NaN. `targets`
// has their T + 1, where T is a scale byte with e - T from -8 to 6, or anything above for blocks of
// zeros.
__device__ __forceinline__ Fp4Rounding fp4_rounding(uint32_t factors, uint32_t targets) {
  const uint32_t e_plus_1 = ~(factors >> 7) & 0x00FF00FFu;
  const uint32_t u = __vminu2(targets + kFp4Headroom * 0x10001u - e_plus_1, kFp4Spread * 0x10001u);
  const uint32_t nan = (factors & 0x10001u) * 0x7FFFu;  // powers of two have no mantissa
  return {(0x7F807F80u - (targets << 7)) | nan, 0x45C045C0u - (u << 7)};
}
// The same with d = 0.
__device__ __forceinline__ Fp4Rounding fp4_rounding(uint32_t factors) {
  return {factors, 0x42C042C0u};
}

// Two bf16 numbers, rounded to nearest even, at most 6 * 2^d. Zeros keep their signs.
__device__ __forceinline__ uint32_t round_to_fp4(uint32_t x, const Fp4Rounding& by) {
  const auto bf16 = [](uint32_t bits) { return *reinterpret_cast<const __nv_bfloat162*>(&bits); };
  const auto bits_of = [](__nv_bfloat162 v) { return *reinterpret_cast<const uint32_t*>(&v); };
  // NOTE: exact but for products far below the smallest code, which the sum does not use.
  const uint32_t scaled = bits_of(__hmul2(bf16(x), bf16(by.factor)));
  const uint32_t magic = __vmaxu2((scaled & 0x7F807F80u) + 0x03400340u, by.magic);
  const __nv_bfloat162 sum = __hfma2(bf16(x), bf16(by.factor), bf16(magic));
  const uint32_t rounded = bits_of(__hsub2(sum, bf16(magic)));
  return clamp_magnitude_bf16x2(rounded, by.magic - 0x02000200u) | (x & 0x80008000u);
}

// The same of one fp32 number that was multiplied by the factor, with the magic of its block in the
// upper half.
__device__ __forceinline__ float round_to_fp4(float scaled, uint32_t upper_magic) {
  const uint32_t bits = __float_as_uint(scaled), own = upper_magic & 0xFFFF0000u;
  const float magic = __uint_as_float(max((bits & 0x7F800000u) + 0x0B400000u, own + 0x08000000u));
  const float rounded = __fsub_rn(__fadd_rn(scaled, magic), magic);
  const float clamped = clamp_magnitude(rounded, __uint_as_float(own - 0x02000000u));
  return __uint_as_float(__float_as_uint(clamped) | (bits & 0x80000000u));
}

// ------------------------------------------------------------------------------------------- codes
// Four E2M1 codes, one a byte, of the E4M3 codes of the same numbers (d = 0); 0 of NaN.
__device__ __forceinline__ uint32_t fp4_of_fp8x4(uint32_t codes) {
  // E4M3: 00 30 38 3C 40 44 48 4C for 0 0.5 1 1.5 2 3 4 6. Of these 7F, NaN, alone has both of the
  // upper bits of the exponent.
  const uint32_t low = (codes >> 2 & 0x03030303u) | (codes >> 5 & ~(codes >> 3) & 0x01010101u);
  const uint32_t nan = (codes >> 6 & codes >> 5 & 0x01010101u) * 0x0Fu;
  return (low | (codes >> 4 & 0x0C0C0C0Cu)) & ~nan;
}

// Eight codes, one a byte, as nibbles: the first in the lowest bits.
__device__ __forceinline__ uint32_t pack_nibbles(uint32_t first, uint32_t second) {
  return __byte_perm(first | first >> 4, second | second >> 4, 0x6420);
}

// E4M3 codes of all E2M1 magnitudes times 2^d, in the order of their codes.
struct Fp4Table {
  uint32_t low, high;

  // d = kFp4Headroom - u.
  __device__ __forceinline__ explicit Fp4Table(uint32_t u) {
    // Everything is normal down to d = -5.
    const uint32_t up = (kFp4Headroom + 5 - u) * 8;
    low = 0x14100800u + up * 0x01010100u, high = 0x24201C18u + up * kEveryByte;
    if (u == 12) low = 0x0C080400u, high = 0x1C181410u;
    if (u == 13) low = 0x06040200u, high = 0x14100C08u;
    if (u == 14) low = 0x03020100u, high = 0x0C080604u;
  }

  __device__ __forceinline__ explicit Fp4Table(uint2 words) : low(words.x), high(words.y) {}

  // Four codes of the nibbles in the lower half of a word.
  __device__ __forceinline__ uint32_t four(uint32_t nibbles) const {
    const uint32_t magnitudes = __byte_perm(low, high, nibbles & 0x7777u);
    // 0xFF for a sign, 0x80 for the others.
    const uint32_t signs = permute_signs(0x80808080u, nibbles);
    return magnitudes | (signs << 1 & 0x80808080u);
  }

  // Eight codes of a word, in fewer instructions than four and four.
  __device__ __forceinline__ uint2 eight(uint32_t nibbles) const {
    const uint32_t magnitudes = nibbles & 0x77777777u;
    // Signs of every other code are the upper bits of bytes as they lie, those between after this.
    const uint32_t moved = nibbles << 4;
    return make_uint2(
        permute_bytes(low, high, magnitudes) | (__byte_perm(moved, nibbles, 0x5140) & 0x80808080u),
        permute_bytes(low, high, magnitudes >> 16) |
            (__byte_perm(moved, nibbles, 0x7362) & 0x80808080u));
  }
};

}  // namespace mxtile::sm90
