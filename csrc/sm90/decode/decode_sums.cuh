// Sums of a warpgroup: a tile of 64 rows of weights, from registers, times rows of x in shared
// memory. The tensor cores add up what shares its scales, a block of 32 or a quad of 128; that sum
// goes times both scales to fp32.
#pragma once

#include <utility>

#include "decode/decode_input.cuh"
#include "decode/decode_weights.cuh"
#include "te_mx/sm90_decode.h"

namespace te_mx::sm90 {

// Where x comes from: values or codes that every CTA takes in, bf16 values in whole vectors, or
// rows that a kernel before prepared.
enum class DecodeX { any, plain, prepared };

// kHalves: products of fp16 numbers, else of FP8 codes. kFactors: scales are fp32 numbers for a
// quad, else powers of two for a block. kWarps: of a CTA, 8 or 16.
template <int kXRows, bool kWithHalves, bool kWithFactors, DecodeX kX, int kCtaWarps>
struct DecodeMath {
  static constexpr int kRows = kXRows, kFloats = kRows / 2, kWarps = kCtaWarps;
  static constexpr bool kHalves = kWithHalves, kFactors = kWithFactors;
  static constexpr bool kPlain = kX == DecodeX::plain, kPrepared = kX == DecodeX::prepared;
  static constexpr int kQuadBytes = kDecodeQuadBytes;
  static constexpr int kInputBytes = decode_input_bytes(kRows, kHalves);
  // CTAs an SM. NOTE: 64 rows in fp16 take more registers than two have.
  static constexpr bool kAlone = decode_alone(kWarps, kRows, kPrepared);
  static constexpr int kCtas = kAlone || (kHalves && kRows == 64) ? 1 : 2;
  // Rows of x in one instruction, and how many of its sums are under way at once: while some are
  // taken, the next ones are computed.
  static constexpr int kPiece = kRows == 64 ? 32 : kRows, kPieces = kRows / kPiece;
  static constexpr int kTogether =
      kRows <= 16 && !kFactors && (kWarps == 8 || kAlone) && !(kHalves && kRows == 8) ? 4 : 2;
  // NOTE: beside CTAs of 16 warps there are registers for one that prepares rows; without them the
  // next ones would gather on the SMs where none of those runs. 64 rows need all.
  static constexpr int kThreadsAtMost =
      32 * (kWarps + (kWarps == 16 && kPrepared && kRows < 64 ? 2 : 0));
};

// Of a lane 4g + t: rows g and g + 8 of its warp's group, rows 8j + 2t and 8j + 2t + 1 of x.
template <class Math>
struct DecodeSums {
  float v[Math::kFloats] = {};

  // A block as operand A: 32 codes, or 16 fp16 numbers and 16 more.
  static constexpr int kParts = Math::kHalves ? 2 : 1;
  using Operand = uint32_t[kParts][4];
  static __device__ __forceinline__ void make(Operand& a, QuadCodes& w, int b) {
    if constexpr (Math::kHalves) {
      uint32_t codes[4];
      w.operand(b, codes);
      halves_of_codes<QuadCodes::kCodes>(codes, 0, a[0]),
          halves_of_codes<QuadCodes::kCodes>(codes, 1, a[1]);
      tile::wgmma_pin(a[0]), tile::wgmma_pin(a[1]);
    } else {
      w.operand(b, a[0]);
      tile::wgmma_pin(a[0]);
    }
  }
  // Starts the products of block b with a piece of x (wgmma_desc of its quad). kAdd: to what d has.
  static constexpr int kFloats = Math::kPiece / 2;
  template <bool kAdd>
  static __device__ __forceinline__ void start(float (&d)[kFloats], const Operand& a, uint32_t x,
                                               int b, int piece) {
    x += piece * (Math::kPiece * 128 / 16);
    if constexpr (Math::kHalves) {
      const uint32_t at = x + b / 2 * (Math::kRows * 128 / 16) + b % 2 * 4;
      tile::wgmma_registers_f16<kAdd>(d, a[0], at);
      tile::wgmma_registers_f16<true>(d, a[1], at + 2);
    } else {
      tile::wgmma_registers<QuadCodes::kCodes, kAdd>(d, a[0], x + 2 * b);
    }
  }

  // Scales of a piece of x and a block, of two columns in four words.
  static constexpr int kScales = Math::kPiece == 8 ? 1 : Math::kPiece / 16;
  struct Scales {
    uint4 s[kScales];
    __device__ __forceinline__ void read(uint32_t at, int piece) {
      if constexpr (Math::kPiece == 8) {
        const uint2 two = tile::load_shared8(at);
        s[0].x = two.x, s[0].y = two.y;
      } else {
#pragma unroll
        for (int i = 0; i < kScales; ++i)
          s[i] = tile::load_shared16(at + scale_offset<Math::kRows>(0, piece * kScales + i));
      }
    }
  };

  // Adds d times the scales of both rows and those of a piece of x.
  __device__ __forceinline__ void promote(const float (&d)[kFloats], float low, float high,
                                          const Scales& scales, int piece) {
    float* const to = v + piece * kFloats;
    // NOTE: one product after the other; that of the scales need not be a number of fp32.
    const auto add = [&](int j, uint32_t even_word, uint32_t odd_word) {
      const float even = __uint_as_float(even_word), odd = __uint_as_float(odd_word);
      to[4 * j] = fmaf(d[4 * j] * low, even, to[4 * j]);
      to[4 * j + 1] = fmaf(d[4 * j + 1] * low, odd, to[4 * j + 1]);
      to[4 * j + 2] = fmaf(d[4 * j + 2] * high, even, to[4 * j + 2]);
      to[4 * j + 3] = fmaf(d[4 * j + 3] * high, odd, to[4 * j + 3]);
    };
#pragma unroll
    for (int i = 0; i < kScales; ++i) {
      add(2 * i, scales.s[i].x, scales.s[i].y);
      if constexpr (Math::kPiece > 8) add(2 * i + 1, scales.s[i].z, scales.s[i].w);
    }
  }

