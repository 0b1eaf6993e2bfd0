// A block of codes by byte look-up (AVX2): both bytes of the upper half of each value, which is all
// of it, made for 32 codes at once. Included by decode.hpp.
#pragma once

#include "mxtile/mx/code.hpp"
#include "mxtile/simd/avx2.hpp"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

namespace mxtile::simd {

// What both decoders below are made of.
struct Avx2Bytes {
  MXTILE_WORD __m256i table(const uint8_t (&bytes)[16]) {
    return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)));
  }
  MXTILE_WORD void store_pairs(__m256i words, float factor, float* out) {
    const __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
    const __m256 odd = _mm256_castsi256_ps(
        _mm256_and_si256(words, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
    const __m256 scale = _mm256_set1_ps(factor);
    _mm256_storeu_ps(out, _mm256_mul_ps(even, scale));
    _mm256_storeu_ps(out + 8, _mm256_mul_ps(odd, scale));
  }
};

template <class F>
struct BlockDecoder<Avx2, F> : private Avx2Bytes {
  // Unpacking works within halves of a register and on pairs: see run().
  MXTILE_WORD constexpr int element(int position) {
    return position / 4 % 2 * 16 + position / 16 * 8 + position % 4 * 2 + position / 8 % 2;
  }

  MXTILE_WORD void run(const uint8_t* codes, float factor, float* out) {
    const __m256i code = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
    const __m256i magnitude = _mm256_and_si256(code, byte(0x7f));
    // Normal codes: the exponent's upper bits by table, its last bit and the mantissa by a shift.
    const __m256i eighth = _mm256_and_si256(_mm256_srli_epi16(code, 3), byte(0x0f));
    __m256i high = _mm256_shuffle_epi8(table(kTables.high), eighth);
    __m256i low = _mm256_and_si256(_mm256_slli_epi16(code, kLowShift), byte(0xff << kLowShift));
    // Subnormal codes, all below 8: by table.
    const __m256i subnormal = _mm256_cmpgt_epi8(byte(1 << F::kMantissaBits), magnitude);
    const __m256i index = _mm256_and_si256(code, byte(0x0f));
    high = _mm256_blendv_epi8(high, _mm256_shuffle_epi8(table(kTables.subnormal_high), index),
                              subnormal);
    low = _mm256_blendv_epi8(low, _mm256_shuffle_epi8(table(kTables.subnormal_low), index),
                             subnormal);
    // Infinity and NaN: an exponent of all ones. The code of a negative zero has no mantissa yet.
    const __m256i special = F::kHasNegativeZero
                                ? _mm256_cmpgt_epi8(magnitude, byte(static_cast<int>(F::kMaxCode)))
                                : _mm256_cmpeq_epi8(code, byte(0x80));
    high = _mm256_or_si256(high, _mm256_and_si256(special, byte(0x7f)));
    low = _mm256_or_si256(low, _mm256_and_si256(special, byte(F::kHasNegativeZero ? 0x80 : 0xc0)));
    high = _mm256_or_si256(high, _mm256_and_si256(code, byte(0x80)));
    if constexpr (kTwice != 0) factor *= 0.5f;
    store_pairs(_mm256_unpacklo_epi8(low, high), factor, out);
    store_pairs(_mm256_unpackhi_epi8(low, high), factor, out + 16);
  }

 private:
  static constexpr int kLowShift = 7 - F::kMantissaBits;
  // The last bit of the exponent comes from the code, which an odd bias would turn: such elements
  // are decoded as twice their value.
  static constexpr int kTwice = (127 - F::kBias) % 2;
  struct Tables {
    alignas(16) uint8_t high[16], subnormal_high[16], subnormal_low[16];
    constexpr Tables() : high{}, subnormal_high{}, subnormal_low{} {
      for (int i = 0; i < 16; ++i) {
        const int exponent = (i << 3 >> F::kMantissaBits) + 127 - F::kBias + kTwice;
        const uint32_t bits = mx::decode<F>(static_cast<uint8_t>(i), 127 + kTwice);
        high[i] = static_cast<uint8_t>(exponent >> 1);
        subnormal_high[i] = static_cast<uint8_t>(bits >> 24);
        subnormal_low[i] = static_cast<uint8_t>(bits >> 16);
      }
    }
  };
  static constexpr Tables kTables{};

  MXTILE_WORD __m256i byte(int x) { return _mm256_set1_epi8(static_cast<char>(x)); }
};

struct NibbleBytes {
  alignas(16) uint8_t high[16], low[16];
  constexpr NibbleBytes() : high{}, low{} {
    for (int i = 0; i < 16; ++i) {
      const uint32_t bits = mx::decode<mx::E2M1>(static_cast<uint8_t>(i), 127);
      high[i] = static_cast<uint8_t>(bits >> 24);
      low[i] = static_cast<uint8_t>(bits >> 16);
    }
  }
};
inline constexpr NibbleBytes kNibbleBytes{};

// Codes of four bits: both bytes from tables of their own. In the same order, so that sums over
// decoded blocks of two elements meet.
template <>
struct BlockDecoder<Avx2, mx::E2M1> : private Avx2Bytes {
  MXTILE_WORD constexpr int element(int position) {
    return BlockDecoder<Avx2, mx::E4M3>::element(position);
  }

  MXTILE_WORD void run(const uint8_t* codes, float factor, float* out) {
    const __m256i code = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
    const __m256i high = _mm256_shuffle_epi8(table(kNibbleBytes.high), code);
    const __m256i low = _mm256_shuffle_epi8(table(kNibbleBytes.low), code);
    store_pairs(_mm256_unpacklo_epi8(low, high), factor, out);
    store_pairs(_mm256_unpackhi_epi8(low, high), factor, out + 16);
  }
};

}  // namespace mxtile::simd

#endif
