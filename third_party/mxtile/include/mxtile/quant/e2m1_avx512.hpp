// Codes of E2M1 for AVX-512 (F, BW): numbers are rounded to odd bf16, of which the exponent, two
// bits of the significand and whether there are more find the code in a table.
#pragma once

#include "mxtile/quant/avx512.hpp"

namespace mxtile::quant::avx512 {

// By eighths of binades from 2^-3 on; an odd place is anywhere above the even one before it.
struct E2m1Table {
  alignas(64) uint16_t code[64];
};
constexpr E2m1Table make_e2m1_table() {
  E2m1Table t{};
  for (int i = 0; i < 64; ++i) {
    const int binade = 1 << (i / 8);  // in steps of 1/8, of which this counts 32nds
    const int value = 4 * binade + i % 8 / 2 * binade, above = i % 2;
    // Halfway between two codes, in the same steps: to the even one.
    const int halves[7] = {8, 24, 40, 56, 80, 112, 160};
    for (int j = 0; j < 7; ++j) {
      const bool up = value > halves[j] || (value == halves[j] && (j % 2 == 1 || above == 1));
      t.code[i] = static_cast<uint16_t>(t.code[i] + (up ? 1 : 0));
    }
  }
  return t;
}
inline constexpr E2m1Table kE2m1Table = make_e2m1_table();

// 32 codes with signs, one a word, of fp32 patterns; NaN and what is too large is +-6.
MXTILE_INLINE Vector e2m1_words(Vector low, Vector high) {
  constexpr uint32_t kLeast = 0x3E00, kMost = 0x40E0;  // 2^-3, 7
  const Vector odd = to_odd_bf16(low, high), all = magnitude(odd);
  const __mmask32 above = _mm512_test_epi16_mask(all, splat(0x1F));
  const Vector a = _mm512_min_epu16(max(all, splat(kLeast)), splat(kMost));
  const Vector place = _mm512_srli_epi16(_mm512_sub_epi16(a, splat(kLeast)), 4);
  // Where the eighth is odd, there is more than the quarter below it, too.
  const Vector at = _mm512_or_si512(place, _mm512_maskz_mov_epi16(above, splat(1)));
  const Vector code =
      _mm512_permutex2var_epi16(load(kE2m1Table.code), at, load(kE2m1Table.code + 32));
  // code | (sign & 8)
  return _mm512_ternarylogic_epi32(code, _mm512_srli_epi16(odd, 12), splat(8), 0xF8);
}

// Patterns times, or divided by, factors; zeros stay as they are.
template <bool divides>
MXTILE_INLINE Vector scaled_patterns(Vector x, __m512 factor) {
  const __m512 value = _mm512_castsi512_ps(x);
  const __mmask16 some = _mm512_test_epi32_mask(x, _mm512_set1_epi32(0x7FFFFFFF));
  return _mm512_castps_si512(divides ? _mm512_mask_div_ps(value, some, value, factor)
                                     : _mm512_mask_mul_ps(value, some, value, factor));
}

// Codes of zeros without a sign.
MXTILE_INLINE Vector unsigned_zeros(Vector codes, Vector low, Vector high) {
  const Vector odd = to_odd_bf16(low, high);
  return _mm512_maskz_mov_epi16(_mm512_test_epi16_mask(odd, splat(0x7FFF)), codes);
}

// The low words of 32 lanes.
MXTILE_INLINE Vector low_words(Vector low, Vector high) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(low)),
                            _mm512_cvtepi32_epi16(high), 1);
}

// 32 codes of words, two a byte.
MXTILE_INLINE void store_code_pairs(uint8_t* p, Vector codes) {
  const Vector pairs = _mm512_or_si512(codes, _mm512_srli_epi32(codes, 12));
  __m128i bytes = _mm512_cvtepi32_epi8(pairs);
  asm("" : "+v"(bytes));  // NOTE: as in narrowed()
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}

}  // namespace mxtile::quant::avx512