  // A quad of weights, of which the lane's codes lie at a shared address and have scales `own`,
  // times that of x; `scales`: of the quad's rows of x, by lanes. leave(): the quad's weights were
  // read, before the last of their products are taken.
  template <class Leave>
  __device__ __forceinline__ void add(uint32_t at, const uint2& own, uint32_t x, uint32_t scales,
                                      const Leave& leave) {
    QuadCodes codes{at};
    if constexpr (Math::kFactors) {
      add_quad(codes, x, scales, own, std::make_integer_sequence<int, Math::kPieces>{});
      leave();
    } else {
      add_blocks(codes, x, scales, own, leave, std::make_integer_sequence<int, Math::kTogether>{},
                 std::make_integer_sequence<int, 4 * Math::kPieces>{});
    }
  }

  // With one scale for the quad: a sum of each piece.
  template <int... kI>
  __device__ __forceinline__ void add_quad(QuadCodes& codes, uint32_t x, uint32_t scales,
                                           const uint2& own, std::integer_sequence<int, kI...>) {
    Operand a[4];
#pragma unroll
    for (int b = 0; b < 4; ++b) make(a[b], codes, b);
    float d[Math::kPieces][kFloats];
    tile::wgmma_fence();
    const auto begin = [&](int i) {
      start<false>(d[i], a[0], x, 0, i);
      start<true>(d[i], a[1], x, 1, i), start<true>(d[i], a[2], x, 2, i);
      start<true>(d[i], a[3], x, 3, i);
      tile::wgmma_commit();
    };
    (begin(kI), ...);
    const auto take = [&](auto i) {
      tile::wgmma_wait<Math::kPieces - 1 - i>();
      tile::wgmma_pin(d[i]);
      Scales of_x;
      of_x.read(scales, i);
      promote(d[i], __uint_as_float(own.x), __uint_as_float(own.y), of_x, i);
    };
    (take(std::integral_constant<int, kI>{}), ...);
  }

  // With scales of blocks: sum u is that of piece u % kPieces with block u / kPieces.
  template <class Leave, int... kFirst, int... kI>
  __device__ __forceinline__ void add_blocks(QuadCodes& codes, uint32_t x, uint32_t scales,
                                             const uint2& own, const Leave& leave,
                                             std::integer_sequence<int, kFirst...>,
                                             std::integer_sequence<int, kI...>) {
    constexpr int kPieces = Math::kPieces, kTogether = Math::kTogether;
    constexpr int kSums = 4 * kPieces;
    // Of blocks that are multiplied, and of one that is made meanwhile.
    constexpr int kOperands = kTogether / kPieces + (kTogether < kSums ? 1 : 0);
    Operand a[kOperands];
    float d[kTogether][kFloats];
    const auto made = [&](int b) { make(a[b % kOperands], codes, b); };
    const auto begin = [&](int u) {
      start<false>(d[u % kTogether], a[u / kPieces % kOperands], x, u / kPieces, u % kPieces);
      tile::wgmma_commit();
    };
    // NOTE: while one block is multiplied, the next is made.
    const auto first = [&](int u) {
      if (u % kPieces == 0) made(u / kPieces), tile::wgmma_fence();
      begin(u);
    };
    (first(kFirst), ...);
    const auto take = [&](auto u) {
      constexpr int kNext = u + kTogether, b = u / kPieces;
      if constexpr (kNext == kSums) leave();
      if constexpr (kNext < kSums && kNext % kPieces == 0) made(kNext / kPieces);
      Scales of_x;
      of_x.read(scales + b * Math::kRows * 4, u % kPieces);
      tile::wgmma_wait<(kNext <= kSums ? kTogether : kSums - u) - 1>();
      tile::wgmma_pin(d[u % kTogether]);
      promote(d[u % kTogether], scale_of(own.x, b), scale_of(own.y, b), of_x, u % kPieces);
      if constexpr (kNext < kSums) {
        tile::wgmma_fence();
        begin(kNext);
      }
    };
    (take(std::integral_constant<int, kI>{}), ...);
  }

  // Rows of weights with a scale of 255 are NaN altogether. In the loop such a scale is infinite,
  // so that sums which are finite have none; for others word(q) has the bytes of quads
  // [first, last) once more. NOTE: of tiles no need: codes of such a block are NaN. `count` rows of
  // x are there.
  template <class Word>
  __device__ __forceinline__ void end(int first, int last, int count, int lane, const Word& word) {
    if constexpr (Math::kFactors) return;
    bool finite = true;
#pragma unroll
    for (int j = 0; j < Math::kFloats; ++j)
      finite &= (__float_as_uint(v[j]) & 0x7F800000u) != 0x7F800000u ||
                j / 4 * 8 + lane % 4 * 2 + j % 2 >= count;
    if (finite) return;
    uint32_t low = 0, high = 0;
#pragma unroll 1
    for (int q = first; q < last; ++q) {
      const uint2 two = word(q);
      low |= bytes_of_ones(two.x), high |= bytes_of_ones(two.y);
    }
    const float none = __uint_as_float(0x7FC00000u);
#pragma unroll
    for (int j = 0; j < Math::kFloats; j += 4) {
      if (low) v[j] = v[j + 1] = none;
      if (high) v[j + 2] = v[j + 3] = none;
    }
  }
};

}  // namespace te_mx::sm90
