// NVFP4, written once over the f32 vector words S and built for each instruction set. Everything
// here has internal linkage. Every operation is one of te_mx/formats/nvfp4.py, in its order.
#pragma once

#include <cstring>
#include <type_traits>

#include "common/room.h"
#include "mxtile/mx/e4m3_values.hpp"
#include "mxtile/mx/nibbles.hpp"
#include "mxtile/mx/round.hpp"
#include "mxtile/quant/stochastic.hpp"
#include "mxtile/simd/convert.hpp"
#include "mxtile/simd/decode.hpp"
#include "mxtile/simd/turn_bytes.hpp"
#if defined(__AVX512BW__)
#include "mxtile/quant/e2m1_avx512.hpp"
#endif
#include "quantize/nvfp4_magnitudes.hpp"

namespace te_mx::cpu::nvfp4 {
namespace {

namespace mx = mxtile::mx;
#if defined(__AVX512BW__)
namespace q = mxtile::quant::avx512;
#endif

constexpr float kTop = 448.0f * 6.0f, kLargest = 3.4028234663852886e38f;
constexpr float kSixth = 0.16666667163372040f;

inline float least(float a, float b) { return a < b ? a : b; }
// x rounded to bf16.
inline float to_bf16(float x) {
  const uint32_t bits = mx::as_bits(x);
  return mx::as_float((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000);
}

constexpr bool divides(ScaleRule r) {
  return r == ScaleRule::modelopt || r == ScaleRule::compressed_tensors;
}

// What follows from the largest magnitude of a tensor, and is the same for all of its blocks.
struct Whole {
  float scale;   // the tensor scale
  float encode;  // by what block scales are multiplied, or divided
};

template <ScaleRule R>
inline Whole whole_of(uint32_t bits, bool bf16) {
  const float amax = mx::as_float(bits);
  if constexpr (R == ScaleRule::te || R == ScaleRule::compressed_tensors) {
    float encode = kTop / amax;
    if constexpr (R == ScaleRule::compressed_tensors) {
      const float one = 1.0f / amax;
      encode = bf16 ? to_bf16(to_bf16(one) * kTop) : one * kTop;
    }
    encode = bits == 0 ? 1.0f : least(encode, kLargest);
    return {1.0f / encode, R == ScaleRule::te ? encode * kSixth : encode};
  } else {
    const float scale = bits == 0 ? 1.0f : least(amax / kTop, kLargest);
    return {scale, R == ScaleRule::modelopt ? scale * 6.0f : scale};
  }
}

// Magnitudes of fp32 to codes of an element that begins at 2^E, to nearest even, at most its
// largest value (NaN too). Adding `one`, 2^(23 - mantissa bits) times the binade, rounds in fp32.
template <class S, class F, int E>
MXTILE_WORD typename S::I code_of(typename S::F x) {
  constexpr int kDrop = 23 - F::kMantissaBits;
  const auto q = S::min(x, S::set(static_cast<float>(F::kTraits.max)));
  const auto exponent = S::iand(S::as_int(q), S::iset(0x7F800000));
  const auto low = S::iset((127 + E) << 23);
  const auto binade = S::select_gt(exponent, low, exponent, low);
  const auto one = S::iadd(binade, S::iset(kDrop << 23));
  const auto steps = S::isub(S::as_int(S::add(q, S::as_float(one))), one);
  return S::iadd(steps, S::template shr<kDrop>(S::isub(binade, low)));
}

template <class S>
MXTILE_WORD typename S::F bf16_rounded(typename S::F x) {
  return mxtile::simd::bf16_value<S>(mxtile::simd::bf16_bits<S>(x));
}

// A vector of blocks: the codes of their scales, and by what elements are multiplied, or divided.
template <class S>
struct ScaleVector {
  typename S::I code;
  typename S::F factor;
};

template <class S, ScaleRule R>
MXTILE_WORD ScaleVector<S> scale_of(typename S::F bamax, typename S::F scale, typename S::F encode,
                                    bool bf16) {
  using E4M3 = mx::E4M3;
  const auto code = [](auto x) { return code_of<S, E4M3, -6>(x); };
  const auto value = [](auto x) { return mxtile::simd::decode<S, E4M3>(x); };
  const auto one = S::set(1.0f), six = S::set(6.0f);
  if constexpr (R == ScaleRule::te) {
    const auto found = code(S::mul(bamax, encode));
    const auto inverse = S::div(one, S::mul(value(found), scale));
    return {found, S::min(inverse, S::set(kLargest))};
  } else if constexpr (R == ScaleRule::torchao) {
    const auto wanted = S::div(S::div(bamax, six), scale), low = S::set(0.015625f);
    const auto found = code(S::select_lt(wanted, low, low, wanted));
    return {found, S::div(S::div(one, scale), value(found))};
  } else if constexpr (R == ScaleRule::modelopt) {
    const auto wanted = S::div(bamax, encode), low = S::set(0.001953125f);
    const auto least = S::select_lt(wanted, low, low, wanted);
    const auto some = S::select_lt(S::set(0.0f), wanted, least, one);
    const auto number = S::select_lt(wanted, S::set(kLargest), some, least);  // NaN is least
    const auto found = code(number);
    return {found, S::mul(value(found), scale)};
  } else {
    auto sixth = S::div(bamax, six);
    if (bf16) sixth = bf16_rounded<S>(sixth);
    const auto rounded = code(S::mul(encode, sixth));
    const auto found = S::select_gt(rounded, S::iset(0), rounded, S::iset(0x20));  // 0.125
    return {found, S::div(value(found), encode)};
  }
}

template <class S, ScaleRule R>
MXTILE_WORD typename S::I encode(typename S::I x, typename S::F factor) {
  const auto value = S::as_float(x);
  const auto all = S::iset(static_cast<int32_t>(kMagnitude));
  auto y = S::iand(S::as_int(divides(R) ? S::div(value, factor) : S::mul(value, factor)), all);
  const auto zero = S::iset(0);
  // Where 0 times Inf or 0 / 0 was computed.
  if constexpr (R != ScaleRule::te) y = S::select_gt(S::iand(x, all), zero, y, zero);
  auto sign = S::iand(S::template shr<28>(x), S::iset(8));
  if constexpr (divides(R)) sign = S::select_gt(y, zero, sign, zero);
  return S::ior(code_of<S, mx::E2M1, 0>(S::as_float(y)), sign);
}

// Lane i: the largest magnitude of block i.
template <class S>
MXTILE_WORD typename S::F block_maxima(const uint32_t* x) {
  typename S::F rows[S::kLanes];
#pragma GCC unroll 16
  for (int b = 0; b < S::kLanes; ++b) {
    auto most = magnitude<S>(x + b * kB);
    for (int i = S::kLanes; i < kB; i += S::kLanes) {
      most = larger<S>(most, magnitude<S>(x + b * kB + i));
    }
    rows[b] = S::as_float(most);
  }
#pragma GCC unroll 4
  for (int half = S::kLanes / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) {
      typename S::F low, high;
      S::zip(rows[i], rows[i + half], low, high);
      rows[i] = S::as_float(larger<S>(S::as_int(low), S::as_int(high)));
    }
  }
  return rows[0];
}

// Of 16 rows of a vector of columns.
template <class S>
MXTILE_WORD typename S::F column_maxima(const Values& x, int c) {
  auto most = magnitude<S>(x[0] + c);
  for (int r = 1; r < kRows; ++r) most = larger<S>(most, magnitude<S>(x[r] + c));
  return S::as_float(most);
}

// Scales of blocks of which the largest magnitudes are given (of NaN or Inf: those), by the amax of
// each or of all.
struct Scales {
  alignas(64) uint16_t code[kCols];
  alignas(64) float factor[kCols];
  alignas(64) uint32_t mask[kCols];  // of the codes of its elements
};

// NaN and Inf are 0.
template <class S>
MXTILE_WORD typename S::F number_of(typename S::F bamax) {
  const auto bits = S::as_int(bamax);
  return S::as_float(S::select_gt(S::iset(0x7F800000), bits, bits, S::iset(0)));
}

template <class S>
MXTILE_WORD void put_scales(typename S::F bamax, ScaleVector<S> s, int at, Scales& out) {
  const auto inf = S::iset(0x7F800000), bits = S::as_int(bamax);
  S::store_u16(out.code + at, S::select_gt(inf, bits, s.code, S::iset(0x7F)));
  S::store(out.factor + at, s.factor);
  S::store(reinterpret_cast<float*>(out.mask + at),
           S::as_float(S::select_gt(inf, bits, S::iset(15), S::iset(0))));
}

template <class S, ScaleRule R>
MXTILE_WORD void make_scales(typename S::F bamax, Whole whole, bool bf16, int at, Scales& out) {
  const auto scale = S::set(whole.scale), encode = S::set(whole.encode);
  put_scales<S>(bamax, scale_of<S, R>(number_of<S>(bamax), scale, encode, bf16), at, out);
}

template <class S>
MXTILE_WORD typename S::I load_bits(const uint32_t* x) {
  return S::as_int(S::load(reinterpret_cast<const float*>(x)));
}

}  // namespace
}  // namespace te_mx::cpu::nvfp4

