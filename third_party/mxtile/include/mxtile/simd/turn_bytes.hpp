// Sixteen rows of eight bytes as eight columns, and the other way round, with SSE2, which every
// x86-64 has.
#pragma once

#include <cstdint>

#include "mxtile/simd/intrinsics.hpp"

#if defined(__SSE2__)
#define MXTILE_TURNS_BYTES 1

namespace mxtile::simd {

// out[c * out_stride + r] = in[r * in_stride + c]. After four rounds of unpacking a register has a
// column.
static inline void turn_bytes_16x8(const uint8_t* in, int64_t in_stride, uint8_t* out,
                                   int64_t out_stride) {
  __m128i x[8], y[8];
  const auto load = [&](int row) {
    return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(in + row * in_stride));
  };
  // Register i: rows i and i + 8, a byte of each in turn.
  for (int i = 0; i < 8; ++i) x[i] = _mm_unpacklo_epi8(load(i), load(i + 8));
  // 2 i + h: rows i, i + 4, i + 8, i + 12 of columns 4 h to 4 h + 3.
  for (int i = 0; i < 4; ++i) {
    y[2 * i] = _mm_unpacklo_epi8(x[i], x[i + 4]);
    y[2 * i + 1] = _mm_unpackhi_epi8(x[i], x[i + 4]);
  }
  // 4 i + q: every other row from i on, of columns 2 q and 2 q + 1.
  for (int i = 0; i < 2; ++i) {
    for (int h = 0; h < 2; ++h) {
      x[4 * i + 2 * h] = _mm_unpacklo_epi8(y[2 * i + h], y[2 * (i + 2) + h]);
      x[4 * i + 2 * h + 1] = _mm_unpackhi_epi8(y[2 * i + h], y[2 * (i + 2) + h]);
    }
  }
  for (int q = 0; q < 4; ++q) {
    const __m128i low = _mm_unpacklo_epi8(x[q], x[4 + q]), high = _mm_unpackhi_epi8(x[q], x[4 + q]);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 2 * q * out_stride), low);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + (2 * q + 1) * out_stride), high);
  }
}

// Eight rows of 16 bytes as 16 columns: out[8 * c + r] = in[r * in_stride + c].
static inline void turn_bytes_8x16(const uint8_t* in, int64_t in_stride, uint8_t* out) {
  __m128i x[8], y[8];
  for (int i = 0; i < 8; ++i) {
    y[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i * in_stride));
  }
  // Rows i and i + 4 in turn; then every other row; then all, of two columns.
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = _mm_unpacklo_epi8(y[i], y[i + 4]), x[2 * i + 1] = _mm_unpackhi_epi8(y[i], y[i + 4]);
  }
  for (int i = 0; i < 2; ++i) {
    for (int h = 0; h < 2; ++h) {
      y[4 * i + 2 * h] = _mm_unpacklo_epi8(x[2 * i + h], x[2 * i + 4 + h]);
      y[4 * i + 2 * h + 1] = _mm_unpackhi_epi8(x[2 * i + h], x[2 * i + 4 + h]);
    }
  }
  auto* const to = reinterpret_cast<__m128i*>(out);
  for (int q = 0; q < 4; ++q) {
    _mm_storeu_si128(to + 2 * q, _mm_unpacklo_epi8(y[q], y[4 + q]));
    _mm_storeu_si128(to + 2 * q + 1, _mm_unpackhi_epi8(y[q], y[4 + q]));
  }
}

}  // namespace mxtile::simd

#endif
