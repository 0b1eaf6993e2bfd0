// FP8 and FP4 codes to bf16 words, portably. Codes are one a byte.
//
// A decoded value carries the exponent of its block, taken relative to the largest exponent of its
// row:
//   value = code * 2^(byte - row_byte + kRelative)
// Every such value is exact in bf16, and so is its product with a power of two, so decoding never
// rounds.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mxtile/mx/code.hpp"
#include "mxtile/mx/element.hpp"
#include "mxtile/mx/nibbles.hpp"

#define MXTILE_STATIC __attribute__((always_inline)) static inline

namespace mxtile::bf16 {

using mx::Element;

inline constexpr int kRelative = 37;  // exponent of the largest block of a row
inline constexpr uint16_t kQuietNan = 0x7FC0;
inline constexpr int kTileRows = 16, kTileK = 32;  // a tile is 16 rows of 32 k: 1 KB of bf16

// bf16 bits of a magnitude (code without sign). Finite nonzero values have bit 0 set as a mark:
// there are at most three mantissa bits, so bit 0 is free, and whoever adds the exponent also
// subtracts the mark. Zeros, NaN and Inf carry no mark and must not be given an exponent.
constexpr uint16_t marked_bf16(Element format, unsigned magnitude) {
  const mx::ElementTraits& traits = mx::kElementTraits[static_cast<int>(format)];
  const int mantissa_bits = traits.mantissa_bits, bias = traits.bias;
  const unsigned max_code = static_cast<unsigned>(traits.max_code);
  const unsigned exponent = magnitude >> mantissa_bits;
  unsigned mantissa = magnitude & ((1u << mantissa_bits) - 1);
  if (magnitude == 0) return 0;
  if (magnitude > max_code)
    return traits.has_infinity && magnitude == max_code + 1 ? 0x7F80 : kQuietNan;
  int e = static_cast<int>(exponent) - bias + 127;
  if (exponent == 0) {  // subnormal: shift the leading one into place
    e += 1;
    while (mantissa < (1u << mantissa_bits)) {
      mantissa <<= 1;
      e -= 1;
    }
    mantissa &= (1u << mantissa_bits) - 1;
  }
  return static_cast<uint16_t>((static_cast<unsigned>(e) << 7) | (mantissa << (7 - mantissa_bits)) |
                               1u);
}

// The words of codes 0 to 127 as two byte tables, the form that byte permutes read: magnitudes of
// codes of 8 bits, whose sign is bit 7 of the code and of the high byte; all codes of narrower
// ones.
struct CodeTable {
  alignas(64) uint8_t low[128];
  alignas(64) uint8_t high[128];
  bool negative_zero;  // false: its code is NaN
};

constexpr CodeTable make_code_table(Element format) {
  CodeTable t{};
  const mx::ElementTraits& traits = mx::kElementTraits[static_cast<int>(format)];
  const unsigned sign = 1u << (traits.exponent_bits + traits.mantissa_bits);
  for (unsigned i = 0; i < 128; ++i) {
    const unsigned word = marked_bf16(format, i & (sign - 1)) | ((i & sign) != 0 ? 0x8000u : 0u);
    t.low[i] = static_cast<uint8_t>(word & 0xFF);
    t.high[i] = static_cast<uint8_t>(word >> 8);
  }
  t.negative_zero = traits.has_negative_zero;
  return t;
}

// By Element.
inline constexpr CodeTable kCodeTables[] = {
    make_code_table(Element::e4m3),     make_code_table(Element::e5m2),
    make_code_table(Element::e4m3fnuz), make_code_table(Element::e5m2fnuz),
    make_code_table(Element::e3m2),     make_code_table(Element::e2m3),
    make_code_table(Element::e2m1)};

MXTILE_STATIC const CodeTable& code_table(Element format) {
  return kCodeTables[static_cast<int>(format)];
}

// What is added to a marked word: the relative exponent in place, less the mark.
MXTILE_STATIC uint16_t exponent_word(int byte, int row_byte) {
  return static_cast<uint16_t>((static_cast<unsigned>(byte - row_byte + kRelative) << 7) - 1u);
}

// Tables of words that are whole: of values whose block has the exponent of their row.
constexpr CodeTable make_whole_table(Element format) {
  CodeTable t = make_code_table(format);
  for (unsigned i = 0; i < 128; ++i) {
    const unsigned word = t.low[i] | static_cast<unsigned>(t.high[i]) << 8;
    if ((word & 1u) == 0) continue;
    const unsigned whole = word + (static_cast<unsigned>(kRelative) << 7) - 1u;
    t.low[i] = static_cast<uint8_t>(whole & 0xFF);
    t.high[i] = static_cast<uint8_t>(whole >> 8 & 0xFF);
  }
  return t;
}

// By Element.
inline constexpr CodeTable kWholeTables[] = {
    make_whole_table(Element::e4m3),     make_whole_table(Element::e5m2),
    make_whole_table(Element::e4m3fnuz), make_whole_table(Element::e5m2fnuz),
    make_whole_table(Element::e3m2),     make_whole_table(Element::e2m3),
    make_whole_table(Element::e2m1)};

MXTILE_STATIC uint16_t decode(const CodeTable& table, uint8_t code, int byte, int row_byte) {
  const unsigned magnitude = code & 0x7Fu;
  unsigned word = table.low[magnitude] | (static_cast<unsigned>(table.high[magnitude]) << 8);
  word |= (code & 0x80u) << 8;
  if (word & 1u) word += exponent_word(byte, row_byte);
  if (byte == 255 || (code == 0x80 && !table.negative_zero)) word |= kQuietNan;
  return static_cast<uint16_t>(word);
}

// E2M1 times E4M3, which is exact in bf16: the words of the sixteen codes under every scale.
struct ScaledWords {
  alignas(64) uint16_t word[256][16];
};
constexpr ScaledWords make_scaled_words() {
  ScaledWords t{};
  for (int byte = 0; byte < 256; ++byte) {
    for (int code = 0; code < 16; ++code) {
      const uint32_t scale = mx::decode<mx::E4M3>(static_cast<uint8_t>(byte & 0x7F), 127);
      const uint32_t value = mx::decode<mx::E2M1>(static_cast<uint8_t>(code & 7), 127);
      const float product = (byte & 0x7F) == 0x7F ? 0
                                                  : __builtin_bit_cast(float, scale) *
                                                        __builtin_bit_cast(float, value);
      const uint32_t sign = ((byte >> 7) ^ (code >> 3)) != 0 ? 0x8000 : 0;
      const uint32_t word = __builtin_bit_cast(uint32_t, product) >> 16;
      t.word[byte][code] = static_cast<uint16_t>((byte & 0x7F) == 0x7F ? kQuietNan : word | sign);
    }
  }
  return t;
}
inline constexpr ScaledWords kScaledWords = make_scaled_words();
inline constexpr int kScaledBlock = 16;

// Scale bytes of one block of 32 k for 16 rows, and the largest byte of each of those rows.
struct TileScales {
  const uint8_t* bytes;      // [16]
  const int32_t* row_bytes;  // [16]
};

// A tile of [16 rows][32 k] to one of [16 k pairs][16 rows][2].
MXTILE_STATIC void turn_pairs(const uint16_t* rows, uint16_t* pairs) {
  for (int r = 0; r < kTileRows; ++r) {
    for (int p = 0; p < kTileK / 2; ++p) {
      __builtin_memcpy(pairs + p * kTileK + 2 * r, rows + r * kTileK + 2 * p, 4);
    }
  }
}

// A line is 64 k of one row. Lines are read of formats with a negative zero. It is split into words
// of even and of odd k, which is how the bytes lie in 16-bit lanes; a dot product does not care as
// long as both sides are split.
inline constexpr int kLineK = 64, kLineBlocks = 2;

// Makes tiles from 16 x 32 codes. k_last: codes[row * stride + k]; else codes[k * stride + row].
struct PortableDecoder {
  const CodeTable& table;

