// FP8 and FP4 codes to bf16: every code of the formats at every exponent against ldexp, and the
// vector decoder against the portable one. The build adds the AVX-512 flags where the compiler
// knows them.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <initializer_list>

#include "mxtile/bf16/codes.hpp"
#include "mxtile/simd/cpu.hpp"
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#include "mxtile/bf16/avx512.hpp"
#include "mxtile/quant/e2m1_avx512.hpp"
#endif

using namespace mxtile::bf16;

namespace {

int failures = 0;

void check(bool ok, const char* what, int a, int b) {
  if (ok) return;
  if (++failures <= 20) std::printf("%s fails at %d, %d\n", what, a, b);
}

int codes_of(Element format) { return format == Element::e2m1 ? 16 : 256; }

double code_value(Element format, int code) {
  const bool fp4 = format == Element::e2m1;
  const int bits = fp4 ? 1 : format == Element::e4m3 ? 3 : 2;
  const int bias = fp4 ? 1 : format == Element::e4m3 ? 7 : 15, top = codes_of(format) / 2;
  const int exponent = code % top >> bits, mantissa = code & ((1 << bits) - 1);
  const double sign = code & top ? -1.0 : 1.0;
  if (format == Element::e4m3 && (code & 0x7F) == 0x7F) return NAN;
  if (format == Element::e5m2 && exponent == 31) return mantissa == 0 ? sign * INFINITY : NAN;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - bits);
  return sign * std::ldexp((1 << bits) + mantissa, exponent - bias - bits);
}

