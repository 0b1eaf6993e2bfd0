// The f32 vector words (see portable.hpp) with AVX2, FMA and F16C: eight lanes.
#pragma once

#include "mxtile/simd/portable.hpp"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include "mxtile/simd/intrinsics.hpp"

namespace mxtile::simd {

struct Avx2 {
  static constexpr int kLanes = 8;
  using F = __m256;
  using I = __m256i;

  MXTILE_WORD F set(float x) { return _mm256_set1_ps(x); }
  MXTILE_WORD I iset(int32_t x) { return _mm256_set1_epi32(x); }
  MXTILE_WORD F as_float(I x) { return _mm256_castsi256_ps(x); }
  MXTILE_WORD I as_int(F x) { return _mm256_castps_si256(x); }

  MXTILE_WORD F load(const float* p) { return _mm256_loadu_ps(p); }
  MXTILE_WORD void store(float* p, F x) { _mm256_storeu_ps(p, x); }
  MXTILE_WORD F load_part(const float* p, int n) { return _mm256_maskload_ps(p, first(n)); }
  MXTILE_WORD void store_part(float* p, F x, int n) { _mm256_maskstore_ps(p, first(n), x); }

  MXTILE_WORD F add(F a, F b) { return _mm256_add_ps(a, b); }
  MXTILE_WORD F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  MXTILE_WORD F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  MXTILE_WORD F div(F a, F b) { return _mm256_div_ps(a, b); }
  MXTILE_WORD F reciprocal(F x) { return div(set(1.0f), x); }
  MXTILE_WORD F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  MXTILE_WORD F max(F a, F b) { return _mm256_max_ps(a, b); }
  MXTILE_WORD F min(F a, F b) { return _mm256_min_ps(a, b); }
  MXTILE_WORD F select_lt(F a, F b, F x, F y) {
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
  }

  MXTILE_WORD I iadd(I a, I b) { return _mm256_add_epi32(a, b); }
  MXTILE_WORD I isub(I a, I b) { return _mm256_sub_epi32(a, b); }
  MXTILE_WORD I iand(I a, I b) { return _mm256_and_si256(a, b); }
  MXTILE_WORD I ior(I a, I b) { return _mm256_or_si256(a, b); }
  template <int N>
  MXTILE_WORD I shl(I a) {
    return _mm256_slli_epi32(a, N);
  }
  template <int N>
  MXTILE_WORD I shr(I a) {
    return _mm256_srli_epi32(a, N);
  }
  template <int N>
  MXTILE_WORD I sar(I a) {
    return _mm256_srai_epi32(a, N);
  }
  MXTILE_WORD I select_gt(I a, I b, I x, I y) {
    return _mm256_blendv_epi8(y, x, _mm256_cmpgt_epi32(a, b));
  }

  MXTILE_WORD I load_u8(const uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  MXTILE_WORD I load_u16(const uint16_t* p) { return _mm256_cvtepu16_epi32(load_128(p)); }
  MXTILE_WORD I load_u16_part(const uint16_t* p, int n) {
    return _mm256_cvtepu16_epi32(load_128_part(p, n));
  }
  MXTILE_WORD void store_u16(uint16_t* p, I x) { store_128(p, narrow(x)); }
  MXTILE_WORD void store_u16_part(uint16_t* p, I x, int n) { store_128_part(p, narrow(x), n); }
  MXTILE_WORD F load_f16(const uint16_t* p) { return _mm256_cvtph_ps(load_128(p)); }
  MXTILE_WORD F load_f16_part(const uint16_t* p, int n) {
    return _mm256_cvtph_ps(load_128_part(p, n));
  }
  MXTILE_WORD void store_f16(uint16_t* p, F x) {
    store_128(p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
  MXTILE_WORD void store_f16_part(uint16_t* p, F x, int n) {
    store_128_part(p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT), n);
  }

  MXTILE_WORD void zip(F a, F b, F& low, F& high) {
    const F x = _mm256_unpacklo_ps(a, b), y = _mm256_unpackhi_ps(a, b);
    low = _mm256_permute2f128_ps(x, y, 0x20);
    high = _mm256_permute2f128_ps(x, y, 0x31);
  }

  MXTILE_WORD F scale2(F x, I k) {
    k = _mm256_max_epi32(_mm256_min_epi32(k, iset(800)), iset(-800));
    const __m128 low = _mm256_cvtpd_ps(_mm256_mul_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(x)),
                                                     power(_mm256_castsi256_si128(k))));
    const __m128 high = _mm256_cvtpd_ps(_mm256_mul_pd(_mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)),
                                                      power(_mm256_extracti128_si256(k, 1))));
    return _mm256_insertf128_ps(_mm256_castps128_ps256(low), high, 1);
  }

 private:
  // All ones in the first n lanes.
  MXTILE_WORD I first(int n) {
    return _mm256_cmpgt_epi32(iset(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  MXTILE_WORD __m128i load_128(const uint16_t* p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  }
  MXTILE_WORD void store_128(uint16_t* p, __m128i x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), x);
  }
  MXTILE_WORD __m128i load_128_part(const uint16_t* p, int n) {
    alignas(16) uint16_t lanes[8] = {};
    for (int i = 0; i < n; ++i) lanes[i] = p[i];
    return load_128(lanes);
  }
  MXTILE_WORD void store_128_part(uint16_t* p, __m128i x, int n) {
    alignas(16) uint16_t lanes[8];
    store_128(lanes, x);
    for (int i = 0; i < n; ++i) p[i] = lanes[i];
  }
  MXTILE_WORD __m128i narrow(I x) {
    x = _mm256_and_si256(x, iset(0xffff));
    return _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  }
  MXTILE_WORD __m256d power(__m128i k) {
    const __m256i biased = _mm256_add_epi64(_mm256_cvtepi32_epi64(k), _mm256_set1_epi64x(1023));
    return _mm256_castsi256_pd(_mm256_slli_epi64(biased, 52));
  }
};

}  // namespace mxtile::simd

#endif
