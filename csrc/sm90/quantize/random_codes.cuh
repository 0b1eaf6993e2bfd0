// Rounding to MXFP4 by the random words of an element's number, for the kernels that transform or
// round stochastically.
#pragma once

#include "mxtile/sm90/random.cuh"
#include "quantize/quantize_launch.cuh"

namespace te_mx::sm90 {

struct RandomParams {
  QuantizeParams q;
  GroupTable groups;    // of none: rows are not grouped
  const int64_t* seed;  // null: to nearest even
  int64_t first;        // number of x's first element
  int size;             // of the transform, 0 for none
  uint32_t signs;
};

__device__ __forceinline__ uint2 key_of(const int64_t* seed) {
  const uint64_t key = static_cast<uint64_t>(__ldg(seed));
  return make_uint2(static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32));
}

// A number that was multiplied by the factor, rounded to FP4 with the magic of its block in the
// upper half (fp4.cuh): up where what lies behind the whole steps between numbers is more, in 2^-24
// of a step, than the upper 24 bits of a random word. `more`: 2^24 - 1 less these, which in 2^-24
// of a step reach the next one just then.
__device__ __forceinline__ float round_by_chance(float scaled, uint32_t upper_magic, float more) {
  const uint32_t own = upper_magic & 0xFFFF0000u;
  const float a = tile::clamp_magnitude(scaled, __uint_as_float(own - 0x02000000u));
  // A step is half the binade, at least 2^(d - 1); adding 1.5 * 2^23 of them cuts off what lies
  // behind whole ones, and so does nothing before it that rounds towards zero.
  const uint32_t bits = max((__float_as_uint(a) & 0x7F800000u) + 0x0B400000u, own + 0x08000000u);
  const float magic = __uint_as_float(bits), part = __uint_as_float(bits - 0x17C00000u);
  const float reached = __fadd_rz(fabsf(a), __fmul_rn(more, part));
  return copysignf(__fsub_rn(__fadd_rz(reached, magic), magic), scaled);
}

// Codes of E4M3 of eight numbers, of which two neighbours are rounded by each of `by`, up where
// chance has it.
__device__ __forceinline__ uint2 random_codes(const uint2 (&x)[4], const tile::Fp4Rounding& r0,
                                              const tile::Fp4Rounding& r1,
                                              const tile::Fp4Rounding& r2,
                                              const tile::Fp4Rounding& r3, const float (&more)[8]) {
  const tile::Fp4Rounding* const by[4] = {&r0, &r1, &r2, &r3};
  float v[8];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float2 scaled = Input<float>::scaled(x[j], by[j]->factor);
    v[2 * j] = round_by_chance(scaled.x, by[j]->magic << 16, more[2 * j]);
    v[2 * j + 1] = round_by_chance(scaled.y, by[j]->magic, more[2 * j + 1]);
  }
  return {tile::fp8x4<tile::Fp8::e4m3>(v[0], v[1], v[2], v[3]),
          tile::fp8x4<tile::Fp8::e4m3>(v[4], v[5], v[6], v[7])};
}

// What the random words of eight neighbours add.
template <int kUnroll>
__device__ __forceinline__ void draw(float (&more)[8], uint64_t number, uint2 key) {
  const tile::EightWords<kUnroll> words(number, key);
#pragma unroll
  for (int j = 0; j < 8; ++j) more[j] = __uint2float_rn(~words.of[j] >> 8);
}

// Both directions from one read, of bf16 to MXFP4; the columns alone are transformed.
Status quantize_both_randomly(const RandomParams& p, cudaStream_t stream);

}  // namespace te_mx::sm90
