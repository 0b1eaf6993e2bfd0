// FP8 and FP4 to bf16 tiles and bf16 dot products with AVX-512 VBMI and BF16.
// Include only from files compiled for that level. Everything is inlined, so no copy leaks to other
// files.
#pragma once

// gcc 12 takes the intrinsics' deliberately undefined pass-through operand for a mistake (gcc bug
// 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

#include "mxtile/bf16/codes.hpp"

namespace mxtile::bf16 {

// Sixteen fp32 sums, or thirty-two bf16.
using Vec = __m512;
using Words = __m512i;

// acc[i] += a[2i] * b[2i] + a[2i + 1] * b[2i + 1]
MXTILE_STATIC Vec dot(Vec acc, Words a, Words b) {
  return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}
MXTILE_STATIC Vec zero() { return _mm512_setzero_ps(); }
MXTILE_STATIC Vec load(const float* p) { return _mm512_load_ps(p); }
MXTILE_STATIC void store(float* p, Vec v) { _mm512_store_ps(p, v); }
MXTILE_STATIC Words load_words(const void* p) { return _mm512_load_si512(p); }
MXTILE_STATIC void store_words(void* p, Words v) { _mm512_store_si512(p, v); }
// The pair of bf16 at p in every lane.
MXTILE_STATIC Words broadcast_pair(const uint16_t* p) {
  int32_t pair;
  __builtin_memcpy(&pair, p, 4);
  return _mm512_set1_epi32(pair);
}
MXTILE_STATIC Words broadcast_word(uint32_t pair) {
  return _mm512_set1_epi32(static_cast<int>(pair));
}
// Lane i: the pair of lane which[i].
MXTILE_STATIC Words pick_pairs(Words pairs, Words which) {
  return _mm512_permutexvar_epi32(which, pairs);
}
MXTILE_STATIC Words or_words(Words a, Words b) { return _mm512_or_si512(a, b); }
MXTILE_STATIC float sum(Vec v) { return _mm512_reduce_add_ps(v); }

// to[64] = the `count` bytes at `from`, fewer than 64, and zeros.
MXTILE_STATIC void copy_part(const uint8_t* from, int64_t count, uint8_t* to) {
  const __mmask64 there = (uint64_t{1} << count) - 1;
  _mm512_storeu_si512(to, _mm512_maskz_loadu_epi8(there, from));
}

// Byte order that gathers the k pairs (0, 1) and (2, 3) of four rows into each 128-bit lane, from
// four k of 16 rows.
struct PairOrder {
  alignas(64) uint8_t index[64];
};
constexpr PairOrder make_pair_order() {
  PairOrder o{};
  for (int lane = 0; lane < 4; ++lane) {
    for (int i = 0; i < 16; ++i) {
      const int pair = i / 8, row = 4 * lane + i % 8 / 2, k = 2 * pair + i % 2;
      o.index[16 * lane + i] = static_cast<uint8_t>(16 * k + row);
    }
  }
  return o;
}
inline constexpr PairOrder kPairOrder = make_pair_order();

// Byte order of k pairs of 32 rows from two vectors of their codes, rows 0..15 in the low
// and 16..31 in the high halves of the lanes.
constexpr PairOrder make_row_pair_order() {
  PairOrder o{};
  for (int i = 0; i < 64; ++i) {
    const int row = i / 16 * 4 + i % 16 / 8 * 16 + i % 8 / 2;
    o.index[i] = static_cast<uint8_t>(row + i % 2 * 64);
  }
  return o;
}
inline constexpr PairOrder kRowPairOrder = make_row_pair_order();

// Decodes 32 rows of one block of at most 32 k, codes[k * stride + row], to pair tiles of as many k
// as there are. For elements with a negative zero.
struct Avx512BlockDecoder {
  const CodeTable& table;

  __attribute__((always_inline)) explicit Avx512BlockDecoder(Element format)
      : table(kWholeTables[static_cast<int>(format)]) {}

