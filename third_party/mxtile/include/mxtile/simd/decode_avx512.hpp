// A block of codes by word look-up (AVX-512 BW): the table holds the upper half of each positive
// value, which is all of it. Included by decode.hpp.
#pragma once

#include "mxtile/mx/code.hpp"
#include "mxtile/simd/avx512.hpp"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

namespace mxtile::simd {

template <class F>
struct BlockDecoder<Avx512, F> {
  // Even elements first, then the odd ones.
  MXTILE_WORD constexpr int element(int position) { return position % 16 * 2 + position / 16; }

  MXTILE_WORD void run(const uint8_t* codes, float factor, float* out) {
    const __m512i x =
        _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
    if constexpr (F::kBits < 6) {  // signs are in the table, of which a part will do
      return store(_mm512_permutexvar_epi16(x, part(0)), factor, out);
    }
    const __m512i low = _mm512_permutex2var_epi16(part(0), x, part(1));   // codes 0x00 .. 0x3f
    const __m512i high = _mm512_permutex2var_epi16(part(2), x, part(3));  // codes 0x40 .. 0x7f
    const __mmask32 is_high = _mm512_test_epi16_mask(x, _mm512_set1_epi16(0x40));
    constexpr int kOrAnd = 0xF8;  // a | (b & c)
    __m512i value = _mm512_ternarylogic_epi32(
        _mm512_mask_blend_epi16(is_high, low, high), _mm512_slli_epi16(x, 8),
        _mm512_set1_epi16(static_cast<int16_t>(-0x8000)), kOrAnd);
    if constexpr (!F::kHasNegativeZero) {  // whose code is NaN
      const __mmask32 nan = _mm512_cmpeq_epi16_mask(x, _mm512_set1_epi16(0x80));
      value = _mm512_mask_set1_epi16(value, nan, 0x7fc0);
    }
    store(value, factor, out);
  }

 private:
  MXTILE_WORD void store(__m512i value, float factor, float* out) {
    const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(value, 16));
    const __m512 odd = _mm512_castsi512_ps(
        _mm512_and_si512(value, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
    const __m512 scale = _mm512_set1_ps(factor);
    _mm512_storeu_ps(out, _mm512_mul_ps(even, scale));
    _mm512_storeu_ps(out + 16, _mm512_mul_ps(odd, scale));
  }
  struct Table {
    alignas(64) uint16_t half[128];
    constexpr Table() : half{} {
      for (int code = 0; code < 128; ++code) {
        half[code] = static_cast<uint16_t>(mx::decode<F>(static_cast<uint8_t>(code), 127) >> 16);
      }
    }
  };
  static constexpr Table kTable{};
  MXTILE_WORD __m512i part(int i) { return _mm512_load_si512(kTable.half + 32 * i); }
};

}  // namespace mxtile::simd

#endif
