// The largest and smallest scale byte of rows, 64 bytes at a time.
#include "gemm/row_exponents.hpp"
#include "mxtile/simd/intrinsics.hpp"

namespace te_mx::cpu {
namespace {

// The smallest of 64 bytes.
inline uint8_t smallest_of(__m512i v) {
  const __m256i half = _mm256_min_epu8(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
  __m128i x = _mm_min_epu8(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  x = _mm_min_epu8(x, _mm_srli_epi16(x, 8));
  return static_cast<uint8_t>(
      _mm_extract_epi8(_mm_minpos_epu16(_mm_and_si128(x, _mm_set1_epi16(255))), 0));
}

}  // namespace

void scan_scales_avx512(const uint8_t* scales, int64_t stride, int64_t rows, int64_t blocks,
                        uint8_t* largest, uint8_t* smallest) {
  const __m512i ones = _mm512_set1_epi8(-1);
  const __mmask64 last = ~uint64_t{0} >> ((64 - blocks % 64) % 64);
  for (int64_t r = 0; r < rows; ++r, scales += stride) {
    __m512i high = _mm512_setzero_si512(), low = ones;
    for (int64_t b = 0; b < blocks; b += 64) {
      // What is past the end is NaN, which counts as nothing.
      const __mmask64 there = b + 64 < blocks ? ~uint64_t{0} : last;
      const __m512i bytes = _mm512_mask_loadu_epi8(ones, there, scales + b);
      high = _mm512_max_epu8(high, _mm512_sub_epi8(bytes, ones));  // 255 becomes 0
      low = _mm512_min_epu8(low, bytes);
    }
    largest[r] = static_cast<uint8_t>(~smallest_of(_mm512_xor_si512(high, ones)));
    smallest[r] = smallest_of(low);
  }
}

}  // namespace te_mx::cpu