  __attribute__((always_inline)) inline void pair_tiles(const uint8_t* codes, ptrdiff_t stride,
                                                        const uint8_t* scale_bytes, uint16_t* first,
                                                        uint16_t* second, int k) const {
    const __m512i low0 = _mm512_load_si512(table.low), low1 = _mm512_load_si512(table.low + 64);
    const __m512i high0 = _mm512_load_si512(table.high), high1 = _mm512_load_si512(table.high + 64);
    const __m512i order = _mm512_load_si512(kRowPairOrder.index), sign = _mm512_set1_epi8(-128);
    const __mmask32 nan = _mm256_cmpeq_epi8_mask(row_codes256(scale_bytes), _mm256_set1_epi8(-1));
    for (int p = 0; 2 * p < k; ++p, codes += 2 * stride) {
      const __m512i even = row_codes(codes);
      const __m512i odd = 2 * p + 1 < k ? row_codes(codes + stride) : _mm512_setzero_si512();
      const __m512i pairs = _mm512_permutex2var_epi8(even, order, odd);
      const __m512i low = _mm512_permutex2var_epi8(low0, pairs, low1);
      __m512i high = _mm512_permutex2var_epi8(high0, pairs, high1);
      high = _mm512_ternarylogic_epi64(high, pairs, sign, 0xF8);  // high | (pairs & sign)
      __m512i a = _mm512_unpacklo_epi8(low, high), b = _mm512_unpackhi_epi8(low, high);
      if (__builtin_expect(nan != 0, 0)) {
        const __m512i quiet = _mm512_set1_epi16(kQuietNan);
        a = _mm512_mask_or_epi32(a, static_cast<__mmask16>(nan), a, quiet);
        b = _mm512_mask_or_epi32(b, static_cast<__mmask16>(nan >> 16), b, quiet);
      }
      _mm512_store_si512(first + p * kTileK, a);
      _mm512_store_si512(second + p * kTileK, b);
    }
  }

 private:
  MXTILE_STATIC __m256i row_codes256(const uint8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  MXTILE_STATIC __m512i row_codes(const uint8_t* p) {
    return _mm512_castsi256_si512(row_codes256(p));
  }
};

// Byte order that repeats the byte of row i in 32-bit lane i, from lanes of 4 bytes of 4 rows.
constexpr PairOrder make_byte_order() {
  PairOrder o{};
  for (int i = 0; i < 64; ++i) o.index[i] = static_cast<uint8_t>(i / 16 * 16 + i / 4 % 4);
  return o;
}
inline constexpr PairOrder kByteOrder = make_byte_order();

struct Avx512Decoder {
  __m512i low0, low1, high0, high1, sign, mark, spread;
  __m512i halves;      // words of codes of 4 bits, twice
  bool negative_zero;  // false: its code is NaN

  __attribute__((always_inline)) explicit Avx512Decoder(Element format) {
    const CodeTable& t = code_table(format);
    low0 = _mm512_load_si512(t.low);
    low1 = _mm512_load_si512(t.low + 64);
    high0 = _mm512_load_si512(t.high);
    high1 = _mm512_load_si512(t.high + 64);
    negative_zero = t.negative_zero;
    sign = _mm512_set1_epi8(-128);
    mark = _mm512_set1_epi16(1);
    // Sends 8-code groups 0..3 to the low and 4..7 to the high halves of the 128-bit lanes, which
    // is where the byte unpack leaves them in order.
    spread = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    const __m128i low16 = _mm512_castsi512_si128(low0), high16 = _mm512_castsi512_si128(high0);
    halves = _mm512_broadcast_i64x4(
        _mm256_set_m128i(_mm_unpackhi_epi8(low16, high16), _mm_unpacklo_epi8(low16, high16)));
  }

  // 64 codes to 2 x 32 words. Per 128-bit lane, `first` takes the low 8 codes and `second` the
  // high 8.
  __attribute__((always_inline)) inline void decode(__m512i codes, __m512i add_first,
                                                    __m512i add_second, __m512i& first,
                                                    __m512i& second) const {
    __m512i low = _mm512_permutex2var_epi8(low0, codes, low1);
    __m512i high = _mm512_permutex2var_epi8(high0, codes, high1);
    high = _mm512_ternarylogic_epi64(high, codes, sign, 0xF8);  // high | (codes & sign)
    if (__builtin_expect(!negative_zero, 0)) {
      const __mmask64 nan = _mm512_cmpeq_epi8_mask(codes, sign);
      low = _mm512_mask_mov_epi8(low, nan, _mm512_set1_epi8(static_cast<char>(kQuietNan & 0xFF)));
      high = _mm512_mask_mov_epi8(high, nan, _mm512_set1_epi8(kQuietNan >> 8));
    }
    first = _mm512_unpacklo_epi8(low, high);
    second = _mm512_unpackhi_epi8(low, high);
    first = _mm512_mask_add_epi16(first, _mm512_test_epi16_mask(first, mark), first, add_first);
    second =
        _mm512_mask_add_epi16(second, _mm512_test_epi16_mask(second, mark), second, add_second);
  }

