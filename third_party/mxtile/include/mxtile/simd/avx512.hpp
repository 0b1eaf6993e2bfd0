// The f32 vector words (see portable.hpp) with AVX-512 F, BW, DQ and VL: sixteen lanes.
#pragma once

#include "mxtile/simd/portable.hpp"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

#include "mxtile/simd/intrinsics.hpp"

namespace mxtile::simd {

struct Avx512 {
  static constexpr int kLanes = 16;
  using F = __m512;
  using I = __m512i;

  MXTILE_WORD F set(float x) { return _mm512_set1_ps(x); }
  MXTILE_WORD I iset(int32_t x) { return _mm512_set1_epi32(x); }
  MXTILE_WORD F as_float(I x) { return _mm512_castsi512_ps(x); }
  MXTILE_WORD I as_int(F x) { return _mm512_castps_si512(x); }

  MXTILE_WORD F load(const float* p) { return _mm512_loadu_ps(p); }
  MXTILE_WORD void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  MXTILE_WORD F load_part(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
  MXTILE_WORD void store_part(float* p, F x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }

  MXTILE_WORD F add(F a, F b) { return _mm512_add_ps(a, b); }
  MXTILE_WORD F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  MXTILE_WORD F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  MXTILE_WORD F div(F a, F b) { return _mm512_div_ps(a, b); }
  // A 14-bit guess and a Newton step: within an ulp, and a third of the time of a division.
  MXTILE_WORD F reciprocal(F x) {
    const F guess = _mm512_rcp14_ps(x);
    return _mm512_fmadd_ps(guess, _mm512_fnmadd_ps(x, guess, set(1.0f)), guess);
  }
  MXTILE_WORD F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  MXTILE_WORD F max(F a, F b) { return _mm512_max_ps(a, b); }
  MXTILE_WORD F min(F a, F b) { return _mm512_min_ps(a, b); }
  MXTILE_WORD F select_lt(F a, F b, F x, F y) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
  }

  MXTILE_WORD I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
  MXTILE_WORD I isub(I a, I b) { return _mm512_sub_epi32(a, b); }
  MXTILE_WORD I iand(I a, I b) { return _mm512_and_si512(a, b); }
  MXTILE_WORD I ior(I a, I b) { return _mm512_or_si512(a, b); }
  template <int N>
  MXTILE_WORD I shl(I a) {
    return _mm512_slli_epi32(a, N);
  }
  template <int N>
  MXTILE_WORD I shr(I a) {
    return _mm512_srli_epi32(a, N);
  }
  template <int N>
  MXTILE_WORD I sar(I a) {
    return _mm512_srai_epi32(a, N);
  }
  MXTILE_WORD I select_gt(I a, I b, I x, I y) {
    return _mm512_mask_blend_epi32(_mm512_cmpgt_epi32_mask(a, b), y, x);
  }

  MXTILE_WORD I load_u8(const uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  MXTILE_WORD I load_u16(const uint16_t* p) { return _mm512_cvtepu16_epi32(load_256(p)); }
  MXTILE_WORD I load_u16_part(const uint16_t* p, int n) {
    return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(n), p));
  }
  MXTILE_WORD void store_u16(uint16_t* p, I x) { store_256(p, _mm512_cvtepi32_epi16(x)); }
  MXTILE_WORD void store_u16_part(uint16_t* p, I x, int n) {
    _mm256_mask_storeu_epi16(p, first(n), _mm512_cvtepi32_epi16(x));
  }
  MXTILE_WORD F load_f16(const uint16_t* p) { return _mm512_cvtph_ps(load_256(p)); }
  MXTILE_WORD F load_f16_part(const uint16_t* p, int n) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p));
  }
  MXTILE_WORD void store_f16(uint16_t* p, F x) {
    store_256(p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
  MXTILE_WORD void store_f16_part(uint16_t* p, F x, int n) {
    _mm256_mask_storeu_epi16(p, first(n), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }

  MXTILE_WORD void zip(F a, F b, F& low, F& high) {
    const I low_from = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const F first = a;
    low = _mm512_permutex2var_ps(first, low_from, b);
    high = _mm512_permutex2var_ps(first, _mm512_add_epi32(low_from, iset(8)), b);
  }

  // See convert.hpp: what is no number comes from x with its quiet bit, the rest is rounded.
  MXTILE_WORD I bf16_high(F x) {
    const I bits = as_int(x), up = iadd(bits, iset(0x7fff));
    const I even =
        _mm512_mask_add_epi32(up, _mm512_test_epi32_mask(bits, iset(0x10000)), up, iset(1));
    return as_int(_mm512_fixupimm_ps(as_float(even), x, iset(0x22), 0));
  }

  // Two vectors of 16-bit values in 32-bit lanes as one cache line.
  MXTILE_WORD void store_u16_line(uint16_t* p, I low, I high) {
    _mm512_storeu_si512(p, line(low, high));
  }
  // A whole cache line each, p aligned to it, without reading it first; fence_stores() orders them.
  MXTILE_WORD void store_past_caches(float* p, F x) { _mm512_stream_ps(p, x); }
  MXTILE_WORD void store_u16_past_caches(uint16_t* p, I low, I high) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(p), line(low, high));
  }
  MXTILE_WORD void fence_stores() { _mm_sfence(); }

  // x * 2^n of an integer n, rounded once.
  MXTILE_WORD F scale_by(F x, F n) { return _mm512_scalef_ps(x, n); }
  MXTILE_WORD F scale2(F x, I k) { return _mm512_scalef_ps(x, _mm512_cvtepi32_ps(k)); }

 private:
  MXTILE_WORD __m512i line(I low, I high) {
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    return _mm512_permutexvar_epi64(order, _mm512_packus_epi32(low, high));
  }
  MXTILE_WORD __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
  MXTILE_WORD __m256i load_256(const uint16_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  MXTILE_WORD void store_256(uint16_t* p, __m256i x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x);
  }
};

}  // namespace mxtile::simd

#endif
