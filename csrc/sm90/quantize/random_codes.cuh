// Rounding to MXFP4 by the random words of an element's number, for the kernels that transform or
// round stochastically.
#pragma once

#include "mxtile/sm90/random.cuh"
#include "quantize/quantize_launch.cuh"

namespace te_mx::sm90 {

struct RandomParams {
  QuantizeParams q;
  const int64_t* seed;  // null: to nearest even
  int64_t first;        // number of x's first element
  int size;             // of the transform, 0 for none
  uint32_t signs;
};

__device__ __forceinline__ uint2 key_of(const int64_t* seed) {
  const uint64_t key = static_cast<uint64_t>(__ldg(seed));
  return make_uint2(static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32));
}

// Codes of E4M3 of eight numbers, of which two neighbours are rounded by each of `by`, up where
// `chances` say so.
__device__ __forceinline__ uint2 random_codes(const uint2 (&x)[4], const tile::Fp4Rounding& r0,
                                              const tile::Fp4Rounding& r1,
                                              const tile::Fp4Rounding& r2,
                                              const tile::Fp4Rounding& r3,
                                              const float (&chances)[8]) {
  const tile::Fp4Rounding* const by[4] = {&r0, &r1, &r2, &r3};
  float v[8];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float2 scaled = Input<float>::scaled(x[j], by[j]->factor);
    v[2 * j] = tile::round_to_fp4(scaled.x, by[j]->magic << 16, chances[2 * j]);
    v[2 * j + 1] = tile::round_to_fp4(scaled.y, by[j]->magic, chances[2 * j + 1]);
  }
  return {tile::fp8x4<tile::Fp8::e4m3>(v[0], v[1], v[2], v[3]),
          tile::fp8x4<tile::Fp8::e4m3>(v[4], v[5], v[6], v[7])};
}

// The chances of eight neighbours by their random words.
template <int kUnroll>
__device__ __forceinline__ void draw(float (&chances)[8], uint64_t number, uint2 key) {
  const tile::EightWords<kUnroll> words(number, key);
#pragma unroll
  for (int j = 0; j < 8; ++j) chances[j] = tile::fp4_chance(words.of[j]);
}

// Both directions from one read, of bf16 to MXFP4; the columns alone are transformed.
Status quantize_both_randomly(const RandomParams& p, cudaStream_t stream);

}  // namespace te_mx::sm90
