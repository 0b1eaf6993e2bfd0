// Stochastic rounding and the Hadamard transform, portable words written so that a compiler turns
// loops over them into vector code.
#pragma once

#include <cstdint>

#include "mxtile/mx/format.hpp"
#include "mxtile/mx/inline.hpp"
#include "mxtile/mx/round.hpp"

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

// 16 bits for each of 64 elements of a row that follow each other from column `col` on, a multiple
// of 8: eight of them draw from the counter (column / 8, row), two from a word, the first its lower
// half.
MXTILE_INLINE void random_bits(uint32_t row, int64_t col, uint64_t key, uint32_t* bits) {
  constexpr int kCounters = 8;
  uint32_t all[4][kCounters];
  for (int i = 0; i < kCounters; ++i) {
    uint32_t four[4];
    philox(static_cast<uint32_t>(col / 8 + i), row, key, four);
    for (int j = 0; j < 4; ++j) all[j][i] = four[j];
  }
  for (int i = 0; i < 8 * kCounters; ++i) {
    bits[i] = all[i % 8 / 2][i / 8] >> (i % 2 * 16) & 0xFFFF;
  }
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
