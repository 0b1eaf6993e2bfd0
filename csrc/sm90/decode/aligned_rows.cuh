// Rows of x for tiles_kernel.cuh: quads of 128 k whose four blocks share one
// exponent, as a row of a tile of class 1 (sm90_layout.h). Blocks that lie further below the
// largest one than `spread` octaves come in further passes over the quad, four at most, where the
// others are zeros: a row has the same sums whatever rows are beside it.
#pragma once

#include "decode/decode_values.cuh"
#include "mxtile/sm90/swizzle.cuh"
#include "te_mx/sm90_decode.h"

namespace te_mx::sm90 {

// Prepared: of [block of rows][pass][quad] codes under the 128-byte swizzle, then scales; scales of
// rows without blocks in a pass are 0, and their codes hold anything. `passes`: of [16 rows][quad].
struct AlignedInput {
  DecodeInput in;
  DecodeRows rows_of;  // which rows a block has
  int m = 0, k = 0, quads = 0, spread = 0;
  int rows = 0;  // of a block, 16 at least
  uint8_t* made = nullptr;
  uint8_t* passes = nullptr;
  float* beside = nullptr;  // scales of [block of rows][quad] where there is one pass
  bool factors = false;     // with one fp32 scale for 128 of k, so that nothing is to be aligned

  // bf16 values in whole vectors: eight threads have a quad of a row, else 16.
  __host__ __device__ bool plain() const { return in.plain(k); }
  __device__ __forceinline__ uint8_t* at(int64_t block, int pass, int quad) const {
    if (beside != nullptr) return made + (block * quads + quad) * rows * kDecodeQuad;
    return made + ((block * kMostPasses + pass) * quads + quad) * aligned_bytes(rows);
  }
  __device__ __forceinline__ float* scales_at(int64_t block, int pass, int quad) const {
    if (beside != nullptr) return beside + (block * quads + quad) * rows;
    return reinterpret_cast<float*>(at(block, pass, quad) + rows * kDecodeQuad);
  }
};

// Codes times 2^-down, rounded to nearest even; zeros from 15 on, as in tiles of rows by
// themselves.
__device__ __forceinline__ uint2 lowered(uint2 codes, int down) {
  const uint4 h = halves_of<Element::e4m3>(codes);
  const float f = down < 15 ? __uint_as_float(static_cast<uint32_t>(127 - down) << 23) : 0.0f;
  const auto two = [&](uint32_t w) {
    const float2 v = __half22float2(*reinterpret_cast<const __half2*>(&w));
    return float2{v.x * f, v.y * f};
  };
  const float2 a = two(h.x), b = two(h.y), c = two(h.z), d = two(h.w);
  return {tile::fp8x4<Element::e4m3>(a.x, a.y, b.x, b.y),
          tile::fp8x4<Element::e4m3>(c.x, c.y, d.x, d.y)};
}
// Codes of a block of NaN.
__device__ __forceinline__ uint2 nan_codes() { return {0x7F7F7F7Fu, 0x7F7F7F7Fu}; }

// Eight elements of a row as codes of MX, of which passes take one part after the other. By whole
// warps: half of one has a quad of a row.
struct AlignedEight {
  uint2 codes;
  uint32_t byte;  // of the block
  bool left;      // whether the block counts and no pass took it

