// Dequantization words for AVX-512 (F, BW). Codes become bf16 patterns, 32 at a time: all codes are
// bf16 numbers, and so are their products with the plain scales (decode_portable.hpp).
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "mxtile/mx/format.hpp"
#include "mxtile/mx/inline.hpp"

namespace mxtile::quant::avx512 {

// Codes whose bf16 pattern is no shift of the code, by the low five bits of the magnitude:
// subnormals first, Inf and NaN last.
template <class F>
MXTILE_INLINE __m512i odd_codes();
template <>
MXTILE_INLINE __m512i odd_codes<mx::E4M3>() {
  alignas(64) static constexpr uint16_t kTable[32] = {
      0, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60, 0, 0, 0, 0, 0, 0, 0, 0,
      0, 0,      0,      0,      0,      0,      0,      0,      0, 0, 0, 0, 0, 0, 0, 0x7FC0};
  return _mm512_load_si512(kTable);
}
template <>
MXTILE_INLINE __m512i odd_codes<mx::E5M2>() {
  alignas(64) static constexpr uint16_t kTable[32] = {
      0, 0x3780, 0x3800, 0x3840, 0, 0, 0, 0, 0, 0, 0, 0, 0,      0,      0,      0,
      0, 0,      0,      0,      0, 0, 0, 0, 0, 0, 0, 0, 0x7F80, 0x7FC0, 0x7FC0, 0x7FC0};
  return _mm512_load_si512(kTable);
}

// Plain scale bytes, one a lane or one for all, as what they add to a bf16 pattern.
MXTILE_INLINE __m512i scale_steps(const uint8_t* bytes) {
  const __m512i wide =
      _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes)));
  return _mm512_slli_epi16(_mm512_sub_epi16(wide, _mm512_set1_epi16(127)), 7);
}
MXTILE_INLINE __m512i scale_steps(uint32_t byte) {
  return _mm512_set1_epi16(static_cast<short>((byte - 127) << 7));
}

// Whether 32 bytes all lie in [low, high].
MXTILE_INLINE bool all_between(const uint8_t* bytes, uint32_t low, uint32_t high) {
  const __m256i v = _mm256_sub_epi8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes)),
                                    _mm256_set1_epi8(static_cast<char>(low)));
  return _mm256_cmpgt_epu8_mask(v, _mm256_set1_epi8(static_cast<char>(high - low))) == 0;
}

// 32 codes times their scales as bf16 patterns.
template <class F>
MXTILE_INLINE __m512i decode_32(const uint8_t* codes, __m512i steps) {
  constexpr int kUp = 7 - F::kMantissaBits;
  constexpr uint32_t kMinNormal = 1u << F::kMantissaBits;
  const __m512i code =
      _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
  const __m512i a = _mm512_and_si512(code, _mm512_set1_epi16(0x7F));
  const __m512i normal = _mm512_add_epi16(
      _mm512_slli_epi16(a, kUp), _mm512_set1_epi16(static_cast<short>((127 - F::kBias) << 7)));
  const __mmask32 odd = _mm512_cmpge_epu16_mask(_mm512_sub_epi16(a, _mm512_set1_epi16(kMinNormal)),
                                                _mm512_set1_epi16(F::kMaxCode + 1 - kMinNormal));
  const __m512i value = _mm512_mask_permutexvar_epi16(normal, odd, a, odd_codes<F>());
  // Zeros, Inf and NaN take no scale.
  const __mmask32 finite = _mm512_cmplt_epu16_mask(_mm512_sub_epi16(a, _mm512_set1_epi16(1)),
                                                   _mm512_set1_epi16(F::kMaxCode));
  const __m512i scaled = _mm512_mask_add_epi16(value, finite, value, steps);
  // scaled | (code << 8 & sign)
  return _mm512_ternarylogic_epi32(scaled, _mm512_slli_epi16(code, 8),
                                   _mm512_set1_epi16(static_cast<short>(0x8000)), 0xF8);
}

// The same of codes of four bits: all sixteen by table.
template <>
MXTILE_INLINE __m512i decode_32<mx::E2M1>(const uint8_t* codes, __m512i steps) {
  alignas(64) static constexpr uint16_t kTable[32] = {
      0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0,
      0x8000, 0xBF00, 0xBF80, 0xBFC0, 0xC000, 0xC040, 0xC080, 0xC0C0};
  const __m512i code =
      _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
  const __m512i value = _mm512_permutexvar_epi16(code, _mm512_load_si512(kTable));
  const __mmask32 nonzero = _mm512_test_epi16_mask(code, _mm512_set1_epi16(7));
  return _mm512_mask_add_epi16(value, nonzero, value, steps);
}

// 32 bf16 patterns as bf16, fp32 or fp16 (rounded to nearest even).
MXTILE_INLINE void store_bf16(uint16_t* p, __m512i v) { _mm512_storeu_si512(p, v); }
MXTILE_INLINE __m512i half_to_f32(__m512i v, int half) {
  const __m256i words = half ? _mm512_extracti64x4_epi64(v, 1) : _mm512_castsi512_si256(v);
  return _mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16);
}
MXTILE_INLINE void store_f32(uint32_t* p, __m512i v) {
  _mm512_storeu_si512(p, half_to_f32(v, 0));
  _mm512_storeu_si512(p + 16, half_to_f32(v, 1));
}
MXTILE_INLINE void store_f16(uint16_t* p, __m512i v) {
  for (int half = 0; half < 2; ++half) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 16 * half),
                        _mm512_cvtps_ph(_mm512_castsi512_ps(half_to_f32(v, half)),
                                        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
}

}  // namespace mxtile::quant::avx512
