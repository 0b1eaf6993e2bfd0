// Quantization words for AVX-512 (F, BW, DQ, VL; VBMI where the file is compiled for it).
//
// Every input becomes 32 words of bf16. fp32 and fp16 are rounded to odd: what does not fit sets
// the last bit. bf16 keeps four bits more than a code, so the code is the one of the exact value,
// and so is the scale: whether a significand exceeds that of the largest
// value shows. All arithmetic is on integers; no
// floating-point mode matters. From words come codes: with the sign shifted out, the pattern less
// the pattern of the scale, moved up until the code's seven bits fill the high byte, is the code
// with its rounding bits in the low byte. A subnormal code is the significand shifted right
// instead.
#pragma once

#include <cstdint>

#include "mxtile/mx/format.hpp"
#include "mxtile/mx/inline.hpp"
#include "mxtile/mx/scale.hpp"
#include "mxtile/simd/intrinsics.hpp"

namespace mxtile::quant::avx512 {

using Vector = __m512i;
inline constexpr int kWords = 32;  // in a vector

MXTILE_INLINE Vector load(const void* p) { return _mm512_loadu_si512(p); }
// The first n words, and zeros.
MXTILE_INLINE Vector load_words(const uint16_t* p, int n) {
  return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << n) - 1), p);
}
MXTILE_INLINE void store(void* p, Vector v) { _mm512_storeu_si512(p, v); }
MXTILE_INLINE void store_past_caches(void* p, Vector v) {
  _mm512_stream_si512(static_cast<__m512i*>(p), v);
}
MXTILE_INLINE void fence_stores() { _mm_sfence(); }
MXTILE_INLINE void prefetch(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1);
}
MXTILE_INLINE Vector zero() { return _mm512_setzero_si512(); }
MXTILE_INLINE Vector splat(uint32_t word) { return _mm512_set1_epi16(static_cast<short>(word)); }
MXTILE_INLINE Vector max(Vector a, Vector b) { return _mm512_max_epu16(a, b); }
MXTILE_INLINE Vector magnitude(Vector x) { return _mm512_and_si512(x, splat(0x7FFF)); }

// 32 fp32 patterns as bf16, rounded to odd.
MXTILE_INLINE Vector to_odd_bf16(Vector low, Vector high) {
  alignas(64) static constexpr uint16_t kEven[32] = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20,
                                                     22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 42,
                                                     44, 46, 48, 50, 52, 54, 56, 58, 60, 62};
  const Vector even = _mm512_load_si512(kEven);
  const Vector odd = _mm512_add_epi16(even, splat(1));
  const Vector top = _mm512_permutex2var_epi16(low, odd, high);
  const Vector rest = _mm512_permutex2var_epi16(low, even, high);
  return _mm512_or_si512(top, _mm512_min_epu16(rest, splat(1)));
}

// 16 fp16 values as fp32 patterns: exact, subnormals too, in any mode.
MXTILE_INLINE Vector f16_to_f32(const uint16_t* p) {
  return _mm512_castps_si512(
      _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
}

// Running fp32 sums of 64 columns, over fp32 patterns.
struct Sums {
  __m512 v[4];

  MXTILE_INLINE void load(const float* p) {
    for (int i = 0; i < 4; ++i) v[i] = _mm512_loadu_ps(p + 16 * i);
  }
  MXTILE_INLINE void store(float* p) const {
    for (int i = 0; i < 4; ++i) _mm512_storeu_ps(p + 16 * i, v[i]);
  }
  MXTILE_INLINE void add(int i, Vector x) { v[i] = _mm512_add_ps(v[i], _mm512_castsi512_ps(x)); }
};

// Half 0 or 1 of 32 bf16 words as fp32 patterns.
MXTILE_INLINE Vector bf16_to_f32(Vector x, int half) {
  const __m256i words = half ? _mm512_extracti64x4_epi64(x, 1) : _mm512_castsi512_si256(x);
  return _mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16);
}

