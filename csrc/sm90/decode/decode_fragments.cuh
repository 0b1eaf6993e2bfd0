// Codes of the decode layout (te_mx/sm90_decode.h) as operands of mma.sync in fp16, exactly.
//
// Hopper has no FP8 mma.sync: the instruction of that name converts both sides to fp16 first, every
// time. Here weights are converted once, for all rows of x.
#pragma once

#include <cstdint>

#include "mxtile/sm90/mma.cuh"
#include "te_mx/types.h"

namespace te_mx::sm90 {

namespace tile = mxtile::sm90;

// Weights of one block, as operand a of the two instructions that make up its k of 32. Lane 4g + t
// has rows g and g + 8; its k of the first instruction are 8t .. 8t + 3, of the second 8t + 4 ..
// 8t + 7: x lies in the same order.
template <Element kFmt>
struct WeightBlock {
  static constexpr bool kFp4 = kFmt == Element::e2m1;
  static constexpr int kBytes = kFp4 ? 256 : 512;
  // The fp16 numbers of MXFP4 are 2^-14 times the codes': made up for in the scales.
  static constexpr uint32_t kExponents = kFp4 ? 14 * 0x01010101u : 0;
  uint32_t first[4], second[4];

  __device__ __forceinline__ void load(uint32_t at, int lane) {
    if constexpr (kFp4) {
      const uint2 w = tile::load_shared8(at + lane * 8);
      fp4(w.x, 0), fp4(w.y, 1);
    } else {
      const uint4 w = tile::load_shared16(at + lane * 16);
      tile::fp8x4_to_halves<kFmt>(w.x, first[0], first[2]),
          tile::fp8x4_to_halves<kFmt>(w.y, second[0], second[2]);
      tile::fp8x4_to_halves<kFmt>(w.z, first[1], first[3]),
          tile::fp8x4_to_halves<kFmt>(w.w, second[1], second[3]);
    }
  }

  // Eight codes of a row. In each half of w, from the lowest bit: sign of pair 3, magnitude of pair
  // 1 (3 bits), magnitude of 3, sign of 1, sign of 2, magnitude of 0, magnitude of 2, sign of 0;
  // the low half has the first of every pair.
  __device__ __forceinline__ void fp4(uint32_t w, int row) {
    constexpr uint32_t kNumber = 0x8E008E00u;
    const uint32_t other = (w << 7 & 0x80808080u) | (w >> 3 & 0x0E0E0E0Eu);
    first[row] = w & kNumber;
    first[2 + row] = w << 8 & kNumber;
    second[row] = other & 0xFF00FF00u;
    second[2 + row] = __byte_perm(other, 0, 0x2404);
  }
};

// Scales of a lane's two rows over a quad. NOTE: bytes of blocks with other codes than zero are
// 24 .. 215, or 255; the layout's maker sees to it. So 2^(byte - 127) times the sum of a block
// neither overflows nor loses bits. Rows with a 255 are NaN altogether, whatever x is.
template <Element kFmt>
struct WeightScales {
  uint32_t low, high;

  __device__ __forceinline__ void load(uint32_t at, int lane, uint32_t (&nan)[2]) {
    const uint2 w = tile::load_shared8(at + lane / 4 * 8);
    nan[0] |= all_ones(w.x), nan[1] |= all_ones(w.y);
    low = w.x + WeightBlock<kFmt>::kExponents, high = w.y + WeightBlock<kFmt>::kExponents;
  }
  static __device__ __forceinline__ uint32_t all_ones(uint32_t w) {
    return ((w & 0x7F7F7F7Fu) + 0x01010101u) & w & 0x80808080u;
  }
  // That of block b of the quad, a constant.
  static __device__ __forceinline__ float of(uint32_t w, int b) {
    return __uint_as_float((b < 3 ? w << (23 - 8 * b) : w >> 1) & 0x7F800000u);
  }
};

}  // namespace te_mx::sm90
