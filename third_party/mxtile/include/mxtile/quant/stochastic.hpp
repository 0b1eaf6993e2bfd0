// Stochastic rounding and the Hadamard transform, portable words written so that a compiler turns
// loops over them into vector code.
#pragma once

#include <cstdint>
#include <cstring>

#include "mxtile/mx/format.hpp"
#include "mxtile/mx/inline.hpp"
#include "mxtile/mx/round.hpp"
#if defined(__AVX2__)
#include "mxtile/simd/intrinsics.hpp"
#endif

namespace mxtile::quant {

// Philox4x32-7: the four words of counter (c0, c1, 0, 0) under a key.
MXTILE_INLINE void philox(uint32_t c0, uint32_t c1, uint64_t key, uint32_t* words) {
  uint32_t c2 = 0, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 7; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * c0, b = uint64_t{0xCD9E8D57u} * c2;
    const uint32_t next0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    const uint32_t next2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(b);
    c3 = static_cast<uint32_t>(a);
    c0 = next0;
    c2 = next2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  words[0] = c0;
  words[1] = c1;
  words[2] = c2;
  words[3] = c3;
}

// Eight counters at a time, in the low halves of 64 bits; what the others hold counts for nothing.
#if defined(__AVX2__)
#if defined(__AVX512F__)
struct CountersAvx512 {
  static constexpr int kLanes = 8;
  using I = __m512i;
  MXTILE_INLINE static I set(uint64_t x) { return _mm512_set1_epi64(static_cast<int64_t>(x)); }
  MXTILE_INLINE static I from(uint32_t x) {
    return _mm512_add_epi64(set(x), _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7));
  }
  MXTILE_INLINE static I times(I a, uint32_t b) { return _mm512_mul_epu32(a, set(b)); }
  MXTILE_INLINE static I high(I a) { return _mm512_srli_epi64(a, 32); }
  MXTILE_INLINE static I both(I a, I b, I c) { return _mm512_xor_si512(_mm512_xor_si512(a, b), c); }
  // Halves of 32 bits, as numbers of 32 bits.
  MXTILE_INLINE static I apart(I a) {
    const I up = _mm512_slli_epi64(a, 16), low = set(0xFFFF), next = set(0xFFFFull << 32);
    return _mm512_or_si512(_mm512_and_si512(a, low), _mm512_and_si512(up, next));
  }
  MXTILE_INLINE static I even(I a, I b) { return _mm512_unpacklo_epi64(a, b); }
  MXTILE_INLINE static I odd(I a, I b) { return _mm512_unpackhi_epi64(a, b); }
  MXTILE_INLINE static void store(void* p, I a) { _mm512_store_si512(p, a); }
};
using Counters = CountersAvx512;
#else
struct CountersAvx2 {
  static constexpr int kLanes = 4;
  using I = __m256i;
  MXTILE_INLINE static I set(uint64_t x) { return _mm256_set1_epi64x(static_cast<int64_t>(x)); }
  MXTILE_INLINE static I from(uint32_t x) {
    return _mm256_add_epi64(set(x), _mm256_setr_epi64x(0, 1, 2, 3));
  }
  MXTILE_INLINE static I times(I a, uint32_t b) { return _mm256_mul_epu32(a, set(b)); }
  MXTILE_INLINE static I high(I a) { return _mm256_srli_epi64(a, 32); }
  MXTILE_INLINE static I both(I a, I b, I c) { return _mm256_xor_si256(_mm256_xor_si256(a, b), c); }
  MXTILE_INLINE static I apart(I a) {
    const I up = _mm256_slli_epi64(a, 16), low = set(0xFFFF), next = set(0xFFFFull << 32);
    return _mm256_or_si256(_mm256_and_si256(a, low), _mm256_and_si256(up, next));
  }
  MXTILE_INLINE static I even(I a, I b) { return _mm256_unpacklo_epi64(a, b); }
  MXTILE_INLINE static I odd(I a, I b) { return _mm256_unpackhi_epi64(a, b); }
  MXTILE_INLINE static void store(void* p, I a) { _mm256_store_si256(static_cast<__m256i*>(p), a); }
};
using Counters = CountersAvx2;
#endif
#endif

