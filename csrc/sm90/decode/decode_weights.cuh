// A quad of weights of the decode layout (te_mx/sm90_decode.h), as operand A of wgmma from
// registers: as codes, or converted to fp16, exactly.
#pragma once

#include <cstdint>

#include "mxtile/sm90/fp4.cuh"
#include "mxtile/sm90/mma.cuh"
#include "mxtile/sm90/wgmma_registers.cuh"
#include "te_mx/types.h"

namespace te_mx::sm90 {

namespace tile = mxtile::sm90;

// Two words of E4M3 codes of eight E2M1 codes, times 2^-6: te_mx/sm90_decode.h says where their
// bits lie. The E2M1 code s ee m is the E4M3 code s 00ee m00, the smallest ones too.
__device__ __forceinline__ void fp4x8_to_fp8(uint32_t w, uint32_t& first, uint32_t& second) {
  first = w & 0x9C9C9C9Cu;
  second = (w << 2 & 0x8C8C8C8Cu) | (w >> 2 & 0x10101010u);
}

// Codes of a lane over the 32 k of block b of a quad: of two rows.
template <Element kFmt>
struct WeightBlock {
  static constexpr bool kFp4 = kFmt == Element::e2m1;
  static constexpr tile::Fp8 kCodes = Element::e4m3;  // that the tensor cores see
  static constexpr int kWords = kFp4 ? 2 : 4, kBytes = 128 * kWords;
  uint32_t codes[kWords];

  // Of the quad at a shared address.
  __device__ __forceinline__ WeightBlock(uint32_t quad, int b, int lane) {
    const uint32_t at = quad + b * kBytes + lane * (4 * kWords);
    if constexpr (kFp4) {
      const uint2 w = tile::load_shared8(at);
      codes[0] = w.x, codes[1] = w.y;
    } else {
      const uint4 w = tile::load_shared16(at);
      codes[0] = w.x, codes[1] = w.y, codes[2] = w.z, codes[3] = w.w;
    }
  }

  // As operand A.
  __device__ __forceinline__ void operand(uint32_t (&a)[4]) const {
    if constexpr (kFp4) {
      fp4x8_to_fp8(codes[0], a[0], a[1]), fp4x8_to_fp8(codes[1], a[2], a[3]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = codes[i];
    }
  }
  // Half h in fp16. NOTE: its k lie as x does (decode_input.cuh): 4t, 4t + 1 of all lanes first,
  // then 4t + 2, 4t + 3.
  __device__ __forceinline__ void halves(int h, uint32_t (&a)[4]) const {
    uint32_t c[4];
    operand(c);
    tile::fp8x4_to_halves<kCodes>(c[2 * h], a[0], a[2]);
    tile::fp8x4_to_halves<kCodes>(c[2 * h + 1], a[1], a[3]);
  }
};

// Scales of a lane's two rows over the quad at a shared address.
template <Element kFmt>
__device__ __forceinline__ uint2 load_scales(uint32_t quad, int lane) {
  return tile::load_shared8(quad + 4 * WeightBlock<kFmt>::kBytes + lane / 4 * 8);
}

// Bytes of 255 as bit 7 of their places, others as 0: of all that there are these alone have their
// three upper bits.
__device__ __forceinline__ uint32_t bytes_of_ones(uint32_t w) {
  return w & w << 1 & w << 2 & 0x80808080u;
}

// 2^(byte - 127) of byte b of four, a constant. NOTE: bytes of blocks with other codes than zero
// are 24 .. 221, or 255; the layout's maker sees to it. So the sum of a block times such a scale
// neither overflows nor loses bits. Rows with a 255 are made NaN altogether.
__device__ __forceinline__ float scale_of(uint32_t w, int b) {
  return __uint_as_float((b < 3 ? w << (23 - 8 * b) : w >> 1) & 0x7F800000u);
}

}  // namespace te_mx::sm90