// Row maxima, without reducing one row at a time. fold_words, fold_pairs and fold_fours each merge
// two partly reduced vectors, words of both alternating in groups of 1, 2, 4: after three levels
// each 128 bits hold one word for each of 8 rows. fold_quarters merges four such, to a word a row.
MXTILE_INLINE Vector fold_words(Vector a, Vector b) {
  return max(_mm512_unpacklo_epi16(a, b), _mm512_unpackhi_epi16(a, b));
}
MXTILE_INLINE Vector fold_pairs(Vector a, Vector b) {
  return max(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
}
MXTILE_INLINE Vector fold_fours(Vector a, Vector b) {
  return max(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
}
MXTILE_INLINE Vector fold_quarters(Vector a, Vector b, Vector c, Vector d) {
  const Vector ab = max(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xDD));
  const Vector cd = max(_mm512_shuffle_i32x4(c, d, 0x88), _mm512_shuffle_i32x4(c, d, 0xDD));
  return max(_mm512_shuffle_i32x4(ab, cd, 0x88), _mm512_shuffle_i32x4(ab, cd, 0xDD));
}

// What encode() needs of a scale, a word for every element.
struct Scale {
  Vector base;   // the pattern of an element whose code has exponent 0, moved up
  Vector least;  // exponent of the elements whose codes have exponent 1: below, they are subnormal
};

struct Scales {
  Vector byte;
  Scale scale;
  bool exact_needed;  // some block is not finite, or so small that encode() does not hold
};

// Word i: that of block which[i].
MXTILE_INLINE Scale pick_scale(const Scale& s, const uint16_t* which) {
  const Vector w = load(which);
  return {_mm512_permutexvar_epi16(w, s.base), _mm512_permutexvar_epi16(w, s.least)};
}

// The scales of 32 blocks from their largest magnitudes. Above amax exponent kFastExponent, scale
// bytes are at least 21, and bf16 subnormals and whatever fp32 holds below them round to zero.
inline constexpr uint32_t kFastExponent = 36;

template <class F>
MXTILE_INLINE Scales make_scales(Vector amax, mx::Rule rule) {
  constexpr uint32_t kLow = kFastExponent << 7;
  const Vector low = splat(kLow);
  const __mmask32 nonzero = _mm512_test_epi16_mask(amax, amax);
  // A block of zeros takes any scale that encode() can work with.
  const Vector carried = _mm512_add_epi16(max(amax, low), splat(mx::carry_of<F>(rule) >> 16));
  const Vector exponent = _mm512_srli_epi16(carried, 7);
  const Vector field = _mm512_sub_epi16(exponent, splat(F::kMaxExponent + F::kBias));
  Scales s;
  s.byte = _mm512_maskz_sub_epi16(nonzero, exponent, splat(F::kMaxExponent));
  s.scale.base = _mm512_slli_epi16(field, 7 + F::kMantissaBits + 1);
  s.scale.least = _mm512_add_epi16(field, splat(1));
  // Unsigned: what is below kLow wraps around to the top.
  s.exact_needed =
      _mm512_mask_cmpge_epu16_mask(nonzero, _mm512_sub_epi16(amax, low), splat(0x7F80 - kLow)) != 0;
  return s;
}

// Bytes of 64 words: the high or the low ones. Without VBMI they come out of order; in_order() puts
// right whatever was computed from them byte by byte.
#if defined(__AVX512VBMI__)
MXTILE_INLINE Vector low_byte_numbers() {
  alignas(64) static constexpr uint8_t kLow[64] = {
      0,  2,  4,   6,   8,   10,  12,  14,  16,  18,  20,  22,  24,  26,  28,  30,
      32, 34, 36,  38,  40,  42,  44,  46,  48,  50,  52,  54,  56,  58,  60,  62,
      64, 66, 68,  70,  72,  74,  76,  78,  80,  82,  84,  86,  88,  90,  92,  94,
      96, 98, 100, 102, 104, 106, 108, 110, 112, 114, 116, 118, 120, 122, 124, 126};
  return _mm512_load_si512(kLow);
}
MXTILE_INLINE Vector low_bytes(Vector a, Vector b) {
  return _mm512_permutex2var_epi8(a, low_byte_numbers(), b);
}
MXTILE_INLINE Vector high_bytes(Vector a, Vector b) {
  return _mm512_permutex2var_epi8(a, _mm512_add_epi8(low_byte_numbers(), _mm512_set1_epi8(1)), b);
}
MXTILE_INLINE Vector in_order(Vector v) { return v; }
#else
MXTILE_INLINE Vector low_bytes(Vector a, Vector b) {
  return _mm512_packus_epi16(_mm512_and_si512(a, splat(0xFF)), _mm512_and_si512(b, splat(0xFF)));
}
MXTILE_INLINE Vector high_bytes(Vector a, Vector b) {
  return _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8));
}
MXTILE_INLINE Vector in_order(Vector v) {
  return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), v);
}
#endif

// What encode() needs of 64 elements; shared by the directions.
struct Elements {
  Vector pattern[2];  // moved up, the sign gone
  Vector exponent[2];
  Vector significand[2];  // moved up likewise
  Vector signs;           // in the place of the code's, with other bits around them
};

template <class F>
MXTILE_INLINE Elements make_elements(const Vector* x) {
  constexpr int kUp = F::kMantissaBits + 1;
  Elements e;
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    e.pattern[i] = _mm512_slli_epi16(x[i], kUp);
    e.exponent[i] = _mm512_srli_epi16(magnitude(x[i]), 7);
    // (pattern & mantissa) | hidden bit
    e.significand[i] =
        _mm512_ternarylogic_epi32(e.pattern[i], splat(0x7F << kUp), splat(0x80 << kUp), 0xEA);
  }
  e.signs = high_bytes(x[0], x[1]);
  if constexpr (F::kBits < 8) e.signs = _mm512_srli_epi16(e.signs, 8 - F::kBits);
  return e;
}