#include "quantize/nvfp4_tries.hpp"

namespace te_mx::cpu::nvfp4 {
namespace {

// Two codes of four bits a byte.
inline void pack_codes(const uint16_t* codes, int bytes, uint8_t* out) {
  for (int i = 0; i < bytes; ++i) {
    uint32_t two;
    std::memcpy(&two, codes + 2 * i, sizeof two);
    out[i] = static_cast<uint8_t>(two | two >> 12);
  }
}

// n bytes, of which a whole tile has kWhole: a size that is known is no call.
template <int kWhole>
inline void put(const uint8_t* from, int n, uint8_t* to) {
  if (n == kWhole) {
    std::memcpy(to, from, kWhole);
  } else {
    std::memcpy(to, from, static_cast<size_t>(n));
  }
}
template <int kWhole>
inline void put_bytes(const uint16_t* from, int n, uint8_t* to) {
  alignas(64) uint8_t bytes[kWhole];
  for (int i = 0; i < kWhole; ++i) bytes[i] = static_cast<uint8_t>(from[i]);
  put<kWhole>(bytes, n, to);
}
inline void put_apart(const uint16_t* from, int n, uint8_t* to, int64_t stride) {
  for (int i = 0; i < n; ++i) to[i * stride] = static_cast<uint8_t>(from[i]);
}

// Elements of 32 at a time to codes: of two blocks of a row, two codes a byte; or side by side, one
// a byte.
template <class S, ScaleRule R>
struct Encoder {
  MXTILE_WORD void rows(const uint32_t* x, const Scales& s, int block, uint8_t* packed) {
    uint16_t codes[2 * kB];
    for (int i = 0; i < 2 * kB; i += S::kLanes) {
      const int b = block + i / kB;
      const auto code = encode<S, R>(load_bits<S>(x + i), S::set(s.factor[b]));
      S::store_u16(codes + i, S::iand(code, S::iset(static_cast<int32_t>(s.mask[b]))));
    }
    pack_codes(codes, kB, packed);
  }
  MXTILE_WORD void columns(const uint32_t* x, const Scales& s, int column, uint8_t* bytes) {
    uint16_t codes[2 * kB];
    for (int i = 0; i < 2 * kB; i += S::kLanes) {
      const auto code = encode<S, R>(load_bits<S>(x + i), S::load(s.factor + column + i));
      S::store_u16(codes + i, S::iand(code, load_bits<S>(s.mask + column + i)));
    }
    for (int i = 0; i < 2 * kB; ++i) bytes[i] = static_cast<uint8_t>(codes[i]);
  }
};

#if defined(__AVX512BW__)
template <ScaleRule R>
struct Encoder<mxtile::simd::Avx512, R> {
  using S = mxtile::simd::Avx512;
  MXTILE_WORD q::Vector words(const uint32_t* x, S::F first, S::F second) {
    const q::Vector low = q::scaled_patterns<divides(R)>(q::load(x), first);
    const q::Vector high = q::scaled_patterns<divides(R)>(q::load(x + kB), second);
    const q::Vector codes = q::e2m1_words(low, high);
    return divides(R) ? q::unsigned_zeros(codes, low, high) : codes;
  }
  MXTILE_WORD void rows(const uint32_t* x, const Scales& s, int block, uint8_t* packed) {
    const auto codes = words(x, S::set(s.factor[block]), S::set(s.factor[block + 1]));
    q::store_code_pairs(packed, codes);
    for (int b = 0; b < 2; ++b) {
      if (s.mask[block + b] == 0) std::memset(packed + b * kB / 2, 0, kB / 2);
    }
  }
  MXTILE_WORD void columns(const uint32_t* x, const Scales& s, int column, uint8_t* bytes) {
    const float* factor = s.factor + column;
    const q::Vector codes = words(x, S::load(factor), S::load(factor + kB));
    const uint32_t* mask = s.mask + column;
    q::store_low_bytes(bytes, S::iand(codes, q::low_words(q::load(mask), q::load(mask + kB))));
  }
};
#endif

// Those of blocks of a row, from one on, for every element.
inline void spread(const Scales& blocks, int first, Scales& each) {
  for (int c = 0; c < kCols; ++c) {
    each.factor[c] = blocks.factor[first + c / kB];
    each.mask[c] = blocks.mask[first + c / kB];
  }
}

// Codes rounded by 16 random bits an element: the magnitude in 2^-16 of a step between codes, plus
// these. A number below 1 is a whole number of them, at most as large, found by rounding; of others
// the pattern is that count, as the codes are patterns of their own.
template <class S, ScaleRule R>
void round_randomly(const uint32_t* x, const Scales& s, const uint32_t* words, uint8_t* codes) {
  alignas(64) uint16_t made[kCols];
  const auto all = S::iset(static_cast<int32_t>(kMagnitude)), zero = S::iset(0);
  for (int c = 0; c < kCols; c += S::kLanes) {
    const auto bits = load_bits<S>(x + c);
    const auto value = S::as_float(bits), factor = S::load(s.factor + c);
    const auto y =
        S::iand(S::as_int(divides(R) ? S::div(value, factor) : S::mul(value, factor)), all);
    const auto a = S::select_gt(S::iand(bits, all), zero, y, zero);
    const auto wanted = S::mul(S::min(S::as_float(a), S::set(1.0f)), S::set(131072.0f));
    const auto shift = S::set(8388608.0f);
    const auto near = S::sub(S::add(wanted, shift), shift);
    const auto below = S::select_lt(wanted, near, S::sub(near, S::set(1.0f)), near);
    const auto small = S::isub(S::as_int(S::add(below, shift)), S::as_int(shift));
    const auto large = S::template shr<6>(S::isub(a, S::iset(126 << 23)));
    const auto steps = S::select_gt(a, S::iset((127 << 23) - 1), large, small);
    auto code = S::template shr<16>(S::iadd(steps, load_bits<S>(words + c)));
    code = S::select_gt(code, S::iset(7), S::iset(7), code);
    auto sign = S::iand(S::template shr<28>(bits), S::iset(8));
    if constexpr (divides(R)) sign = S::select_gt(a, zero, sign, zero);
    S::store_u16(made + c, S::iand(S::ior(code, sign), load_bits<S>(s.mask + c)));
  }
  for (int c = 0; c < kCols; ++c) codes[c] = static_cast<uint8_t>(made[c]);
}

template <class S, ScaleRule R>
void make_rows(const Tile& t, const Values& x, const Scales* square, const Values* words) {
  static_assert(kRows * kBlocks == kCols);
  const bool bf16 = t.dtype == DType::bf16;
  Whole whole = whole_of<R>(t.row_amax[0], bf16);
  Scales own;  // of all rows first, which do not wait for each other
  if (tries_two(R) && square == nullptr) try_rows<S>(t, x, own);
  for (int r = 0; !tries_two(R) && square == nullptr && r < t.rows; ++r) {
    if (t.row_amax_stride != 0) whole = whole_of<R>(t.row_amax[r], bf16);
    for (int b = 0; b < kBlocks; b += S::kLanes) {
      const auto bamax = block_maxima<S>(x[r] + b * kB);
      make_scales<S, R>(bamax, whole, bf16, r * kBlocks + b, own);
    }
  }
  const Scales& s = square == nullptr ? own : *square;
  for (int r = 0; r < t.rows; ++r) {
    const int first = square == nullptr ? r * kBlocks : 0;
    alignas(64) uint8_t packed[kCols / 2];
    for (int b = 0; words == nullptr && b < kBlocks; b += 2) {
      Encoder<S, R>::rows(x[r] + b * kB, s, first + b, packed + b * kB / 2);
    }
    if (words != nullptr) {
      alignas(64) uint8_t codes[kCols];
      Scales each;
      spread(s, first, each);
      round_randomly<S, R>(x[r], each, (*words)[r], codes);
      mx::pack_nibbles<kCols / 2>(codes, packed);
    }
    put<kCols / 2>(packed, (t.cols + 1) / 2, t.row_codes + r * t.row_code_stride);
    if (square == nullptr || r == 0) {
      const int blocks = (t.cols + kB - 1) / kB;
      put_bytes<kBlocks>(s.code + first, blocks, t.row_scales + r * t.row_scale_stride);
    }
  }
}

// The same of columns that have an amax each.
template <class S, ScaleRule R>
void own_columns(const Tile& t, const Values& x, Scales& out) {
  for (int c = 0; c < t.cols; ++c) {
    uint32_t most = 0;
    for (int r = 0; r < kRows; ++r) {
      const uint32_t a = x[r][c] & kMagnitude;
      most = a > most ? a : most;
    }
    Scales one;
    const bool bf16 = t.dtype == DType::bf16;
    const auto bamax = S::as_float(S::iset(static_cast<int32_t>(most)));
    make_scales<S, R>(bamax, whole_of<R>(t.col_amax[c], bf16), bf16, 0, one);
    out.code[c] = one.code[0], out.factor[c] = one.factor[0], out.mask[c] = one.mask[0];
  }
}

template <class S, ScaleRule R>
void make_columns(const Tile& t, const Values& x, const Scales* square, const Values* words) {
  const bool bf16 = t.dtype == DType::bf16;
  Scales s;
  if (square == nullptr) {
    const Whole all = whole_of<R>(t.col_amax[0], bf16);
    if (tries_two(R)) try_columns<S>(t, x, s);
    for (int c = 0; !tries_two(R) && c < kCols; c += S::kLanes) {
      make_scales<S, R>(column_maxima<S>(x, c), all, bf16, c, s);
    }
    if (!tries_two(R) && t.col_amax_stride != 0) own_columns<S, R>(t, x, s);
    if (t.col_scale_stride == 1) {
      put_bytes<kCols>(s.code, t.cols, t.col_scales);
    } else {
      put_apart(s.code, t.cols, t.col_scales, t.col_scale_stride);
    }
  } else {
    spread(*square, 0, s);
    put_apart(square->code, (t.cols + kB - 1) / kB, t.col_scales, t.col_scale_stride);
  }
  alignas(64) uint8_t codes[kRows][kCols];
  for (int r = 0; r < kRows; ++r) {
    if (words != nullptr) {
      round_randomly<S, R>(x[r], s, (*words)[r], codes[r]);
    } else {
      for (int c = 0; c < kCols; c += 2 * kB) Encoder<S, R>::columns(x[r] + c, s, c, codes[r] + c);
    }
    if (!t.transposed && r < t.rows) {
      put<kCols>(codes[r], t.cols, t.col_codes + r * t.col_code_stride);
    }
  }
  if (!t.transposed) return;
  constexpr int kPairs = kRows / 2;
  alignas(64) uint8_t pairs[kPairs][kCols], turned[kCols][kPairs];
  for (int r = 0; r < kPairs; ++r) {
    for (int c = 0; c < kCols; ++c) {
      pairs[r][c] = static_cast<uint8_t>(codes[2 * r][c] | codes[2 * r + 1][c] << 4);
    }
  }
  for (int c = 0; c < kCols; c += 16) {
#if defined(MXTILE_TURNS_BYTES)
    mxtile::simd::turn_bytes_8x16(pairs[0] + c, kCols, turned[c]);
#else
    for (int i = 0; i < 16 * kPairs; ++i) turned[c][i] = pairs[i % kPairs][c + i / kPairs];
#endif
  }
  for (int c = 0; c < t.cols; ++c) {
    put<kPairs>(turned[c], (t.rows + 1) / 2, t.col_codes + c * t.col_code_stride);
  }
}

struct Buffers {
  alignas(64) Values x, transformed, words;
};

template <class S, ScaleRule R>
void quantize_as(const Tile& t) {
  const InRoom<Buffers> room;
  Values &x = room->x, &transformed = room->transformed, &random = room->words;
  load(t, x);
  for (int r = 0; t.col_sum != nullptr && r < t.rows; ++r) {
    for (int c = 0; c < t.cols; ++c) t.col_sum[c] += mx::as_float(x[r][c]);
  }
  for (int r = 0; t.stochastic && r < kRows; ++r) {
    for (int c = 0; c < kCols; c += 64) {
      const uint32_t row = t.row0 + static_cast<uint32_t>(r);
      mxtile::quant::random_bits(row, t.col0 + c, t.seed, random[r] + c);
    }
  }
  const Values* words = t.stochastic ? &random : nullptr;
  Scales square;
  if (t.square && !tries_two(R)) {
    const bool bf16 = t.dtype == DType::bf16;
    const Whole whole = whole_of<R>(t.row_codes != nullptr ? t.row_amax[0] : t.col_amax[0], bf16);
    for (int b = 0; b < kBlocks; b += S::kLanes) {
      auto most = S::iset(0);
      for (int r = 0; r < kRows; ++r) {
        most = larger<S>(most, S::as_int(block_maxima<S>(x[r] + b * kB)));
      }
      make_scales<S, R>(S::as_float(most), whole, bf16, b, square);
    }
  }
  const Scales* shared = t.square ? &square : nullptr;
  const auto source = [&](Of of, bool transforms) -> const Values& {
    if (!transforms) return x;
    transform<S>(t, of, x, transformed);
    return transformed;
  };
  if (t.row_codes != nullptr) {
    if (t.square && tries_two(R)) try_square<S>(t, x, square);
    make_rows<S, R>(t, source(Of::row_chunks, t.row_transform != 0), shared, words);
  }
  if (t.col_codes != nullptr) {
    if (t.square && tries_two(R)) try_square_columns<S>(t, x, square);
    make_columns<S, R>(t, source(Of::col_chunks, t.col_transform != 0), shared, words);
  }
}

template <class S>
void quantize(const Tile& tile, ScaleRule rule) {
  if (rule == ScaleRule::te) return quantize_as<S, ScaleRule::te>(tile);
  if (rule == ScaleRule::torchao) return quantize_as<S, ScaleRule::torchao>(tile);
  if (rule == ScaleRule::modelopt) return quantize_as<S, ScaleRule::modelopt>(tile);
  if (tries_two(rule)) return quantize_as<S, ScaleRule::te_4over6>(tile);
  quantize_as<S, ScaleRule::compressed_tensors>(tile);
}

// ------------------------------------------------------------------------------------- and back
template <class S, DType D>
void decode_as(const Run& run) {
  using Out = std::conditional_t<D == DType::f32, float, uint16_t>;
  alignas(64) uint8_t codes[kCols], scales[kCols];
  alignas(64) float whole[kCols];
  alignas(64) Out last[kCols];
  for (int c = 0; c < kCols; ++c) whole[c] = run.whole[0];
  for (int64_t at = 0; at < run.n; at += kCols) {
    const int n = static_cast<int>(run.n - at < kCols ? run.n - at : kCols);
    if (n < kCols) std::memset(codes, 0, sizeof codes), std::memset(scales, 0, sizeof scales);
    if (run.packs) {
      uint8_t packed[kCols / 2] = {};
      const uint8_t* from = run.codes + at / 2;
      if (n < kCols) put<kCols>(from, (n + 1) / 2, packed), from = packed;
      mx::unpack_nibbles<kCols / 2>(from, codes);
    } else {
      put<kCols>(run.codes + at, n, codes);
    }
    if (run.scale_span == 1) put<kCols>(run.scales + at, n, scales);
    if (run.whole_stride != 0) std::memcpy(whole, run.whole + at, static_cast<size_t>(n) * 4);
    Out* out = n < kCols ? last : static_cast<Out*>(run.out) + at;
    for (int c = 0; c < kCols; c += S::kLanes) {
      const auto code = mxtile::simd::decode<S, mx::E2M1>(S::load_u8(codes + c));
      auto scale = S::set(0.0f);
      if (run.scale_span == 1) {
        scale = mxtile::simd::decode<S, mx::E4M3>(S::load_u8(scales + c));
      } else if (c < n) {
        scale = S::set(mx::kScaleValues.of[run.scales[(at + c) / kB]]);
      }
      const auto value = S::mul(S::mul(code, scale), S::load(whole + c));
      if constexpr (D == DType::f32) {
        S::store(out + c, value);
      } else if constexpr (D == DType::bf16) {
        S::store_u16(out + c, mxtile::simd::bf16_bits<S>(value));
      } else {
        S::store_f16(out + c, value);
      }
    }
    if (n < kCols) {
      std::memcpy(static_cast<Out*>(run.out) + at, last, static_cast<size_t>(n) * sizeof(Out));
    }
  }
}

template <class S>
void decode(const Run& run) {
  if (run.dtype == DType::f32) return decode_as<S, DType::f32>(run);
  if (run.dtype == DType::bf16) return decode_as<S, DType::bf16>(run);
  decode_as<S, DType::f16>(run);
}

template <class S>
constexpr Level kLevel{raise<S>, quantize<S>, decode<S>};

}  // namespace
}  // namespace te_mx::cpu::nvfp4
