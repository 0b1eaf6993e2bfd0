// Transforms, and rounding to MXFP4 by the random words of a place, for the kernels that transform
// or round stochastically.
#pragma once

#include "mxtile/sm90/random.cuh"
#include "quantize/quantize_launch.cuh"

namespace te_mx::sm90 {

struct RandomParams {
  QuantizeParams q;
  GroupTable groups;    // of none: rows are not grouped
  const int64_t* seed;  // null: to nearest even
  uint32_t first;       // number of x's first row, modulo 2^32
  int size;             // of the transform, 0 for none
  uint32_t signs;
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

// The magnitude of a code in byte 3, of a number times kToSteps, by its bits, and 16 random bits
// from bit 8 on. What is more than the largest code has to be clamped.
__device__ __forceinline__ uint32_t step_by_chance(uint32_t bits, uint32_t random) {
  return bits * 4 + random;
}
// The same to nearest even, of the sum of its bits when it is rounded down and when it is rounded
// up: 23 bits of fraction, the last one of which tells that there is more.
__device__ __forceinline__ uint32_t step_nearest(uint32_t down, uint32_t up) {
  const uint32_t sum = (down & 0x7FFFFFFFu) + (up & 0x7FFFFFFFu);
  return (sum + (sum >> 23 & 1)) * 2 + 0x7FFFFEu;
}

// Bytes 3 of eight words, at most 7, as nibbles.
__device__ __forceinline__ uint32_t nibbles_of(const uint32_t (&w)[8]) {
  const auto upper = [](uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    return __byte_perm(__byte_perm(a, b, 0x73), __byte_perm(c, d, 0x73), 0x5410);
  };
  return upper(w[1], w[3], w[5], w[7]) * 16 + upper(w[0], w[2], w[4], w[6]);
}

// Eight codes: magnitudes as nibbles, and in bit 3 of them signs, those of the first four from
// nibble 1 on, of the others from nibble 0 on, every other one. `first`, `rest`: the signs of four
// in bit 7 of bytes.
__device__ __forceinline__ uint32_t with_signs(uint32_t nibbles, uint32_t first, uint32_t rest) {
  const uint32_t signs = (first & 0xF0F0F0F0u) | (rest >> 4 & 0x0F0F0F0Fu);
  return (nibbles & 0x77777777u) | (signs & 0x88888888u);
}

// Codes of E4M3 of eight codes by a table of these for magnitudes.
__device__ __forceinline__ uint2 tile_codes(uint32_t codes, uint2 table) {
  const uint32_t magnitudes = codes & 0x77777777u;
  return {tile::permute_bytes(table.x, table.y, magnitudes) | (codes & 0x80808080u),
          tile::permute_bytes(table.x, table.y, magnitudes >> 16) | (codes << 4 & 0x80808080u)};
}

// Both directions from one read, of bf16 to MXFP4; the columns alone are transformed.
Status quantize_both_randomly(const RandomParams& p, cudaStream_t stream);

}  // namespace te_mx::sm90
