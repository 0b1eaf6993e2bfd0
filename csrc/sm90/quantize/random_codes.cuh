// Transforms, and rounding to MXFP4 by the random words of a place, for the kernels that transform
// or round stochastically.
#pragma once

#include "mxtile/sm90/random.cuh"
#include "mxtile/sm90/shared.cuh"
#include "quantize/quantize_launch.cuh"

namespace te_mx::sm90 {

// Where a tile's part of an output begins, by its place in tiles.
struct WholeOut {
  uint8_t* first;
  uint32_t by_row, by_col;
};

struct RandomParams {
  QuantizeParams q;
  GroupTable groups;    // of none: rows are not grouped
  const int64_t* seed;  // null: to nearest even
  uint32_t first;       // number of x's first row, modulo 2^32
  int size;             // of the transform, 0 for none
  uint32_t signs;
  bool direct;         // of both directions: tiles are whole and outputs plain, as `whole` says
  WholeOut whole[4];   // scales and codes of rows and of columns
  uint32_t upper;      // 0xFFFF0000, which must not be known to take a register
  uint32_t turns[32];  // signs that the transform gives the rows of a block of 32: 0 or 2^31
};

// ------------------------------------------------------------------------------------- transforms
__device__ __forceinline__ float transform_factor(int size) {
  return size == 16 ? 0.25f : __uint_as_float(0x3E3504F3u);
}

// Sums and differences of 16 or 32 elements, eight in each of the lanes that lie kNext and 2 kNext
// apart; `place` is the lane's among four.
template <int kNext>
__device__ __forceinline__ void butterfly(float (&v)[8], int size, int place) {
#pragma unroll
  for (int h = 1; h < 8; h *= 2) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i & h) continue;
      const float a = v[i], b = v[i + h];
      v[i] = __fadd_rn(a, b), v[i + h] = __fsub_rn(a, b);
    }
  }
  // The sum or the difference, rounded once.
  const auto exchange = [&v](float turn, int lanes) {
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = __fmaf_rn(v[i], turn, __shfl_xor_sync(~0u, v[i], lanes));
  };
  exchange(place & 1 ? -1.0f : 1.0f, kNext);
  if (size == 32) exchange(place & 2 ? -1.0f : 1.0f, 2 * kNext);
}

// ------------------------------------------------------------------------------------ random words
__device__ __forceinline__ uint2 key_of(const int64_t* seed) {
  const uint64_t key = static_cast<uint64_t>(__ldg(seed));
  return make_uint2(static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32));
}

// What eight columns of rows from `row` on draw, from `col` on, a multiple of 8: two a word, the
// first in its lower half.
template <int kUnroll = tile::kPhiloxRounds, int kRows>
__device__ __forceinline__ void draw(uint4 (&words)[kRows], uint32_t row, int64_t col, uint2 key) {
  tile::philox<kUnroll>(words, static_cast<uint32_t>(col / 8), row, key);
}

// A number that was multiplied by the factor, rounded to FP4 with the magic of its block in the
// upper half (fp4.cuh): after `more`, 16 random bits, was added to it in 2^-16 of a step between
// numbers; what lies behind whole steps is cut off.
__device__ __forceinline__ float round_by_chance(float scaled, uint32_t upper_magic, float more) {
  const uint32_t own = upper_magic & 0xFFFF0000u;
  const float a = tile::clamp_magnitude(scaled, __uint_as_float(own - 0x02000000u));
  // A step is half the binade, at least 2^(d - 1); adding 1.5 * 2^23 of them cuts off what lies
  // behind whole ones, and so does nothing before it that rounds towards zero.
  const uint32_t bits = max((__float_as_uint(a) & 0x7F800000u) + 0x0B400000u, own + 0x08000000u);
  const float magic = __uint_as_float(bits), part = __uint_as_float(bits - 0x13C00000u);
  const float reached = __fadd_rz(fabsf(a), __fmul_rn(more, part));
  return copysignf(__fsub_rn(__fadd_rz(reached, magic), magic), scaled);
}

// ------------------------------------------------------------------------------- codes as nibbles
// Steps: the magnitude of an E2M1 code and the fraction of the next one, as a fixed-point number.
// That is what the bits of an fp32 number 2^-126 times as large are: 22 bits of fraction, since its
// subnormal numbers begin where those of the code do.
inline constexpr float kToSteps = 0x1p-126f;

// The magnitude of a code in bits 22 to 24, with the sign in bit 31, of a number times kToSteps, by
// its bits and 16 random ones: half c of a word. What is more than the largest code has to be
// clamped before.
__device__ __forceinline__ uint32_t step_by_chance(uint32_t bits, uint32_t word, int c) {
  return __dp2a_lo(word, c == 0 ? 0x40u : 0x4000u, bits);
}

// To nearest even: the sum with a power of two cuts a number off at a step. Where 2^-22 is the step
// of the smallest codes that is 2, or as much more as the step is larger. The sum's bits then end
// with a count of steps, and its exponent says how many codes lie below these: two a binade. Added
// up they are the code, in byte 0.
inline constexpr float kToNearest = 0x1p-21f;
__device__ __forceinline__ uint32_t step_nearest(float v) {
  const uint32_t magic =
      max((__float_as_uint(v) & 0x7F800000u) + (22u << 23), __float_as_uint(2.0f));
  const uint32_t sum = __float_as_uint(__fadd_rn(fabsf(v), __uint_as_float(magic)));
  return sum + (sum >> 22);
}

// Eight codes as plain rows have them, the first in the lowest bits, of magnitudes in bytes 0 and
// the signs of numbers.
__device__ __forceinline__ uint32_t nibbles_of(const uint32_t (&w)[8], const float (&v)[8]) {
  const auto magnitudes = [&w](int a, int b, int c, int d) {
    return __byte_perm(__byte_perm(w[a], w[b], 0x40), __byte_perm(w[c], w[d], 0x40), 0x5410);
  };
  const auto signs = [&v](int a, int b, int c, int d) {
    const auto bits = [&v](int i) { return __float_as_uint(v[i]); };
    return __byte_perm(__byte_perm(bits(a), bits(b), 0x73), __byte_perm(bits(c), bits(d), 0x73),
                       0x5410);
  };
  return (magnitudes(1, 3, 5, 7) * 16 + magnitudes(0, 2, 4, 6)) |
         (signs(1, 3, 5, 7) & 0x80808080u) | (signs(0, 2, 4, 6) >> 4 & 0x08080808u);
}

// The same of signed steps.
__device__ __forceinline__ uint32_t nibbles_of_steps(const uint32_t (&w)[8]) {
  const auto upper = [&w](int a, int b) { return __byte_perm(w[a], w[b], 0x7632); };
  const uint32_t even[2] = {upper(0, 2), upper(4, 6)}, odd[2] = {upper(1, 3), upper(5, 7)};
  const auto codes = [](const uint32_t (&of)[2]) {
    return __byte_perm(of[0] * 4, of[1] * 4, 0x7531);
  };
  // Bytes of signs alone.
  const auto signs = [](const uint32_t (&of)[2]) {
    return tile::permute_bytes(of[0], of[1], 0xFDB9);
  };
  // NOTE: kept, so that two instructions do it.
  const uint32_t first = tile::keep((codes(odd) * 16 + codes(even)) | (signs(odd) & 0x80808080u));
  return first | (signs(even) & 0x08080808u);
}

// Both directions from one read, of bf16 to MXFP4; the columns alone are transformed.
Status quantize_both_randomly(const RandomParams& p, cudaStream_t stream);

}  // namespace te_mx::sm90