double word_value(uint16_t word) {
  const uint32_t bits = static_cast<uint32_t>(word) << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

void test_every_code(Element format) {
  for (int code = 0; code < codes_of(format); ++code) {
    for (int below = 0; below <= 64; ++below) {
      const double expected = std::ldexp(code_value(format, code), kRelative - below);
      const double got =
          word_value(decode(code_table(format), static_cast<uint8_t>(code), 200 - below, 200));
      const bool same = std::isnan(expected)
                            ? std::isnan(got)
                            : got == expected && std::signbit(got) == std::signbit(expected);
      check(same, "decode", code, below);
    }
    const uint16_t word = decode(code_table(format), static_cast<uint8_t>(code), 255, 200);
    check(std::isnan(word_value(word)), "NaN block", code, 255);
  }
}

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
uint32_t state = 7;
uint32_t random_bits() {
  state ^= state << 13;
  state ^= state >> 17;
  state ^= state << 5;
  return state;
}

struct TileCase {
  uint8_t codes[40 * 40];
  uint8_t bytes[16];
  int32_t row_bytes[16];
};

template <bool k_last>
void compare_tiles(Element format, const TileCase& c, ptrdiff_t stride) {
  const TileScales scales{c.bytes, c.row_bytes};
  alignas(64) uint16_t expected[512], got[512];
  PortableDecoder(format).row_tile<k_last>(c.codes, stride, scales, expected);
  Avx512Decoder(format).row_tile<k_last>(c.codes, stride, scales, got);
  check(std::memcmp(expected, got, sizeof got) == 0, "row tile", k_last, static_cast<int>(stride));
  PortableDecoder(format).pair_tile<k_last>(c.codes, stride, scales, expected);
  Avx512Decoder(format).pair_tile<k_last>(c.codes, stride, scales, got);
  check(std::memcmp(expected, got, sizeof got) == 0, "pair tile", k_last, static_cast<int>(stride));
}

// A line of the portable decoder against decode(), and the vector decoder against the portable one.
void compare_lines(Element format, const TileCase& c) {
  alignas(64) uint16_t even[2][32], odd[2][32];
  alignas(64) uint32_t words[2][16];
  const int row_byte = c.row_bytes[0];
  unsigned nan = 0;
  for (int count = 1; count <= 16; ++count) {  // all of them last
    nan = PortableDecoder::line_words(c.bytes, count, row_byte, words[0]);
    const unsigned same = Avx512Decoder::line_words(c.bytes, count, row_byte, words[1]);
    check(nan == same && nan >> count == 0, "NaN blocks", row_byte, count);
    check(std::memcmp(words[0], words[1], sizeof words[0]) == 0, "line words", row_byte, count);
  }
  for (int block = 0; block < 16; block += kLineBlocks) {
    PortableDecoder(format).split_line(c.codes, words[0] + block, even[0], odd[0]);
    Avx512Decoder(format).split_line(c.codes, words[1] + block, even[1], odd[1]);
    for (int half = 0; half < kLineBlocks; ++half) {
      if ((nan >> (block + half) & 1) == 0) continue;
      PortableDecoder::make_block_nan(half, even[0], odd[0]);
      Avx512Decoder::make_block_nan(half, even[1], odd[1]);
    }
    for (int k = 0; k < kLineK; ++k) {
      const uint16_t word =
          decode(code_table(format), c.codes[k], c.bytes[block + k / kTileK], row_byte);
      check((k % 2 == 0 ? even : odd)[0][k / 2] == word, "line", c.codes[k], k);
    }
    check(std::memcmp(even[0], even[1], sizeof even[0]) == 0, "even words", block, row_byte);
    check(std::memcmp(odd[0], odd[1], sizeof odd[0]) == 0, "odd words", block, row_byte);
  }
}

// Lines of codes two a byte: those of the same codes one a byte.
void compare_packed_lines(const TileCase& c) {
  uint8_t packed[kLineK / 2];
  mxtile::mx::pack_nibbles<kLineK / 2>(c.codes, packed);
  alignas(64) uint16_t expected[2][32], got[2][32];
  alignas(64) uint32_t words[16];
  PortableDecoder::line_words(c.bytes, 16, c.row_bytes[0], words);
  const PortableDecoder portable(Element::e2m1);
  const Avx512Decoder vector(Element::e2m1);
  for (int line = 0; line < 16 / kLineBlocks; ++line) {
    portable.split_line(c.codes, words + kLineBlocks * line, expected[0], expected[1]);
    portable.split_packed_line(packed, words, line, got[0], got[1]);
    check(std::memcmp(expected, got, sizeof got) == 0, "portable packed line", line, 0);
    vector.split_packed_line(packed, words, line, got[0], got[1]);
    check(std::memcmp(expected, got, sizeof got) == 0, "split packed line", line, 0);
  }
  Words whole[2], halves[2];
  vector.decode_line(c.codes, words[0], words[1], whole[0], whole[1]);
  for (int half = 0; half < kLineBlocks; ++half) {
    halves[half] = vector.decode_packed_block(packed + half * kTileK / 2, words[half]);
  }
  check(std::memcmp(whole, halves, sizeof whole) == 0, "packed line", c.bytes[0], 0);
}

void test_vector_tiles(Element format) {
  const auto cpu = mxtile::cpu_features();
  if (!cpu.avx512_bf16 || !cpu.avx512_vbmi) return;
  for (int round = 0; round < 200; ++round) {
    TileCase c;
    for (auto& x : c.codes) {
      x = static_cast<uint8_t>(random_bits() % static_cast<unsigned>(codes_of(format)));
    }
    for (int r = 0; r < 16; ++r) {
      c.row_bytes[r] = 64 + static_cast<int>(random_bits() % 190);
      c.bytes[r] = static_cast<uint8_t>(c.row_bytes[r] - static_cast<int>(random_bits() % 65));
      if (random_bits() % 16 == 0) c.bytes[r] = 255;
    }
    compare_tiles<true>(format, c, 32 + round % 9);
    compare_tiles<false>(format, c, 16 + round % 25);
    compare_lines(format, c);
    if (format == Element::e2m1) compare_packed_lines(c);
  }
}
#endif

// Codes of 4 bits under E4M3 scales, two of them a word; and how such codes are made.
void test_scaled_codes() {
  for (int scale = 0; scale < 256; ++scale) {
    uint8_t packed[32], scales[4];
    for (int i = 0; i < 32; ++i) packed[i] = static_cast<uint8_t>(17 * i + scale);
    for (int b = 0; b < 4; ++b) scales[b] = static_cast<uint8_t>(scale + 37 * b);
    alignas(64) uint16_t words[4][32];
    PortableDecoder::scaled_block(packed, scales, words[0]);
    PortableDecoder::scaled_block(packed + 16, scales + 2, words[1]);
    PortableDecoder::split_scaled_line(packed, scales, words[2], words[3]);
    for (int k = 0; k < 64; ++k) {
      const int code = packed[k / 2] >> (k % 2 * 4) & 15;
      const double value =
          code_value(Element::e2m1, code) * code_value(Element::e4m3, scales[k / 16]);
      const uint16_t word = words[k / 32][k % 32];
      check(std::isnan(value) ? std::isnan(word_value(word)) : word_value(word) == value, "scaled",
            code, scales[k / 16]);
      check(words[2 + k % 2][k / 2] == word, "split", k, scale);
    }
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
    alignas(64) uint16_t got[32], odd[32];
    Avx512Decoder::scaled_block(packed, scales, got);
    check(std::memcmp(got, words[0], sizeof got) == 0, "scaled words", scale, 0);
    Avx512Decoder::split_scaled_line(packed, scales, got, odd);
    check(std::memcmp(got, words[2], sizeof got) == 0, "even scaled words", scale, 0);
    check(std::memcmp(odd, words[3], sizeof odd) == 0, "odd scaled words", scale, 0);
#endif
  }
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
  // Every upper half of a pattern, with nothing, little and much below it.
  for (uint32_t upper = 0; upper < 0x10000; upper += 32) {
    for (const uint32_t below : {0u, 1u, 0x8000u, 0xFFFFu}) {
      alignas(64) uint32_t x[32];
      alignas(64) uint16_t codes[32];
      for (uint32_t i = 0; i < 32; ++i) x[i] = (upper + i) << 16 | below;
      namespace q = mxtile::quant::avx512;
      q::store(codes, q::e2m1_words(q::load(x), q::load(x + 16)));
      for (int i = 0; i < 32; ++i) {
        const uint32_t most =
            (x[i] & 0x7FFFFFFF) > 0x40E00000 ? (x[i] & 0x80000000) | 0x40E00000 : x[i];
        const int expected = mxtile::mx::encode<mxtile::mx::E2M1>(most, 127);
        check(codes[i] == expected, "code of 4 bits", static_cast<int>(x[i] >> 16), codes[i]);
      }
    }
  }
#endif
}

}  // namespace

int run() {  // by main.cpp
#if defined(__AVX512F__)
  if (!mxtile::cpu_features().avx512) return 0;  // built for more than this CPU has
#endif
  for (Element format : {Element::e4m3, Element::e5m2, Element::e2m1}) {
    test_every_code(format);
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
    test_vector_tiles(format);
#endif
  }
  test_scaled_codes();
  if (failures != 0) std::printf("%d checks failed\n", failures);
  return failures == 0 ? 0 : 1;
}
