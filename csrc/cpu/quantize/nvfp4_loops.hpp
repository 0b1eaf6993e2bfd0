// NVFP4 in plain loops, compiled once for every instruction set: compilers make vectors of them.
// Everything here has internal linkage: several files compile it with different flags. Every
// operation is one of te_mx/formats/nvfp4.py, in its order.
#pragma once

#include <cstring>

#include "common/room.h"
#include "mxtile/mx/nibbles.hpp"
#include "mxtile/mx/round.hpp"
#include "quantize/nvfp4.hpp"

namespace te_mx::cpu::nvfp4 {
namespace {

namespace mx = mxtile::mx;

constexpr int kB = static_cast<int>(kSmallBlock);
constexpr uint32_t kMagnitude = 0x7FFFFFFF;
constexpr float kTop = 448.0f * 6.0f, kLargest = 3.4028234663852886e38f;
constexpr float kSixth = 0.16666667163372040f;
using Values = uint32_t[kRows][kCols];  // fp32 patterns

inline float least(float a, float b) { return a < b ? a : b; }
// x rounded to bf16.
inline float to_bf16(float x) {
  const uint32_t bits = mx::as_bits(x);
  return mx::as_float((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000);
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

// Magnitude of fp32 to a code of E4M3: to nearest even, at most 448 (NaN too).
inline uint32_t e4m3_of(float x) {
  const uint32_t a = mx::as_bits(x);
  constexpr float kMagic = 24576.0f;  // 1.5 * 2^14: steps of 2^-9
  const uint32_t small = mx::as_bits(x + kMagic) - mx::as_bits(kMagic);
  const uint32_t code = ((a + 0x7FFFF + (a >> 20 & 1)) >> 20) - (120u << 3);
  const uint32_t is_small = static_cast<uint32_t>((static_cast<int32_t>(a) - (121 << 23)) >> 31);
  const uint32_t found = code ^ ((code ^ small) & is_small);
  return a >= mx::as_bits(448.0f) ? 0x7E : found;
}

inline float e4m3_value(uint32_t code) {
  const float small = static_cast<float>(static_cast<int32_t>(code)) * 0.001953125f;
  const uint32_t normal = (code << 20) + (120u << 23);
  const uint32_t is_small = static_cast<uint32_t>((static_cast<int32_t>(code) - 8) >> 31);
  return mx::as_float(normal ^ ((normal ^ mx::as_bits(small)) & is_small));
}

// Code of a block's scale, and by what its elements are multiplied, or divided.
struct Scale {
  uint32_t code;
  float factor;
};

template <ScaleRule R>
inline Scale scale_of(uint32_t bits, Whole whole, bool bf16) {
  const float bamax = mx::as_float(bits);
  if constexpr (R == ScaleRule::te) {
    const uint32_t code = e4m3_of(bamax * whole.encode);
    return {code, least(1.0f / (e4m3_value(code) * whole.scale), kLargest)};
  } else if constexpr (R == ScaleRule::torchao) {
    const float wanted = bamax / 6.0f / whole.scale;
    const uint32_t code = e4m3_of(wanted < 0.015625f ? 0.015625f : wanted);
    return {code, 1.0f / whole.scale / e4m3_value(code)};
  } else if constexpr (R == ScaleRule::modelopt) {
    float wanted = bamax / whole.encode;
    wanted = wanted == 0.0f ? 1.0f : wanted;
    const uint32_t code = e4m3_of(wanted < 0.001953125f ? 0.001953125f : wanted);
    return {code, e4m3_value(code) * whole.scale};
  } else {
    const float sixth = bamax / 6.0f;
    const uint32_t found = e4m3_of(whole.encode * (bf16 ? to_bf16(sixth) : sixth));
    const uint32_t code = found == 0 ? 0x20 : found;  // 0.125
    return {code, e4m3_value(code) / whole.encode};
  }
}

constexpr bool divides(ScaleRule r) {
  return r == ScaleRule::modelopt || r == ScaleRule::compressed_tensors;
}

template <ScaleRule R>
inline uint8_t encode(uint32_t x, float factor) {
  const float value = mx::as_float(x);
  const uint32_t y = mx::as_bits(divides(R) ? value / factor : value * factor) & kMagnitude;
  const int32_t a = static_cast<int32_t>((x & kMagnitude) == 0 ? 0 : y);
  // Halfway between two codes: to the even one.
  uint32_t code = 0;
  code += a > 0x3E800000;   // 0.25
  code += a >= 0x3F400000;  // 0.75
  code += a > 0x3FA00000;   // 1.25
  code += a >= 0x3FE00000;  // 1.75
  code += a > 0x40200000;   // 2.5
  code += a >= 0x40600000;  // 3.5
  code += a > 0x40A00000;   // 5
  uint32_t sign = x >> 28 & 8;
  if (divides(R)) sign = a == 0 ? 0 : sign;
  return static_cast<uint8_t>(code | sign);
}

template <class T, bool kF16>
inline void load_as(const Tile& tile, Values& out) {
  const T* x = static_cast<const T*>(tile.x);
  const auto bits = [](T v) -> uint32_t {
    if constexpr (sizeof(T) == 4) return v;
    return kF16 ? mx::f16_to_f32(static_cast<uint16_t>(v)) : static_cast<uint32_t>(v) << 16;
  };
  for (int r = 0; r < kRows; ++r) {
    const int n = r < tile.rows ? tile.cols : 0;
    const T* from = x + r * tile.row_stride;
    if (n == kCols && tile.col_stride == 1) {
      for (int c = 0; c < kCols; ++c) out[r][c] = bits(from[c]);
    } else {
      for (int c = 0; c < n; ++c) out[r][c] = bits(from[c * tile.col_stride]);
      std::memset(out[r] + n, 0, static_cast<size_t>(kCols - n) * 4);
    }
  }
}

// Zeros outside of the matrix.
inline void load(const Tile& tile, Values& out) {
  if (tile.dtype == DType::f32) return load_as<uint32_t, false>(tile, out);
  if (tile.dtype == DType::bf16) return load_as<uint16_t, false>(tile, out);
  load_as<uint16_t, true>(tile, out);
}

inline uint32_t finite(uint32_t bits) {
  const uint32_t a = bits & kMagnitude;
  return a < mx::kF32Inf ? a : 0;
}

// Of a row whose elements are adjacent. Magnitudes are ordered as their bits are.
template <class T, class I>
inline uint32_t row_largest(const void* x, int n, I inf) {
  constexpr I kAll = static_cast<I>(static_cast<T>(~T{0}) >> 1);
  const T* from = static_cast<const T*>(x);
  I most = 0;
  for (int i = 0; i < n; ++i) {
    const I a = static_cast<I>(static_cast<I>(from[i]) & kAll);
    const I number = a < inf ? a : I{0};
    most = number > most ? number : most;
  }
  return static_cast<uint32_t>(most);
}

void raise(const Tile& tile, uint32_t* largest, int64_t rows, int64_t cols) {
  if (cols == 0 && tile.col_stride == 1 && tile.dtype != DType::f16) {
    const int64_t bytes = tile.dtype == DType::f32 ? 4 : 2;
    for (int r = 0; r < tile.rows; ++r) {
      const char* x = static_cast<const char*>(tile.x) + r * tile.row_stride * bytes;
      const uint32_t found = bytes == 4
                                 ? row_largest<uint32_t, int32_t>(x, tile.cols, 0x7F800000)
                                 : row_largest<uint16_t, int16_t>(x, tile.cols, 0x7F80) << 16;
      uint32_t& to = largest[r * rows];
      to = found > to ? found : to;
    }
    return;
  }
  const InRoom<Values> room;
  Values& x = *room;
  load(tile, x);
  for (int r = 0; r < tile.rows; ++r) {
    for (int c = 0; c < tile.cols; ++c) {
      uint32_t& to = largest[r * rows + c * cols];
      const uint32_t a = finite(x[r][c]);
      to = a > to ? a : to;
    }
  }
}

// Scales of `n` blocks, a multiple of 16, of which the largest magnitudes are given (of NaN or Inf:
// those), by amax of their own or of all; and what the codes of those are masked with.
struct Scales {
  uint8_t code[kCols];
  float factor[kCols];
  uint8_t mask[kCols];
};

template <ScaleRule R>
inline void make_scales(const uint32_t* bamax, const uint32_t* amax, int64_t stride, bool bf16,
                        int n, Scales& out) {
  const Whole all = whole_of<R>(amax[0], bf16);
  for (int i = 0; i < n; ++i) {
    const bool number = bamax[i] < mx::kF32Inf;
    const Whole whole = stride == 0 ? all : whole_of<R>(amax[i], bf16);
    const Scale s = scale_of<R>(number ? bamax[i] : 0, whole, bf16);
    out.code[i] = static_cast<uint8_t>(number ? s.code : 0x7F);
    out.factor[i] = s.factor;
    out.mask[i] = number ? 0x0F : 0;
  }
}

// Codes of a block, or of blocks side by side.
template <ScaleRule R>
inline void encode_block(const uint32_t* x, float factor, uint8_t mask, uint8_t* codes) {
  for (int i = 0; i < kB; ++i) codes[i] = encode<R>(x[i], factor);
  if (mask == 0) std::memset(codes, 0, kB);
}
template <ScaleRule R>
inline void encode_row(const uint32_t* x, const Scales& s, uint8_t* codes) {
  for (int c = 0; c < kCols; ++c) codes[c] = encode<R>(x[c], s.factor[c]) & s.mask[c];
}

template <ScaleRule R>
void make_rows(const Tile& t, const Values& x, const Scales* square) {
  const int blocks = (t.cols + kB - 1) / kB;
  const bool bf16 = t.dtype == DType::bf16;
  for (int r = 0; r < t.rows; ++r) {
    Scales own;
    const Scales* s = square;
    if (square == nullptr) {
      uint32_t bamax[kBlocks];
      for (int b = 0; b < kBlocks; ++b) {
        uint32_t most = 0;
        for (int i = 0; i < kB; ++i) {
          const uint32_t a = x[r][b * kB + i] & kMagnitude;
          most = a > most ? a : most;
        }
        bamax[b] = most;
      }
      make_scales<R>(bamax, t.row_amax + r * t.row_amax_stride, 0, bf16, kBlocks, own);
      s = &own;
    }
    alignas(64) uint8_t codes[kCols], packed[kCols / 2];
    for (int b = 0; b < kBlocks; ++b) {
      encode_block<R>(x[r] + b * kB, s->factor[b], s->mask[b], codes + b * kB);
    }
    mx::pack_nibbles<kCols / 2>(codes, packed);
    std::memcpy(t.row_codes + r * t.row_code_stride, packed, static_cast<size_t>(t.cols + 1) / 2);
    if (square == nullptr || r == 0) {
      std::memcpy(t.row_scales + r * t.row_scale_stride, s->code, static_cast<size_t>(blocks));
    }
  }
}

template <ScaleRule R>
void make_columns(const Tile& t, const Values& x, const Scales* square) {
  Scales s;
  if (square == nullptr) {
    uint32_t bamax[kCols] = {}, amax[kCols] = {};
    for (int r = 0; r < kRows; ++r) {
      for (int c = 0; c < kCols; ++c) {
        const uint32_t a = x[r][c] & kMagnitude;
        bamax[c] = a > bamax[c] ? a : bamax[c];
      }
    }
    for (int c = 0; c < t.cols; ++c) amax[c] = t.col_amax[c * t.col_amax_stride];
    make_scales<R>(bamax, amax, t.col_amax_stride, t.dtype == DType::bf16, kCols, s);
    for (int c = 0; c < t.cols; ++c) t.col_scales[c * t.col_scale_stride] = s.code[c];
  } else {
    for (int c = 0; c < kCols; ++c) {
      s.factor[c] = square->factor[c / kB];
      s.mask[c] = square->mask[c / kB];
    }
    for (int b = 0; b * kB < t.cols; ++b) t.col_scales[b * t.col_scale_stride] = square->code[b];
  }
  alignas(64) uint8_t codes[kRows][kCols];
  for (int r = 0; r < kRows; ++r) encode_row<R>(x[r], s, codes[r]);
  if (!t.transposed) {
    for (int r = 0; r < t.rows; ++r) {
      std::memcpy(t.col_codes + r * t.col_code_stride, codes[r], static_cast<size_t>(t.cols));
    }
    return;
  }
  for (int c = 0; c < t.cols; ++c) {
    uint8_t column[kRows], packed[kRows / 2];
    for (int r = 0; r < kRows; ++r) column[r] = codes[r][c];
    mx::pack_nibbles<kRows / 2>(column, packed);
    std::memcpy(t.col_codes + c * t.col_code_stride, packed, static_cast<size_t>(t.rows + 1) / 2);
  }
}

template <ScaleRule R>
void quantize_as(const Tile& t) {
  const InRoom<Values> room;
  Values& x = *room;
  load(t, x);
  for (int r = 0; t.col_sum != nullptr && r < t.rows; ++r) {
    for (int c = 0; c < t.cols; ++c) t.col_sum[c] += mx::as_float(x[r][c]);
  }
  Scales square;
  if (t.square) {
    uint32_t bamax[kBlocks] = {};
    for (int r = 0; r < kRows; ++r) {
      for (int b = 0; b < kBlocks; ++b) {
        for (int i = 0; i < kB; ++i) {
          const uint32_t a = x[r][b * kB + i] & kMagnitude;
          bamax[b] = a > bamax[b] ? a : bamax[b];
        }
      }
    }
    const uint32_t* amax = t.row_codes != nullptr ? t.row_amax : t.col_amax;
    make_scales<R>(bamax, amax, 0, t.dtype == DType::bf16, kBlocks, square);
  }
  if (t.row_codes != nullptr) make_rows<R>(t, x, t.square ? &square : nullptr);
  if (t.col_codes != nullptr) make_columns<R>(t, x, t.square ? &square : nullptr);
}

void quantize(const Tile& tile, ScaleRule rule) {
  if (rule == ScaleRule::te) return quantize_as<ScaleRule::te>(tile);
  if (rule == ScaleRule::torchao) return quantize_as<ScaleRule::torchao>(tile);
  if (rule == ScaleRule::modelopt) return quantize_as<ScaleRule::modelopt>(tile);
  quantize_as<ScaleRule::compressed_tensors>(tile);
}

// ------------------------------------------------------------------------------------- and back
inline float e2m1_value(uint32_t code) {
  const uint32_t a = code & 7;
  const uint32_t normal = (a << 22) + (126u << 23);
  const uint32_t small = a * 0x3F000000;  // 0 or 0.5
  const uint32_t is_small = static_cast<uint32_t>((static_cast<int32_t>(a) - 2) >> 31);
  return mx::as_float((normal ^ ((normal ^ small) & is_small)) | (code & 8) << 28);
}
// With a sign, and NaN.
inline float scale_value(uint32_t byte) {
  const uint32_t a = byte & 0x7F;
  const uint32_t bits = a == 0x7F ? mx::kF32Nan : mx::as_bits(e4m3_value(a));
  return mx::as_float(bits | (byte & 0x80) << 24);
}

template <DType D>
inline void put(void* out, int64_t at, float value) {
  const uint32_t bits = mx::as_bits(value);
  if constexpr (D == DType::f32) {
    static_cast<uint32_t*>(out)[at] = bits;
  } else if constexpr (D == DType::bf16) {
    const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    const bool nan = (bits & kMagnitude) > mx::kF32Inf;
    static_cast<uint16_t*>(out)[at] =
        static_cast<uint16_t>(nan ? (bits >> 16 & 0x8000) | 0x7FC0 : rounded);
  } else {
    static_cast<uint16_t*>(out)[at] = mx::f32_to_f16(bits);
  }
}

template <DType D>
void decode_as(const Run& run) {
  for (int64_t i = 0; i < run.n; i += kB) {
    const int n = static_cast<int>(run.n - i < kB ? run.n - i : kB);
    uint8_t codes[kB] = {};
    float scale[kB], whole[kB] = {};
    if (run.packs) {
      uint8_t packed[kB / 2] = {};
      std::memcpy(packed, run.codes + i / 2, static_cast<size_t>(n + 1) / 2);
      mx::unpack_nibbles<kB / 2>(packed, codes);
    } else {
      std::memcpy(codes, run.codes + i, static_cast<size_t>(n));
    }
    if (run.scale_span == kB) {
      const float one = scale_value(run.scales[i / kB]);
      for (int j = 0; j < kB; ++j) scale[j] = one;
    } else {
      for (int j = 0; j < kB; ++j) scale[j] = j < n ? scale_value(run.scales[i + j]) : 0.0f;
    }
    if (run.whole_stride == 0) {
      for (int j = 0; j < kB; ++j) whole[j] = run.whole[0];
    } else {
      std::memcpy(whole, run.whole + i, static_cast<size_t>(n) * 4);
    }
    float values[kB];
    for (int j = 0; j < kB; ++j) values[j] = e2m1_value(codes[j]) * scale[j] * whole[j];
    if (n == kB) {
      for (int j = 0; j < kB; ++j) put<D>(run.out, i + j, values[j]);
    } else {
      for (int j = 0; j < n; ++j) put<D>(run.out, i + j, values[j]);
    }
  }
}

void decode(const Run& run) {
  if (run.dtype == DType::f32) return decode_as<DType::f32>(run);
  if (run.dtype == DType::bf16) return decode_as<DType::bf16>(run);
  decode_as<DType::f16>(run);
}

constexpr Level kLevel{raise, quantize, decode};

}  // namespace
}  // namespace te_mx::cpu::nvfp4
