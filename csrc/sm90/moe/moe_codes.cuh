// Codes of weights and tokens as operands of mma.sync m16n8k16 in fp16, exactly: Hopper has no FP8
// mma.sync, and converting both sides once is what the instruction of that name would do.
//
// A block of 32 k takes two instructions. Lane 4g + t holds k = 8t .. 8t + 7 of rows g and g + 8 of
// the weights, and of row g of the tokens: which k an instruction calls its own does not matter, as
// long as both sides agree.
#pragma once

#include <cstdint>

#include "mxtile/sm90/mma.cuh"
#include "te_mx/types.h"

namespace te_mx::sm90::moe {

namespace tile = mxtile::sm90;

// Eight codes of a row as four words of two numbers.
template <Element kFmt>
struct Eight {
  static constexpr bool kPacked = kFmt == Element::e2m1;
  static constexpr int kBytes = kPacked ? 4 : 8;
  // Numbers of E2M1 come out 2^-14 times as large: their bits lie in those of fp16, from the
  // subnormal ones on.
  static constexpr int kExponent = kPacked ? 14 : 0;
  uint32_t word[4];

  __device__ __forceinline__ void load(const uint8_t* from) {
    if constexpr (kPacked) {
      const uint32_t w = *reinterpret_cast<const uint32_t*>(from);
      constexpr uint32_t kNumber = 0x0E000E00u, kSign = 0x80008000u;
      word[0] = (w << 9 & kNumber) | (w << 12 & kSign);
      word[1] = (w << 5 & kNumber) | (w << 8 & kSign);
      word[2] = (w << 1 & kNumber) | (w << 4 & kSign);
      word[3] = (w >> 3 & kNumber) | (w & kSign);
    } else {
      const uint2 w = *reinterpret_cast<const uint2*>(from);
      tile::fp8x4_to_halves<kFmt>(w.x, word[0], word[1]);
      tile::fp8x4_to_halves<kFmt>(w.y, word[2], word[3]);
    }
  }

  // Codes of a token in the order that these lie in: packed weights have codes i and i + 4 in a
  // word.
  template <Element kX>
  static __device__ __forceinline__ void of_token(uint2 codes, uint32_t (&to)[4]) {
    if constexpr (kPacked) {
      codes = {__byte_perm(codes.x, codes.y, 0x5140), __byte_perm(codes.x, codes.y, 0x7362)};
    }
    tile::fp8x4_to_halves<kX>(codes.x, to[0], to[1]);
    tile::fp8x4_to_halves<kX>(codes.y, to[2], to[3]);
  }
};

// Whether all of 16 scale bytes are 64 .. 191, far from what fp32 ends at: of their two upper bits
// one is set. Sums of blocks times one power of two are numbers then, and times the other no worse
// than they would be at once.
__device__ __forceinline__ bool all_near(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const auto differ = [](uint32_t w) { return w ^ w << 1; };
  return (differ(a) & differ(b) & differ(c) & differ(d) & 0x80808080u) == 0x80808080u;
}
__device__ __forceinline__ uint32_t byte_of(uint32_t bytes, int i) { return bytes >> 8 * i & 0xFF; }
// 2^(byte i - 127)
__device__ __forceinline__ float power(uint32_t bytes, int i) {
  const uint32_t exponent = i < 3 ? bytes << (23 - 8 * i) : bytes >> 1;
  return __uint_as_float(exponent & 0x7F800000u);
}

// d * 2^(w + x - 254 + more), of any scale bytes.
__device__ __noinline__ inline float scaled(float d, uint32_t w, uint32_t x, int more) {
  if (w == 255 || x == 255) return __uint_as_float(0x7FC00000u);
  return ldexpf(d, static_cast<int>(w + x) - 254 + more);
}

}  // namespace te_mx::sm90::moe
