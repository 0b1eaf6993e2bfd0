// Sums of a warpgroup: a tile of 64 rows of weights, from registers, times rows of x in shared
// memory. The tensor cores add up what shares its scales, a block of 32 or a quad of 128; that sum
// goes times both scales to fp32.
#pragma once

#include <utility>

#include "decode/decode_weights.cuh"
#include "te_mx/sm90_decode.h"

namespace te_mx::sm90 {

// kHalves: products of fp16 numbers, else of FP8 codes. kFactors: scales are fp32 numbers for a
// quad, else powers of two for a block.
template <Element kWeights, int kXRows, bool kWithHalves, bool kWithFactors>
struct DecodeMath {
  static constexpr Element kFmt = kWeights;
  static constexpr int kRows = kXRows, kFloats = kRows / 2;
  static constexpr bool kHalves = kWithHalves, kFactors = kWithFactors;
  static constexpr int kQuadBytes = decode_quad_bytes(kFmt);
  static constexpr int kInputBytes = decode_input_bytes(kRows, kHalves);
  // Blocks whose products are under way at once, each in sums of its own.
  static constexpr int kTogether = kFactors ? 1 : kRows <= 16 ? 4 : kRows == 32 ? 2 : 1;
  // CTAs an SM. NOTE: 64 rows in fp16 take more registers than two have.
  static constexpr int kCtas = kHalves && kRows == 64 ? 1 : 2;
};

// Of a lane 4g + t: rows g and g + 8 of its warp's group, rows 8j + 2t and 8j + 2t + 1 of x.
template <class Math>
struct DecodeSums {
  using Block = WeightBlock<Math::kFmt>;
  static constexpr int kFloats = Math::kFloats;
  float v[kFloats] = {};
  uint32_t nan[2] = {};

  // A block as operand A: 32 codes, or 16 fp16 numbers and 16 more.
  static constexpr int kParts = Math::kHalves ? 2 : 1;
  using Operand = uint32_t[kParts][4];
  static __device__ __forceinline__ void make(Operand& a, const Block& w) {
    if constexpr (Math::kHalves) {
      w.halves(0, a[0]), w.halves(1, a[1]);
      tile::wgmma_pin(a[0]), tile::wgmma_pin(a[1]);
    } else {
      w.operand(a[0]);
      tile::wgmma_pin(a[0]);
    }
  }
  // Starts the products of block b with x (wgmma_desc of its quad). kAdd: to what d has.
  template <bool kAdd>
  static __device__ __forceinline__ void start(float (&d)[kFloats], const Operand& a, uint32_t x,
                                               int b) {
    if constexpr (Math::kHalves) {
      const uint32_t at = x + b / 2 * (Math::kRows * 128 / 16) + b % 2 * 4;
      tile::wgmma_registers_f16<kAdd>(d, a[0], at);
      tile::wgmma_registers_f16<true>(d, a[1], at + 2);
    } else {
      tile::wgmma_registers<Block::kCodes, kAdd>(d, a[0], x + 2 * b);
    }
  }

  // Adds d times the scales of both rows and those of x, at a shared address.
  __device__ __forceinline__ void promote(const float (&d)[kFloats], float low, float high,
                                          uint32_t scales) {
    // NOTE: one product after the other; that of the scales need not be a number of fp32.
    const auto add = [&](int j, float even, float odd) {
      v[4 * j] = fmaf(d[4 * j] * low, even, v[4 * j]);
      v[4 * j + 1] = fmaf(d[4 * j + 1] * low, odd, v[4 * j + 1]);
      v[4 * j + 2] = fmaf(d[4 * j + 2] * high, even, v[4 * j + 2]);
      v[4 * j + 3] = fmaf(d[4 * j + 3] * high, odd, v[4 * j + 3]);
    };
    if constexpr (Math::kRows == 8) {
      const uint2 s = tile::load_shared8(scales);
      add(0, __uint_as_float(s.x), __uint_as_float(s.y));
    } else {
#pragma unroll
      for (int j = 0; j < Math::kRows / 8; j += 2) {
        const uint4 s = tile::load_shared16(scales + 8 * j);
        add(j, __uint_as_float(s.x), __uint_as_float(s.y));
        add(j + 1, __uint_as_float(s.z), __uint_as_float(s.w));
      }
    }
  }

  // The quad of weights at a shared address times that of x; `scales`: of the quad's rows of x, by
  // lanes.
  __device__ __forceinline__ void add(uint32_t at, uint32_t x, uint32_t scales, int lane) {
    const uint2 own = load_scales<Math::kFmt>(at, lane);
    if constexpr (Math::kFactors) {
      Operand a[4];
#pragma unroll
      for (int b = 0; b < 4; ++b) make(a[b], {at, b, lane});
      float d[kFloats];
      tile::wgmma_fence();
      start<false>(d, a[0], x, 0);
      start<true>(d, a[1], x, 1), start<true>(d, a[2], x, 2), start<true>(d, a[3], x, 3);
      tile::wgmma_commit();
      tile::wgmma_wait<0>();
      tile::wgmma_pin(d);
      promote(d, __uint_as_float(own.x), __uint_as_float(own.y), scales);
    } else {
      nan[0] |= bytes_of_ones(own.x), nan[1] |= bytes_of_ones(own.y);
      add_blocks<0>(at, x, scales, lane, own);
    }
  }

  // Blocks from kFirst on, kTogether at once.
  template <int kFirst>
  __device__ __forceinline__ void add_blocks(uint32_t at, uint32_t x, uint32_t scales, int lane,
                                             const uint2& own) {
    constexpr int kTogether = Math::kTogether;
    if constexpr (kFirst < 4) {
      add_some<kFirst>(at, x, scales, lane, own, std::make_integer_sequence<int, kTogether>{});
      add_blocks<kFirst + kTogether>(at, x, scales, lane, own);
    }
  }
  template <int kFirst, int... kI>
  __device__ __forceinline__ void add_some(uint32_t at, uint32_t x, uint32_t scales, int lane,
                                           const uint2& own, std::integer_sequence<int, kI...>) {
    Operand a[Math::kTogether];
    (make(a[kI], {at, kFirst + kI, lane}), ...);
    float d[Math::kTogether][kFloats];
    tile::wgmma_fence();
    (start<false>(d[kI], a[kI], x, kFirst + kI), ...);
    tile::wgmma_commit();
    tile::wgmma_wait<0>();
    const auto take = [&](int i) {
      tile::wgmma_pin(d[i]);
      const int b = kFirst + i;
      promote(d[i], scale_of(own.x, b), scale_of(own.y, b), scales + b * Math::kRows * 4);
    };
    (take(kI), ...);
  }

  __device__ __forceinline__ void end() {
    if constexpr (Math::kFactors) return;
    const float none = __uint_as_float(0x7FC00000u);
#pragma unroll
    for (int j = 0; j < kFloats; j += 4) {
      if (nan[0]) v[j] = v[j + 1] = none;
      if (nan[1]) v[j + 2] = v[j + 3] = none;
    }
  }
};

}  // namespace te_mx::sm90