  // 64 codes of one row in order: words of k 0..31 and of k 32..63.
  __attribute__((always_inline)) inline void decode_line(const uint8_t* codes, uint32_t word_first,
                                                         uint32_t word_second, __m512i& first,
                                                         __m512i& second) const {
    const __m512i c = _mm512_permutexvar_epi64(spread, _mm512_loadu_si512(codes));
    decode(c, _mm512_set1_epi32(static_cast<int>(word_first)),
           _mm512_set1_epi32(static_cast<int>(word_second)), first, second);
  }

  // 32 codes of 4 bits, two a byte, in order, of a block whose exponent word this is. The exponent
  // joins the table, so nothing is left to do with words that were looked up.
  __attribute__((always_inline)) inline __m512i decode_packed_block(const uint8_t* packed,
                                                                    uint32_t word) const {
    const __m512i table =
        _mm512_mask_add_epi16(halves, kNotZero, halves, _mm512_set1_epi32(static_cast<int>(word)));
    // Lane i: byte i, and the same four bits higher, whose upper half is the index of the high
    // code.
    const __m512i wide = _mm512_cvtepu8_epi32(load16(packed));
    return _mm512_permutexvar_epi16(_mm512_or_si512(wide, _mm512_slli_epi32(wide, 12)), table);
  }

  // 32 codes of 4 bits, two a byte, in order, of two blocks of 16 whose E4M3 scales these are:
  // lanes of either block look up its products.
  MXTILE_STATIC __m512i scaled_block(const uint8_t* packed, const uint8_t* scales) {
    const __m512i wide = _mm512_cvtepu8_epi32(load16(packed));
    const __m512i both = _mm512_or_si512(wide, _mm512_slli_epi32(wide, 12));
    const __m512i upper = _mm512_maskz_set1_epi16(0xFFFF0000, 16);
    // (both & 15) | upper
    const __m512i which = _mm512_ternarylogic_epi64(both, _mm512_set1_epi16(15), upper, 0xEA);
    return _mm512_permutexvar_epi16(which, products(scales));
  }
  MXTILE_STATIC void scaled_block(const uint8_t* packed, const uint8_t* scales, uint16_t* out) {
    _mm512_store_si512(out, scaled_block(packed, scales));
  }

  // A line of such codes, k 0, 2, .. 62 to even[32] and k 1, 3, .. 63 to odd[32].
  MXTILE_STATIC void split_scaled_line(const uint8_t* packed, const uint8_t* scales, uint16_t* even,
                                       uint16_t* odd) {
    const __m512i low = products(scales), high = products(scales + 2);
    const __m512i second = _mm512_maskz_set1_epi16(0xFF00FF00, 16);
    const __m512i block = _mm512_mask_add_epi16(second, 0xFFFF0000, second, _mm512_set1_epi16(32));
    const __m512i wide = _mm512_cvtepu8_epi16(load32(packed));
    const __m512i first = _mm512_ternarylogic_epi64(wide, _mm512_set1_epi16(15), block, 0xEA);
    const __m512i last = _mm512_or_si512(_mm512_srli_epi16(wide, 4), block);
    _mm512_store_si512(even, _mm512_permutex2var_epi16(low, first, high));
    _mm512_store_si512(odd, _mm512_permutex2var_epi16(low, last, high));
  }

