// Codes to fp32 panels: panel p holds rows [p * width, (p + 1) * width) as [k][width], values
// relative to the row exponents (code * 2^(byte - E_row + 37)), rows past the end as zeros.
#pragma once

#include "common/parallel.h"
#include "gemm/gemm_internal.hpp"
#include "mxtile/mx/e4m3_values.hpp"
#include "mxtile/simd/decode.hpp"
#include "mxtile/simd/transpose.hpp"

namespace te_mx::cpu::f32 {

// What E_row - 127 - 37 as a float makes of a scale byte: the factor of that block's codes.
[[gnu::always_inline]] static inline float row_factor(uint8_t byte, float row_exponent) {
  return mxtile::simd::block_factor(byte, static_cast<int>(row_exponent) + 127);
}

// out = codes[0..n) * factor and zeros up to 32, in the order of BlockDecoder::element.
template <class S, class E>
[[gnu::always_inline]] static inline void decode_block(const uint8_t* codes, int n, float factor,
                                                       float* out) {
  uint8_t whole[kBlock] = {};
  if (n < kBlock) {
    for (int i = 0; i < n; ++i) whole[i] = codes[i];
    codes = whole;
  }
  mxtile::simd::BlockDecoder<S, E>::run(codes, factor, out);
}

using mxtile::mx::kScaleValues;

// As decode_block(), of NVFP4 from k on, a multiple of 32.
template <class S, class E>
[[gnu::always_inline]] static inline void decode_small(const StridedOperand& o,
                                                       const uint8_t* codes, int n, int64_t row,
                                                       int64_t k, float* out) {
  uint8_t whole[kBlock] = {};
  if (n < kBlock) {
    for (int i = 0; i < n; ++i) whole[i] = codes[i];
    codes = whole;
  }
  const float first = kScaleValues.of[*o.small_scale(row, k / kSmallBlock)];
  const float second =
      n > kSmallBlock ? kScaleValues.of[*o.small_scale(row, k / kSmallBlock + 1)] : 0;
  mxtile::simd::decode_halves<S, E>(codes, first, second, out);
}

// panel[element(p)][r0 .. r0 + lanes) = block[r][p] for the elements below n: squares of lanes,
// transposed.
template <class S, class E, int Width>
[[gnu::always_inline]] static inline void transpose_block(const float (*block)[kBlock], int n,
                                                          int r0, float* panel) {
  constexpr int kLanes = S::kLanes;
  for (int p0 = 0; p0 < kBlock; p0 += kLanes) {
    typename S::F x[kLanes];
    for (int r = 0; r < kLanes; ++r) x[r] = S::load(block[r] + p0);
    mxtile::simd::transpose<S>(x);
    for (int l = 0; l < kLanes; ++l) {
      const int k = mxtile::simd::BlockDecoder<S, E>::element(p0 + l);
      if (k >= n) continue;
      float* out = panel + k * Width + r0;
      Width < kLanes ? S::store_part(out, x[l], Width) : S::store(out, x[l]);
    }
  }
}

// One panel of an operand whose k is contiguous.
template <class S, class E, int Width>
void pack_panel_k_last(const StridedOperand& o, const float* exponents, int64_t row0,
                       float* panel) {
  static_assert(Width < S::kLanes || Width % S::kLanes == 0);
  constexpr int kRows = (Width + S::kLanes - 1) / S::kLanes * S::kLanes;
  const int rows = static_cast<int>(o.rows - row0 < Width ? o.rows - row0 : Width);
  alignas(64) float block[kRows][kBlock] = {};
  for (int64_t k0 = 0; k0 < o.k; k0 += kBlock) {
    const int n = static_cast<int>(o.k - k0 < kBlock ? o.k - k0 : kBlock);
    for (int r = 0; r < rows; ++r) {
      const int64_t row = row0 + r;
      uint8_t room[kBlock];
      const uint8_t* codes = codes_of<kBlock>(o, row, k0, n, room);
      if (o.e4m3) {
        decode_small<S, E>(o, codes, n, row, k0, block[r]);
        continue;
      }
      const uint8_t byte = o.scales[row * o.scale_row_stride + k0 / kBlock * o.scale_block_stride];
      decode_block<S, E>(codes, n, row_factor(byte, exponents[row]), block[r]);
    }
    for (int r = 0; r < Width; r += S::kLanes) {
      if (n == kBlock) {
        transpose_block<S, E, Width>(block + r, kBlock, r, panel + k0 * Width);
      } else {
        transpose_block<S, E, Width>(block + r, n, r, panel + k0 * Width);
      }
    }
  }
}

// One panel of an operand whose rows are contiguous (blocks run along the strided k).
template <class S, class E, int Width>
void pack_panel_k_first(const StridedOperand& o, const float* exponents, int64_t row0,
                        float* panel) {
  constexpr int kStep = Width < S::kLanes ? Width : S::kLanes;
  const int rows = static_cast<int>(o.rows - row0 < Width ? o.rows - row0 : Width);
  alignas(64) float factors[Width + S::kLanes] = {};
  uint8_t part[Width + S::kLanes] = {};
  for (int64_t k = 0; k < o.k; ++k) {
    if (o.e4m3 && k % kSmallBlock == 0) {
      for (int r = 0; r < rows; ++r)
        factors[r] = kScaleValues.of[*o.small_scale(row0 + r, k / kSmallBlock)];
    } else if (!o.e4m3 && k % kBlock == 0) {
      const uint8_t* scales = o.scales + k / kBlock * o.scale_block_stride + row0;
      for (int r = 0; r < rows; ++r) factors[r] = row_factor(scales[r], exponents[row0 + r]);
    }
    const uint8_t* codes = o.codes + k * o.code_k_stride + row0;
    if (rows < Width || Width < S::kLanes) {
      for (int r = 0; r < rows; ++r) part[r] = codes[r];
      codes = part;
    }
    for (int r = 0; r < Width; r += kStep) {
      const auto x =
          S::mul(mxtile::simd::decode<S, E>(S::load_u8(codes + r)), S::load(factors + r));
      if constexpr (kStep == S::kLanes) {
        S::store(panel + k * Width + r, x);
      } else {
        S::store_part(panel + k * Width + r, x, kStep);
      }
    }
  }
}

template <class S, class E, int Width>
void pack_panels_as(const StridedOperand& o, const float* exponents, float* panels, int threads) {
  parallel_for(threads, ceil_div(o.rows, Width), [&](int64_t p) {
    float* panel = panels + p * Width * o.k;
    if (o.code_k_stride == 1) {
      pack_panel_k_last<S, E, Width>(o, exponents, p * Width, panel);
    } else {
      pack_panel_k_first<S, E, Width>(o, exponents, p * Width, panel);
    }
  });
}

template <class S, int Width>
void pack_panels(const StridedOperand& o, const float* exponents, float* panels, int threads) {
  switch (o.element) {
    case Element::e4m3:
      return pack_panels_as<S, mxtile::mx::E4M3, Width>(o, exponents, panels, threads);
    case Element::e5m2:
      return pack_panels_as<S, mxtile::mx::E5M2, Width>(o, exponents, panels, threads);
    case Element::e4m3fnuz:
      return pack_panels_as<S, mxtile::mx::E4M3FNUZ, Width>(o, exponents, panels, threads);
    case Element::e2m1:
      return pack_panels_as<S, mxtile::mx::E2M1, Width>(o, exponents, panels, threads);
    default:
      return pack_panels_as<S, mxtile::mx::E5M2FNUZ, Width>(o, exponents, panels, threads);
  }
}

}  // namespace te_mx::cpu::f32