// 64 codes.
template <class F>
MXTILE_INLINE Vector encode(const Elements& e, const Scale& scale0, const Scale& scale1) {
  Vector unrounded[2];
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const Scale& s = i ? scale1 : scale0;
    const Vector below = _mm512_sub_epi16(s.least, e.exponent[i]);
    const __mmask32 subnormal = _mm512_cmpgt_epi16_mask(below, zero());
    // Modulo 2^16: only the low bits of the exponents are left, and the difference has no more.
    const Vector normal = _mm512_sub_epi16(e.pattern[i], s.base);
    unrounded[i] = _mm512_mask_srlv_epi16(normal, subnormal, e.significand[i], below);
  }
  const Vector code = high_bytes(unrounded[0], unrounded[1]);
  // Up when the rest exceeds one half, or equals it and the code is odd: rest | (code & 1) > 0x80.
  const Vector rest = _mm512_ternarylogic_epi32(low_bytes(unrounded[0], unrounded[1]), code,
                                                _mm512_set1_epi8(1), 0xF8);
  const __mmask64 up = _mm512_cmpgt_epu8_mask(rest, _mm512_set1_epi8(static_cast<char>(0x80)));
  const Vector rounded = _mm512_min_epu8(_mm512_mask_add_epi8(code, up, code, _mm512_set1_epi8(1)),
                                         _mm512_set1_epi8(F::kMaxCode));
  // rounded | (signs & sign)
  return in_order(_mm512_ternarylogic_epi32(rounded, e.signs,
                                            _mm512_set1_epi8(static_cast<char>(F::kSign)), 0xF8));
}

// Low bytes of 32 words. NOTE: in a register first, because the instruction that narrows into
// memory is many on some CPUs.
MXTILE_INLINE __m256i narrowed(Vector words) {
  __m256i bytes = _mm512_cvtepi16_epi8(words);
  asm("" : "+v"(bytes));
  return bytes;
}

// 64 codes of four bits as 32 bytes, the first of two in the low bits.
MXTILE_INLINE void store_nibbles(uint8_t* p, Vector codes) {
  const Vector words = _mm512_maddubs_epi16(codes, _mm512_set1_epi16(0x1001));  // even + 16 odd
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrowed(words));
}
// Two rows of such codes as one of bytes, those of the upper row in the low bits.
MXTILE_INLINE Vector nibble_rows(Vector upper, Vector lower) {
  return _mm512_or_si512(upper, _mm512_slli_epi16(lower, 4));
}
MXTILE_INLINE void store_half(uint8_t* p, Vector v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_castsi512_si256(v));
}

MXTILE_INLINE void store_low_bytes(uint8_t* p, Vector v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrowed(v));
}

// 32 words, each twice, so that repeat() of one of them is a plain broadcast.
MXTILE_INLINE void store_twice(uint32_t* p, Vector v) {
  const Vector low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(v));
  const Vector high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(v, 1));
  store(p, _mm512_or_si512(low, _mm512_slli_epi32(low, 16)));
  store(p + 16, _mm512_or_si512(high, _mm512_slli_epi32(high, 16)));
}
MXTILE_INLINE Vector repeat(const uint32_t* p) { return _mm512_set1_epi32(static_cast<int>(*p)); }

// Two rows of 64 bytes as pairs. Half h, 128 bits q hold columns 16q + 8h and the seven after it.
MXTILE_INLINE Vector pair_bytes(Vector upper, Vector lower, int half) {
  return half ? _mm512_unpackhi_epi8(upper, lower) : _mm512_unpacklo_epi8(upper, lower);
}

// Transposes 8 x 8 words within each 128 bits of 8 vectors.
MXTILE_INLINE void transpose_words_8(const Vector* in, Vector* out) {
  Vector a[8], b[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm512_unpacklo_epi16(in[i], in[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi16(in[i], in[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      b[i + 2 * j] = _mm512_unpacklo_epi32(a[i + j], a[i + j + 2]);
      b[i + 2 * j + 1] = _mm512_unpackhi_epi32(a[i + j], a[i + j + 2]);
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    out[2 * j] = _mm512_unpacklo_epi64(b[j], b[j + 4]);
    out[2 * j + 1] = _mm512_unpackhi_epi64(b[j], b[j + 4]);
  }
}

// Transposes 4 x 4 groups of 128 bits.
MXTILE_INLINE void transpose_quarters(const Vector* in, Vector* out) {
  const Vector a = _mm512_shuffle_i32x4(in[0], in[1], 0x44);
  const Vector b = _mm512_shuffle_i32x4(in[0], in[1], 0xEE);
  const Vector c = _mm512_shuffle_i32x4(in[2], in[3], 0x44);
  const Vector d = _mm512_shuffle_i32x4(in[2], in[3], 0xEE);
  out[0] = _mm512_shuffle_i32x4(a, c, 0x88);
  out[1] = _mm512_shuffle_i32x4(a, c, 0xDD);
  out[2] = _mm512_shuffle_i32x4(b, d, 0x88);
  out[3] = _mm512_shuffle_i32x4(b, d, 0xDD);
}

}  // namespace mxtile::quant::avx512