  explicit PortableDecoder(Element format) : table(code_table(format)) {}

  // tile[16 rows][32 k]
  template <bool k_last>
  void row_tile(const uint8_t* codes, ptrdiff_t stride, TileScales scales, uint16_t* tile) const {
    for (int r = 0; r < kTileRows; ++r) {
      for (int k = 0; k < kTileK; ++k)
        tile[r * kTileK + k] = at<k_last>(codes, stride, scales, r, k);
    }
  }

  // tile[16 k pairs][16 rows][2], of the first `ks` k, a multiple of 4
  template <bool k_last>
  void pair_tile(const uint8_t* codes, ptrdiff_t stride, TileScales scales, uint16_t* tile,
                 int ks = kTileK) const {
    for (int k = 0; k < ks; ++k) {
      for (int r = 0; r < kTileRows; ++r) {
        tile[(k / 2) * kTileK + r * 2 + k % 2] = at<k_last>(codes, stride, scales, r, k);
      }
    }
  }

  // words[i] = exponent word of bytes[i], twice, of `count` blocks of a row, 16 at most; returns
  // the NaN blocks. All sixteen words are written, those past the count as of bytes of 0.
  static unsigned line_words(const uint8_t* bytes, int64_t count, int row_byte, uint32_t* words) {
    unsigned nan = 0;
    for (int i = 0; i < 16; ++i) {
      const int byte = i < count ? bytes[i] : 0;
      words[i] = exponent_word(byte, row_byte) * 0x10001u;
      nan |= (byte == 255 ? 1u : 0u) << i;
    }
    return nan;
  }

