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

// To nearest even, as sums with what cuts them off at a step: of a number v in units of which there
// are kHalf in the smallest code, 2^(2 - the bits of fraction), the sum with 2, or with as many
// steps as there are in 2 where those are larger. Its last bits count steps, and twice the bits of
// its exponent above 128 are the codes below those.
// Of fp32: the code in byte 0.
inline constexpr float kToNearest = 0x1p-21f;
__device__ __forceinline__ uint32_t step_nearest(float v) {
  const uint32_t magic =
      max((__float_as_uint(v) & 0x7F800000u) + (22u << 23), __float_as_uint(2.0f));
  const uint32_t sum = __float_as_uint(__fadd_rn(fabsf(v), __uint_as_float(magic)));
  return sum + (sum >> 22);
}
// Of two bf16 numbers times a factor, which has kToNearestBf16 in it: codes in the lower
// halves of bytes 0 and 2.
inline constexpr float kToNearestBf16 = 0x1p-5f;
__device__ __forceinline__ uint32_t steps_nearest(uint32_t x, __nv_bfloat162 factor) {
  const auto bf16 = [](uint32_t bits) { return *reinterpret_cast<const __nv_bfloat162*>(&bits); };
  const auto bits_of = [](__nv_bfloat162 v) { return *reinterpret_cast<const uint32_t*>(&v); };
  const uint32_t scaled = bits_of(__hmul2(bf16(x), factor));
  const uint32_t magic = __vmaxu2((scaled & 0x7F807F80u) + 0x03000300u, 0x40004000u);
  const uint32_t sum = bits_of(__hfma2(bf16(x), factor, bf16(magic | (x & 0x80008000u))));
  return sum + (sum >> 6);
}

// Byte kByte, at most 127, of two words or of four.
template <int kByte>
__device__ __forceinline__ uint32_t two_bytes(uint32_t a, uint32_t b) {
  return tile::permute_bytes(a, b, 0xCC40u + kByte * 0x1111u);
}
template <int kByte>
__device__ __forceinline__ uint32_t four_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return __byte_perm(two_bytes<kByte>(a, b), two_bytes<kByte>(c, d), 0x5410);
}

// Eight codes as plain rows have them, the first in the lowest bits, of magnitudes in bytes kByte
// and the signs of fp32 numbers.
template <int kByte>
__device__ __forceinline__ uint32_t nibbles_of(const uint32_t (&w)[8], const float (&v)[8]) {
  const auto sign = [&v](int a, int b, int c, int d) {
    const auto bits = [&v](int i) { return __float_as_uint(v[i]); };
    return __byte_perm(__byte_perm(bits(a), bits(b), 0x73), __byte_perm(bits(c), bits(d), 0x73),
                       0x5410);
  };
  const uint32_t magnitudes =
      four_bytes<kByte>(w[1], w[3], w[5], w[7]) * 16 + four_bytes<kByte>(w[0], w[2], w[4], w[6]);
  return magnitudes | (sign(1, 3, 5, 7) & 0x80808080u) | (sign(0, 2, 4, 6) >> 4 & 0x08080808u);
}

// Both directions from one read, of bf16 to MXFP4; the columns alone are transformed.
Status quantize_both_randomly(const RandomParams& p, cudaStream_t stream);

}  // namespace te_mx::sm90
