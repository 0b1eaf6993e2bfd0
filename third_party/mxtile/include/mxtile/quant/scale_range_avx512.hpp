// The range of the scale bytes of a row, 64 at a time. Include only from files compiled for AVX-512
// with BW.
#pragma once

#include <cstdint>

#include "mxtile/simd/intrinsics.hpp"

namespace mxtile::quant::avx512 {

// The smallest of 64 bytes.
__attribute__((always_inline)) static inline uint8_t smallest_byte(__m512i v) {
  const __m256i half = _mm256_min_epu8(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
  __m128i x = _mm_min_epu8(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  x = _mm_and_si128(_mm_min_epu8(x, _mm_srli_epi16(x, 8)), _mm_set1_epi16(255));
  return static_cast<uint8_t>(_mm_extract_epi8(_mm_minpos_epu16(x), 0));
}

// 255 (NaN) counts as nothing for both, so a row of nothing else gives 0 and 255.
struct ScaleRange {
  uint8_t largest_plus_one, smallest;
};

// Of count bytes, one or more.
__attribute__((always_inline)) static inline ScaleRange scale_range_of(const uint8_t* bytes,
                                                                       int64_t count) {
  const __m512i ones = _mm512_set1_epi8(-1);
  __m512i high = _mm512_setzero_si512(), low = ones;
  for (int64_t i = 0; i < count; i += 64) {
    // What is past the end is NaN.
    const int64_t left = count - i;
    const __mmask64 there = left < 64 ? (uint64_t{1} << left) - 1 : ~uint64_t{0};
    const __m512i v = _mm512_mask_loadu_epi8(ones, there, bytes + i);
    high = _mm512_max_epu8(high, _mm512_sub_epi8(v, ones));  // 255 becomes 0
    low = _mm512_min_epu8(low, v);
  }
  const uint8_t below = smallest_byte(_mm512_xor_si512(high, ones));
  return {static_cast<uint8_t>(~below), smallest_byte(low)};
}

}  // namespace mxtile::quant::avx512