// 16 bits for each of 64 elements of a row that follow each other from column `col` on, a multiple
// of 8: eight of them draw from the counter (column / 8, row), two from a word, the first its lower
// half.
MXTILE_INLINE void random_bits(uint32_t row, int64_t col, uint64_t key, uint32_t* bits) {
  constexpr int kCounters = 8;
#if defined(__AVX2__)
  using C = Counters;
  for (int at = 0; at < kCounters; at += C::kLanes) {
    C::I c0 = C::from(static_cast<uint32_t>(col / 8 + at)), c1 = C::set(row);
    C::I c2 = C::set(0), c3 = c2;
    uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
    for (int round = 0; round < 7; ++round) {
      const C::I a = C::times(c0, 0xD2511F53u), b = C::times(c2, 0xCD9E8D57u);
      c0 = C::both(C::high(b), c1, C::set(k0)), c2 = C::both(C::high(a), c3, C::set(k1));
      c1 = b, c3 = a;
      k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    c0 = C::apart(c0), c1 = C::apart(c1), c2 = C::apart(c2), c3 = C::apart(c3);
    // Of a counter, words 0 and 1, then 2 and 3: 16 bytes each.
    alignas(64) uint8_t pairs[2][2][16 * C::kLanes / 2];
    C::store(pairs[0][0], C::even(c0, c1)), C::store(pairs[0][1], C::odd(c0, c1));
    C::store(pairs[1][0], C::even(c2, c3)), C::store(pairs[1][1], C::odd(c2, c3));
    for (int i = 0; i < C::kLanes; ++i) {
      for (int j = 0; j < 2; ++j) {
        std::memcpy(bits + 8 * (at + i) + 4 * j, pairs[j][i % 2] + i / 2 * 16, 16);
      }
    }
  }
#else
  uint32_t all[4][kCounters];
  for (int i = 0; i < kCounters; ++i) {
    uint32_t four[4];
    philox(static_cast<uint32_t>(col / 8 + i), row, key, four);
    for (int j = 0; j < 4; ++j) all[j][i] = four[j];
  }
  for (int i = 0; i < 8 * kCounters; ++i) {
    bits[i] = all[i % 8 / 2][i / 8] >> (i % 2 * 16) & 0xFFFF;
  }
#endif
}

// q = |x| * 2^(127 - byte) in steps of codes, from the significand (24 bits) and the exponent field
// that a code of x has, if it is a normal one: a whole number of steps and 16 bits of the next, to
// which 16 random bits are added; never above the largest code.
template <class F>
MXTILE_INLINE uint32_t round_steps(uint32_t significand, int32_t field, uint32_t random) {
  const int32_t below = field < 1 ? 1 - field : 0;
  const uint32_t steps = (significand << (F::kMantissaBits + 1)) >> (below < 31 ? below : 31);
  const uint32_t base = static_cast<uint32_t>(field < 1 ? 0 : field - 1) << F::kMantissaBits;
  const uint32_t code = (((steps >> 8) + random) >> 16) + base;
  return code < F::kMaxCode ? code : F::kMaxCode;
}

// Code of x * 2^(127 - byte) for finite x, rounded by 16 random bits. byte 255 as in mx::encode().
template <class F>
MXTILE_INLINE uint8_t encode_random(uint32_t x, uint32_t byte, uint32_t random) {
  if (byte == mx::kScaleNan) return F::kTraits.nan_code == mx::kNoCode ? 0 : F::kNanCode;
  const uint8_t sign = static_cast<uint8_t>((x >> 31) * F::kSign);
  const uint32_t a = x & 0x7FFFFFFF;
  if (a == 0) return sign;
  int32_t exponent = static_cast<int32_t>(a >> 23);
  uint32_t significand = (a & 0x7FFFFF) | mx::kF32Hidden;
  if (exponent == 0) {
    const int up = 23 - mx::high_bit(a);
    significand = a << up;
    exponent = 1 - up;
  }
  const int32_t field = exponent - static_cast<int32_t>(byte) + F::kBias;
  if (field > 31) return sign | static_cast<uint8_t>(F::kMaxCode);
  return sign | static_cast<uint8_t>(round_steps<F>(significand, field, random));
}

// The same in blocks that do not need the exact path: subnormal x is far below the last step, or
// the block is zero.
template <class F>
MXTILE_INLINE uint8_t encode_random_fast(uint32_t x, uint32_t byte, uint32_t random) {
  const int32_t exponent = static_cast<int32_t>((x & 0x7FFFFFFF) >> 23);
  const uint32_t significand = exponent == 0 ? 0 : (x & 0x7FFFFF) | mx::kF32Hidden;
  const int32_t field = exponent == 0 ? 0 : exponent - static_cast<int32_t>(byte) + F::kBias;
  const uint32_t code = round_steps<F>(significand, field, random);
  return static_cast<uint8_t>(code | ((x >> (32 - F::kBits)) & F::kSign));
}

// The Hadamard transform of kSize (16 or 32) rows of kWidth fp32 patterns, each column by itself:
// the signs of rows whose bit is set are flipped, pairs at distance 1, 2, 4, .. become sums and
// differences, at last times 1 / sqrt(kSize). Every operation rounds to nearest.
template <int kSize, int kWidth>
MXTILE_INLINE void hadamard(uint32_t* x, uint32_t signs) {
  float v[kSize][kWidth];
  for (int r = 0; r < kSize; ++r) {
    const uint32_t flip = (signs >> r & 1) << 31;
    for (int c = 0; c < kWidth; ++c) v[r][c] = mx::as_float(x[r * kWidth + c] ^ flip);
  }
  for (int h = 1; h < kSize; h *= 2) {
    for (int i = 0; i < kSize; i += 2 * h) {
      for (int r = i; r < i + h; ++r) {
        for (int c = 0; c < kWidth; ++c) {
          const float a = v[r][c], b = v[r + h][c];
          v[r][c] = a + b;
          v[r + h][c] = a - b;
        }
      }
    }
  }
  const float factor = mx::as_float(kSize == 16 ? 0x3E800000u : 0x3E3504F3u);
  for (int r = 0; r < kSize; ++r) {
    for (int c = 0; c < kWidth; ++c) x[r * kWidth + c] = mx::as_bits(v[r][c] * factor);
  }
}

}  // namespace mxtile::quant