  // tile[16 rows][32 k]
  template <bool k_last>
  __attribute__((always_inline)) inline void row_tile(const uint8_t* codes, ptrdiff_t stride,
                                                      TileScales scales, uint16_t* tile) const {
    alignas(64) uint32_t words[kTileRows];
    const __mmask16 nan_rows = exponent_words(scales, words);
    if constexpr (k_last) {
      for (int r = 0; r < kTileRows; r += 2) {
        const __m512i two_rows =
            _mm512_inserti64x4(_mm512_castsi256_si512(load32(codes + r * stride)),
                               load32(codes + (r + 1) * stride), 1);
        store_rows(_mm512_permutexvar_epi64(spread, two_rows), words, r, tile);
      }
    } else {
      // Register i holds k = 8 * lane + i: an in-lane 8 x 16 byte transpose gives 8 k of two rows a
      // lane.
      __m512i z[8], y[8];
      for (int i = 0; i < 8; ++i) z[i] = load_lanes(codes + i * stride, 8 * stride);
      for (int i = 0; i < 8; i += 2) {
        y[i] = _mm512_unpacklo_epi8(z[i], z[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi8(z[i], z[i + 1]);
      }
      for (int half = 0; half < 2; ++half) {                            // rows 0..7, 8..15
        const __m512i a = _mm512_unpacklo_epi16(y[half], y[2 + half]);  // k 0..3 of rows 0..3
        const __m512i b = _mm512_unpackhi_epi16(y[half], y[2 + half]);
        const __m512i c = _mm512_unpacklo_epi16(y[4 + half], y[6 + half]);  // k 4..7
        const __m512i d = _mm512_unpackhi_epi16(y[4 + half], y[6 + half]);
        store_rows(_mm512_unpacklo_epi32(a, c), words, 8 * half + 0, tile);
        store_rows(_mm512_unpackhi_epi32(a, c), words, 8 * half + 2, tile);
        store_rows(_mm512_unpacklo_epi32(b, d), words, 8 * half + 4, tile);
        store_rows(_mm512_unpackhi_epi32(b, d), words, 8 * half + 6, tile);
      }
    }
    if (__builtin_expect(nan_rows != 0, 0)) {
      for (int r = 0; r < kTileRows; ++r) {
        if (nan_rows >> r & 1) make_nan(tile + r * kTileK, 0xFFFF);
      }
    }
  }

  // tile[16 k pairs][16 rows][2], of the first `ks` k, a multiple of 4, and perhaps of more
  template <bool k_last>
  __attribute__((always_inline)) inline void pair_tile(const uint8_t* codes, ptrdiff_t stride,
                                                       TileScales scales, uint16_t* tile,
                                                       int ks = kTileK) const {
    alignas(64) uint32_t words[kTileRows];
    const __mmask16 nan_rows = exponent_words(scales, words);
    const __m512i add = _mm512_load_si512(words);
    if constexpr (k_last) {
      for (int half = 0; half < (ks + 15) / 16; ++half) {  // k 0..15, 16..31
        // Register i holds rows 4 * lane + i: transposing 4 rows of k pairs in the lanes is enough.
        __m512i z[4];
        for (int i = 0; i < 4; ++i) z[i] = load_lanes(codes + i * stride + 16 * half, 4 * stride);
        const __m512i a = _mm512_unpacklo_epi16(z[0], z[1]), b = _mm512_unpackhi_epi16(z[0], z[1]);
        const __m512i c = _mm512_unpacklo_epi16(z[2], z[3]), d = _mm512_unpackhi_epi16(z[2], z[3]);
        uint16_t* out = tile + half * 8 * kTileK;
        store_pairs(_mm512_unpacklo_epi32(a, c), add, out);
        store_pairs(_mm512_unpackhi_epi32(a, c), add, out + 2 * kTileK);
        store_pairs(_mm512_unpacklo_epi32(b, d), add, out + 4 * kTileK);
        store_pairs(_mm512_unpackhi_epi32(b, d), add, out + 6 * kTileK);
      }
    } else {
      // Four k of 16 rows a register: k pair (0, 1) to the low, (2, 3) to the high half of each
      // lane.
      const __m512i order = _mm512_load_si512(kPairOrder.index);
      for (int k = 0; k < ks; k += 4) {
        const __m512i four = load_lanes(codes + k * stride, stride);
        store_pairs(_mm512_permutexvar_epi8(order, four), add, tile + k / 2 * kTileK);
      }
    }
    if (__builtin_expect(nan_rows != 0, 0)) {
      for (int p = 0; p < ks / 2; ++p) make_nan(tile + p * kTileK, nan_rows);
    }
  }

  // The same of codes of 4 bits, two a byte, of 16 rows of at most 32 k whose exponent is that of
  // their row (or NaN), for so many pairs. Reads 16 bytes of every row.
  __attribute__((always_inline)) inline void packed_pair_tile(const uint8_t* packed,
                                                              ptrdiff_t stride,
                                                              const uint8_t* scale_bytes,
                                                              uint16_t* tile, int pairs) const {
    const Words exponent = _mm512_set1_epi16(static_cast<short>(exponent_word(0, 0)));
    const Words table = _mm512_mask_add_epi16(halves, kNotZero, halves, exponent);
    // Register i holds rows 4 * lane + i: after two unpacks a lane has byte after byte of 4 rows.
    Words z[4], bytes[4];
    for (int i = 0; i < 4; ++i) z[i] = load_lanes(packed + i * stride, 4 * stride);
    const Words a = _mm512_unpacklo_epi8(z[0], z[1]), b = _mm512_unpackhi_epi8(z[0], z[1]);
    const Words c = _mm512_unpacklo_epi8(z[2], z[3]), d = _mm512_unpackhi_epi8(z[2], z[3]);
    bytes[0] = _mm512_unpacklo_epi16(a, c), bytes[1] = _mm512_unpackhi_epi16(a, c);
    bytes[2] = _mm512_unpacklo_epi16(b, d), bytes[3] = _mm512_unpackhi_epi16(b, d);
    const Words shift = _mm512_set1_epi32(4 << 16);
    for (int p = 0; p < pairs; ++p) {
      // A byte four times, shifted in the upper word; bit 4 of an index does not matter.
      const Words order =
          _mm512_add_epi8(_mm512_load_si512(kByteOrder.index), _mm512_set1_epi8(4 * (p % 4)));
      const Words four = _mm512_permutexvar_epi8(order, bytes[p / 4]);
      store_words(tile + p * kTileK,
                  _mm512_permutexvar_epi16(_mm512_srlv_epi16(four, shift), table));
    }
    const __mmask16 nan_rows = _mm_cmpeq_epi8_mask(load16(scale_bytes), _mm_set1_epi8(-1));
    if (__builtin_expect(nan_rows != 0, 0)) {
      for (int p = 0; p < pairs; ++p) make_nan(tile + p * kTileK, nan_rows);
    }
  }

  // words[i] = exponent word of bytes[i], twice, of `count` blocks of a row, 16 at most; returns
  // the NaN blocks. All sixteen words are written, those past the count as of bytes of 0.
  MXTILE_STATIC unsigned line_words(const uint8_t* bytes, int64_t count, int row_byte,
                                    uint32_t* words) {
    const __m512i base = _mm512_set1_epi32((kRelative - row_byte) * 128 - 1);
    const __mmask16 there = static_cast<__mmask16>((1u << count) - 1u);
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(there, bytes));
    const __m512i word = _mm512_add_epi32(_mm512_slli_epi32(wide, 7), base);
    _mm512_store_si512(words,
                       _mm512_mask_blend_epi16(0xAAAAAAAA, word, _mm512_slli_epi32(word, 16)));
    return _mm512_cmpeq_epi32_mask(wide, _mm512_set1_epi32(255));
  }

  // The codes of a line, k 0, 2, .. 62 to even[32] and k 1, 3, .. 63 to odd[32]; words are those of
  // its two blocks.
  __attribute__((always_inline)) inline void split_line(const uint8_t* codes, const uint32_t* words,
                                                        uint16_t* even, uint16_t* odd) const {
    const __m512i c = _mm512_loadu_si512(codes);
    const __m512i low = _mm512_permutex2var_epi8(low0, c, low1);
    __m512i high = _mm512_permutex2var_epi8(high0, c, high1);
    high = _mm512_ternarylogic_epi64(high, c, sign, 0xF8);  // high | (codes & sign)
    const __m512i add = two_words(words);
    const __m512i upper = _mm512_set1_epi16(-256);
    // upper ? high : low, by bytes of the word
    __m512i e = _mm512_ternarylogic_epi64(upper, _mm512_slli_epi16(high, 8), low, 0xCA);
    __m512i o = _mm512_ternarylogic_epi64(upper, high, _mm512_srli_epi16(low, 8), 0xCA);
    _mm512_store_si512(even, add_exponent(e, add));
    _mm512_store_si512(odd, add_exponent(o, add));
  }

  // The same of codes two a byte, of a line whose words are the two of that number among sixteen.
  // The exponents of both blocks join the table, whose halves the blocks read.
  __attribute__((always_inline)) inline void split_packed_line(const uint8_t* packed,
                                                               const uint32_t* words, int64_t line,
                                                               uint16_t* even,
                                                               uint16_t* odd) const {
    const __m512i upper = _mm512_maskz_set1_epi32(0xFF00, 1);
    const __m512i which = _mm512_add_epi32(upper, _mm512_set1_epi32(static_cast<int>(2 * line)));
    const __m512i add = _mm512_permutexvar_epi32(which, _mm512_load_si512(words));
    const __m512i table = _mm512_mask_add_epi16(halves, kNotZero, halves, add);
    const __m512i half = _mm512_maskz_set1_epi16(0xFFFF0000, 16);
    const __m512i wide = _mm512_cvtepu8_epi16(load32(packed));
    // (wide & 15) | half
    const __m512i low = _mm512_ternarylogic_epi64(wide, _mm512_set1_epi16(15), half, 0xEA);
    const __m512i high = _mm512_or_si512(_mm512_srli_epi16(wide, 4), half);
    _mm512_store_si512(even, _mm512_permutexvar_epi16(low, table));
    _mm512_store_si512(odd, _mm512_permutexvar_epi16(high, table));
  }

  // Makes one block of a split line NaN.
  MXTILE_STATIC void make_block_nan(int block, uint16_t* even, uint16_t* odd) {
    const __mmask16 lanes = static_cast<__mmask16>(0xFF << (8 * block));
    make_nan(even, lanes);
    make_nan(odd, lanes);
  }

 private:
  // Of the sixteen codes of 4 bits, twice: those that are numbers other than 0.
  static constexpr __mmask32 kNotZero = 0xFEFEFEFE;

  // Of two blocks.
  MXTILE_STATIC __m512i products(const uint8_t* scales) {
    const auto* const words = kScaledWords.word;
    const __m256i first = load32(reinterpret_cast<const uint8_t*>(words[scales[0]]));
    const __m256i second = load32(reinterpret_cast<const uint8_t*>(words[scales[1]]));
    return _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
  }

  __attribute__((always_inline)) inline __m512i add_exponent(__m512i word, __m512i add) const {
    return _mm512_mask_add_epi16(word, _mm512_test_epi16_mask(word, mark), word, add);
  }
  // One exponent word for each half of a register.
  MXTILE_STATIC __m512i two_words(const uint32_t* words) {
    return _mm512_mask_set1_epi32(_mm512_set1_epi32(static_cast<int>(words[0])), 0xFF00,
                                  static_cast<int>(words[1]));
  }
  MXTILE_STATIC __m256i load32(const uint8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  MXTILE_STATIC __m128i load16(const uint8_t* p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  }
  // 16 bytes at p, p + step, p + 2 step, p + 3 step in the four lanes.
  MXTILE_STATIC __m512i load_lanes(const uint8_t* p, ptrdiff_t step) {
    __m512i v = _mm512_castsi128_si512(load16(p));
    v = _mm512_inserti32x4(v, load16(p + step), 1);
    v = _mm512_inserti32x4(v, load16(p + 2 * step), 2);
    return _mm512_inserti32x4(v, load16(p + 3 * step), 3);
  }

  // words[row] = the exponent word twice; returns the rows whose block is NaN.
  MXTILE_STATIC __mmask16 exponent_words(TileScales s, uint32_t* words) {
    const __m512i bytes = _mm512_cvtepu8_epi32(load16(s.bytes));
    const __m512i relative = _mm512_sub_epi32(bytes, _mm512_loadu_si512(s.row_bytes));
    const __m512i shifted =
        _mm512_slli_epi32(_mm512_add_epi32(relative, _mm512_set1_epi32(kRelative)), 7);
    const __m512i word = _mm512_sub_epi32(shifted, _mm512_set1_epi32(1));
    // (word << 16) | (word & 0xFFFF)
    _mm512_store_si512(words,
                       _mm512_mask_blend_epi16(0xAAAAAAAA, word, _mm512_slli_epi32(word, 16)));
    return _mm512_cmpeq_epi32_mask(bytes, _mm512_set1_epi32(255));
  }

  __attribute__((always_inline)) inline void store_rows(__m512i codes, const uint32_t* words,
                                                        int row, uint16_t* tile) const {
    __m512i first, second;
    decode(codes, _mm512_set1_epi32(static_cast<int>(words[row])),
           _mm512_set1_epi32(static_cast<int>(words[row + 1])), first, second);
    _mm512_store_si512(tile + row * kTileK, first);
    _mm512_store_si512(tile + (row + 1) * kTileK, second);
  }

  __attribute__((always_inline)) inline void store_pairs(__m512i codes, __m512i add,
                                                         uint16_t* out) const {
    __m512i first, second;
    decode(codes, add, add, first, second);
    _mm512_store_si512(out, first);
    _mm512_store_si512(out + kTileK, second);
  }

  MXTILE_STATIC void make_nan(uint16_t* words, __mmask16 lanes) {
    const __m512i v = _mm512_load_si512(words);
    _mm512_store_si512(words, _mm512_mask_or_epi32(v, lanes, v, _mm512_set1_epi32(0x7FC07FC0)));
  }
};

}  // namespace mxtile::bf16