  template <class Eight>
  __device__ __forceinline__ AlignedEight(Eight x, const DecodeInput& in) {
    const EightMade made = x.made(in);
    codes = {made.words.x, made.words.y};
    // NOTE: of the first lane of a block: others may lie behind k, where codes have no scale.
    byte = __shfl_sync(~0u, __float_as_uint(made.scale) >> 23 & 255, threadIdx.x & 28);
    uint32_t there = (codes.x | codes.y) & 0x7F7F7F7Fu;
    there |= __shfl_xor_sync(~0u, there, 1);
    there |= __shfl_xor_sync(~0u, there, 2);
    left = there != 0 && byte != 255;
  }
  // The exponent of the next pass, -1 where it has no blocks; made: its codes of these eight.
  __device__ __forceinline__ int pass(int number, int spread, uint2& made) {
    int e = left ? static_cast<int>(byte) : -1;
#pragma unroll
    for (int lanes = 4; lanes < 16; lanes *= 2) e = max(e, __shfl_xor_sync(~0u, e, lanes));
    const int down = e - static_cast<int>(byte);
    made = {0, 0};
    if (left && down <= spread) {
      made = down == 0 ? codes : lowered(codes, down);
      left = false;
    }
    if (number == 0 && byte == 255) made = nan_codes();
    return e;
  }
  // By the warp: whether a pass is left to either half of it.
  __device__ __forceinline__ bool more() const { return __any_sync(~0u, left); }
};

// The same of sixteen elements of a row, as eight lanes have a quad of it; amax: of the block.
template <class Eight>
struct AlignedSixteen {
  uint2 codes[2];
  uint32_t byte;
  bool left;

  __device__ __forceinline__ AlignedSixteen(const Eight (&x)[2], const DecodeInput& in,
                                            uint32_t amax)
      : byte(scale_byte(in, amax)) {
    codes[0] = x[0].codes_of(byte), codes[1] = x[1].codes_of(byte);
    uint32_t there = (codes[0].x | codes[0].y | codes[1].x | codes[1].y) & 0x7F7F7F7Fu;
    there |= __shfl_xor_sync(~0u, there, 1);
    left = there != 0 && byte != 255;
  }
  __device__ __forceinline__ int pass(int number, int spread, uint4& made) {
    int e = left ? static_cast<int>(byte) : -1;
#pragma unroll
    for (int lanes = 2; lanes < 8; lanes *= 2) e = max(e, __shfl_xor_sync(~0u, e, lanes));
    const int down = e - static_cast<int>(byte);
    uint2 a{0, 0}, b{0, 0};
    if (left && down <= spread) {
      a = codes[0], b = codes[1];
      if (down != 0) a = lowered(a, down), b = lowered(b, down);
      left = false;
    }
    if (number == 0 && byte == 255) a = b = nan_codes();
    made = {a.x, a.y, b.x, b.y};
    return e;
  }
  __device__ __forceinline__ bool more() const { return __any_sync(~0u, left); }
};

// Where the scale of row r lies: what lane 4g + t reads at once, columns 8j + 2t and 8j + 2t + 1 of
// two j's, or of one where there are 8 rows, is in one piece.
template <bool kEight>
__device__ __forceinline__ int aligned_scale_place(int r) {
  constexpr int kTogether = kEight ? 1 : 2;
  const int j = r / 8, t = r % 8 / 2;
  return ((j / kTogether * 4 + t) * kTogether + j % kTogether) * 2 + r % 2;
}
// Eight codes of row r, from 8 * lane of a quad on.
__device__ __forceinline__ void store_aligned(uint8_t* quad, uint2 codes, int r, int lane) {
  uint8_t* const rows = quad + r / 8 * 1024;
  *reinterpret_cast<uint2*>(rows + tile::swizzle128(r % 8, lane / 2) + lane % 2 * 8) = codes;
}
// Sixteen codes, from 16 * lane of a quad on.
__device__ __forceinline__ void store_sixteen(uint8_t* quad, uint4 codes, int r, int lane) {
  *reinterpret_cast<uint4*>(quad + r / 8 * 1024 + tile::swizzle128(r % 8, lane)) = codes;
}
// The scale of an exponent; that of codes which are zeros, or NaN, is 1.
__device__ __forceinline__ float aligned_scale(int e) {
  return tile::e8m0_to_float(e < 0 ? 127u : static_cast<uint32_t>(e));
}

inline constexpr int kAlignThreads = 256, kAlignRows = kAlignThreads / 16;
template <class T, bool kVectors, bool kFactors = false>
using AlignedValues = EightValues<T, Element::e4m3, kVectors, false, kFactors>;

}  // namespace te_mx::sm90