  // The codes of a line, k 0, 2, .. 62 to even[32] and k 1, 3, .. 63 to odd[32]; words are those of
  // its two blocks.
  void split_line(const uint8_t* codes, const uint32_t* words, uint16_t* even,
                  uint16_t* odd) const {
    for (int k = 0; k < kLineK; ++k) {
      const unsigned magnitude = codes[k] & 0x7Fu;
      unsigned word = table.low[magnitude] | (static_cast<unsigned>(table.high[magnitude]) << 8);
      word |= (codes[k] & 0x80u) << 8;
      if (word & 1u) word += words[k / kTileK];
      (k % 2 == 0 ? even : odd)[k / 2] = static_cast<uint16_t>(word);
    }
  }

  // The same of codes two a byte, of a line whose words are the two of that number among sixteen.
  void split_packed_line(const uint8_t* packed, const uint32_t* words, int64_t line, uint16_t* even,
                         uint16_t* odd) const {
    uint8_t codes[kLineK];
    mx::unpack_nibbles<kLineK / 2>(packed, codes);
    split_line(codes, words + kLineBlocks * line, even, odd);
  }

  // Codes two a byte whose blocks of 16 have E4M3 scales: 32 of two blocks, in order,
  static void scaled_block(const uint8_t* packed, const uint8_t* scales, uint16_t* out) {
    for (int k = 0; k < kTileK; ++k) out[k] = scaled(packed, scales, k);
  }
  // and a line, split.
  static void split_scaled_line(const uint8_t* packed, const uint8_t* scales, uint16_t* even,
                                uint16_t* odd) {
    for (int k = 0; k < kLineK; ++k) (k % 2 == 0 ? even : odd)[k / 2] = scaled(packed, scales, k);
  }

  // Makes one block of a split line NaN.
  static void make_block_nan(int block, uint16_t* even, uint16_t* odd) {
    for (int i = 0; i < 16; ++i) {
      even[block * 16 + i] |= kQuietNan;
      odd[block * 16 + i] |= kQuietNan;
    }
  }

 private:
  static uint16_t scaled(const uint8_t* packed, const uint8_t* scales, int k) {
    return kScaledWords.word[scales[k / kScaledBlock]][packed[k / 2] >> (k % 2 * 4) & 0x0F];
  }

  template <bool k_last>
  uint16_t at(const uint8_t* codes, ptrdiff_t stride, TileScales s, int r, int k) const {
    return decode(table, k_last ? codes[r * stride + k] : codes[k * stride + r], s.bytes[r],
                  s.row_bytes[r]);
  }
};

}  // namespace mxtile::bf16
