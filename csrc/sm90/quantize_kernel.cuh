// Quantizes x [rows, cols] along both directions from one read, by tiles of 128 x 128, packing on
// the way out.
//
//   read the tile to shared memory, block maxima of the rows in registers
//   block maxima of the columns; scale bytes of both directions to shared memory
//   one thread a row and one a column: exponents, classes, what happens to each block
//   codes of the rows straight out, codes of the columns transposed through shared memory
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "mxtile/sm90/fp8.cuh"
#include "te_mx/sm90.h"
#include "tile_classes.cuh"

namespace te_mx::sm90 {

namespace tile = mxtile::sm90;

inline constexpr int kQuantizeThreads = 256;

// How an input type lies in 16-byte vectors and 2-element words, and how magnitudes compare as
// integers.
template <class T>
struct Input;

template <class T16, uint32_t kInfBits>
struct Input16 {
  static constexpr int kVectors = 1;  // uint4 for 8 elements
  using Word = uint32_t;              // two neighbours
  static constexpr uint32_t kInf = kInfBits;
};
template <>
struct Input<__nv_bfloat16> : Input16<__nv_bfloat16, 0x7F80> {
  static __device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
    return tile::max_magnitude_bf16x2(a, b);
  }
  static __device__ __forceinline__ float2 values(uint32_t w) {
    return {__uint_as_float(w << 16), __uint_as_float(w & 0xFFFF0000u)};
  }
  // NOTE: a product with a power of two is exact in bf16 but for values far below the smallest
  // code.
  static __device__ __forceinline__ float2 scaled(uint32_t w, uint32_t plan0, uint32_t plan1) {
    const uint32_t f = __byte_perm(plan0, plan1, 0x5410);
    const __nv_bfloat162 r = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&w),
                                     *reinterpret_cast<const __nv_bfloat162*>(&f));
    return values(*reinterpret_cast<const uint32_t*>(&r));
  }
  static __device__ __forceinline__ float from_bits(uint32_t b) { return __uint_as_float(b << 16); }
};
// Both values of a word by the factors of their plans.
__device__ __forceinline__ float2 scale_values(float2 v, uint32_t plan0, uint32_t plan1) {
  return {v.x * plan_factor(plan0), v.y * plan_factor(plan1)};
}
template <>
struct Input<__half> : Input16<__half, 0x7C00> {
  static __device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
    return tile::max_magnitude_f16x2(a, b);
  }
  static __device__ __forceinline__ float2 scaled(uint32_t w, uint32_t plan0, uint32_t plan1) {
    return scale_values(values(w), plan0, plan1);
  }
  static __device__ __forceinline__ float2 values(uint32_t w) {
    return __half22float2(*reinterpret_cast<const __half2*>(&w));
  }
  static __device__ __forceinline__ float from_bits(uint32_t b) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(b)));
  }
};
template <>
struct Input<float> {
  static constexpr int kVectors = 2;
  using Word = uint2;
  static constexpr uint32_t kInf = 0x7F800000u;
  static __device__ __forceinline__ uint2 larger(uint2 a, uint2 b) {
    return {max(a.x & 0x7FFFFFFFu, b.x & 0x7FFFFFFFu), max(a.y & 0x7FFFFFFFu, b.y & 0x7FFFFFFFu)};
  }
  static __device__ __forceinline__ float2 values(uint2 w) {
    return {__uint_as_float(w.x), __uint_as_float(w.y)};
  }
  static __device__ __forceinline__ float2 scaled(uint2 w, uint32_t plan0, uint32_t plan1) {
    return scale_values(values(w), plan0, plan1);
  }
  static __device__ __forceinline__ float from_bits(uint32_t b) { return __uint_as_float(b); }
};
__device__ __forceinline__ uint32_t low_half(uint32_t w) { return w & 0x7FFFu; }
__device__ __forceinline__ uint32_t high_half(uint32_t w) { return w >> 16 & 0x7FFFu; }
__device__ __forceinline__ uint32_t low_half(uint2 w) { return w.x; }
__device__ __forceinline__ uint32_t high_half(uint2 w) { return w.y; }

template <class T>
struct QuantizeSmem {
  T x[128][128];
  union {
    uint8_t codes[128][128];  // of the columns, [col][row], 16-byte chunks xored with (col / 2) % 8
    float sums[4][128];       // of the columns over 32 rows; done with before the codes come
  };
  TileScales row, col;
};

struct QuantizeParams {
  QuantizeArgs a;
  int row_tiles, col_tiles;
  int group;  // row tiles that are walked together
};

// Scale byte and counting flag of a block from the bits of its largest magnitude.
template <class T, tile::Fp8 kFmt>
__device__ __forceinline__ uint32_t block_entry(uint32_t bits, ScaleRule rule) {
  if (bits >= Input<T>::kInf) return 255;
  const float amax = Input<T>::from_bits(bits);
  const uint32_t e =
      rule == ScaleRule::rceil ? tile::e8m0_rceil<kFmt>(amax) : tile::e8m0_floor<kFmt>(amax);
  // NOTE: fp32 blocks below the smallest code have zero codes only, and must not count.
  const bool counts = (tile::fp8x2<kFmt>(amax * tile::e8m0_inverse(e), 0.0f) & 0x7F) != 0;
  return e | (counts ? kCounts : 0);
}

__device__ __forceinline__ void widen(uint32_t entry, uint32_t& high, uint32_t& low) {
  if (entry & kCounts) high = max(high, entry & 0xFF), low = min(low, entry & 0xFF);
}

// Rounding at once to shifted codes gives the bytes of rounding and shifting as long as the codes
// come out normal and did not saturate before. Where some do not, `code(i, plan)` makes the words
// again: unshifted, then shifted with a rounding of its own.
template <tile::Fp8 kFmt, int kWords, class Code>
__device__ __forceinline__ void make_codes(uint32_t (&out)[kWords], uint32_t plan,
                                           const Code& code) {
#pragma unroll
  for (int i = 0; i < kWords; ++i) out[i] = code(i, plan);
  const bool saturates = plan_saturates(plan);
  if (plan_shift(plan) != 0 && (saturates || tile::fp8x4_normal<kFmt>(out) != 0x80808080u)) {
    const tile::CodeShift<kFmt, false> down(plan_shift(plan));
#pragma unroll
    for (int i = 0; i < kWords; ++i) out[i] = down.rounded(code(i, plan_unshifted(plan)));
  }
  if (plan_nan(plan)) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) out[i] = 0x7F7F7F7Fu;
  }
}

template <class T>
__device__ __forceinline__ void load_tile(QuantizeSmem<T>& s, const QuantizeArgs& a, int64_t r0,
                                          int64_t c0, uint4 (&v)[8][Input<T>::kVectors]) {
  const int c = threadIdx.x % 16 * 8, r = threadIdx.x / 16;
  const T* const x = static_cast<const T*>(a.x);
  const bool vectors =
      a.x_stride * sizeof(T) % 16 == 0 && reinterpret_cast<uintptr_t>(a.x) % 16 == 0;
  if (vectors && c0 + 128 <= a.cols && r0 + 128 <= a.rows) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint4* const from =
          reinterpret_cast<const uint4*>(x + (r0 + r + 16 * i) * a.x_stride + c0 + c);
#pragma unroll
      for (int j = 0; j < Input<T>::kVectors; ++j) v[i][j] = __ldcs(from + j);
    }
  } else {
    for (int i = 0; i < 8; ++i) {
      for (int j = 0; j < 8; ++j) {
        const int64_t row = r0 + r + 16 * i, col = c0 + c + j;
        s.x[r + 16 * i][c + j] =
            row < a.rows && col < a.cols ? x[row * a.x_stride + col] : static_cast<T>(0.0f);
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int j = 0; j < Input<T>::kVectors; ++j) {
        v[i][j] = reinterpret_cast<const uint4*>(&s.x[r + 16 * i][c])[j];
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int j = 0; j < Input<T>::kVectors; ++j)
      reinterpret_cast<uint4*>(&s.x[r + 16 * i][c])[j] = v[i][j];
  }
}

// The largest magnitude of 8 neighbours, as bits.
template <class T>
__device__ __forceinline__ uint32_t largest_of_8(const uint4 (&v)[Input<T>::kVectors]) {
  using Word = typename Input<T>::Word;
  const Word* const w = reinterpret_cast<const Word*>(v);
  Word m = w[0];
#pragma unroll
  for (int i = 1; i < 4; ++i) m = Input<T>::larger(m, w[i]);
  return max(low_half(m), high_half(m));
}

// Block maxima of the rows. 4 lanes hold a block of each of 8 rows; they exchange halves of what
// they have, so that lane q of the four ends with rows 4(q % 2) + 2(q / 2) and the next one.
template <class T, tile::Fp8 kFmt>
__device__ __forceinline__ void scan_rows(QuantizeSmem<T>& s,
                                          const uint4 (&v)[8][Input<T>::kVectors], ScaleRule rule,
                                          uint32_t& high, uint32_t& low) {
  const int lane16 = threadIdx.x % 16, r = threadIdx.x / 16;
  const bool upper1 = lane16 & 1, upper2 = lane16 & 2;
  uint32_t bits[8], half[4], mine[2];
#pragma unroll
  for (int i = 0; i < 8; ++i) bits[i] = largest_of_8<T>(v[i]);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t other = __shfl_xor_sync(~0u, upper1 ? bits[i] : bits[i + 4], 1);
    half[i] = max(upper1 ? bits[i + 4] : bits[i], other);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t other = __shfl_xor_sync(~0u, upper2 ? half[i] : half[i + 2], 2);
    mine[i] = max(upper2 ? half[i + 2] : half[i], other);
  }
  high = 0, low = 256;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t entry = block_entry<T, kFmt>(mine[i], rule);
    widen(entry, high, low);
    s.row.add_block(r + 16 * (4 * (lane16 & 1) + (lane16 & 2) + i), lane16 / 4, entry);
  }
}

// Block maxima and sums of two neighbouring columns over 32 rows.
template <class T, tile::Fp8 kFmt, bool kSum>
__device__ __forceinline__ void scan_cols(QuantizeSmem<T>& s, const QuantizeArgs& a) {
  using Word = typename Input<T>::Word;
  const int c = threadIdx.x % 64 * 2, b = threadIdx.x / 64;
  Word m{};
  float2 sum{0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const Word w = *reinterpret_cast<const Word*>(&s.x[32 * b + i][c]);
    m = Input<T>::larger(m, w);
    if constexpr (kSum) {
      const float2 f = Input<T>::values(w);
      sum.x += f.x, sum.y += f.y;
    }
  }
  const uint32_t e0 = block_entry<T, kFmt>(low_half(m), a.rule),
                 e1 = block_entry<T, kFmt>(high_half(m), a.rule);
  s.col.add_block(c, b, e0);
  s.col.add_block(c + 1, b, e1);
  uint32_t high = 0, low = 256;
  widen(e0, high, low);
  widen(e1, high, low);
  s.col.add_range(high, low);
  if constexpr (kSum) s.sums[b][c] = sum.x, s.sums[b][c + 1] = sum.y;
}

// kFull: the tile lies inside x, and the codes can be written in vectors.
template <class T, tile::Fp8 kFmt, bool kFull>
__device__ __forceinline__ void write_rows(const QuantizeSmem<T>& s, const QuantizeArgs& a,
                                           int64_t r0, int64_t c0, uint8_t* codes, int64_t ld) {
  using Word = typename Input<T>::Word;
  const int lane16 = threadIdx.x % 16, c = lane16 * 8, r = threadIdx.x / 16;
  uint8_t* to = codes + (r0 + r) * ld + c0 + c;
#pragma unroll
  for (int i = 0; i < 8; ++i, to += 16 * ld) {
    const uint32_t plan = s.row.plans[r + 16 * i][lane16 / 4];
    uint4 v[Input<T>::kVectors];
#pragma unroll
    for (int j = 0; j < Input<T>::kVectors; ++j)
      v[j] = reinterpret_cast<const uint4*>(&s.x[r + 16 * i][c])[j];
    const Word* const w = reinterpret_cast<const Word*>(v);
    uint32_t out[2];
    make_codes<kFmt>(out, plan, [&](int j, uint32_t f) {
      const float2 x = Input<T>::scaled(w[2 * j], f, f), y = Input<T>::scaled(w[2 * j + 1], f, f);
      return tile::fp8x4<kFmt>(x.x, x.y, y.x, y.y);
    });
    if constexpr (kFull) {
      *reinterpret_cast<uint2*>(to) = make_uint2(out[0], out[1]);
    } else if (r0 + r + 16 * i < a.rows) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (c0 + c + j < a.cols) to[j] = static_cast<uint8_t>(out[j / 4] >> (j % 4 * 8));
      }
    }
  }
}

template <class T, tile::Fp8 kFmt>
__device__ __forceinline__ void stage_cols(QuantizeSmem<T>& s) {
  using Word = typename Input<T>::Word;
  const int pair = threadIdx.x % 64, c = 2 * pair, b = threadIdx.x / 64;
  const uint32_t plan0 = s.col.plans[c][b], plan1 = s.col.plans[c + 1][b];
  const bool shifts = plan_shift(plan0) | plan_shift(plan1), saturates = plan_saturates(plan0);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t w0[4], w1[4];
    const auto make = [&](int q, uint32_t f0, uint32_t f1) {
      float2 v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        v[i] = Input<T>::scaled(
            *reinterpret_cast<const Word*>(&s.x[32 * b + 16 * half + 4 * q + i][c]), f0, f1);
      }
      w0[q] = tile::fp8x4<kFmt>(v[0].x, v[1].x, v[2].x, v[3].x);
      w1[q] = tile::fp8x4<kFmt>(v[0].y, v[1].y, v[2].y, v[3].y);
    };
#pragma unroll
    for (int q = 0; q < 4; ++q) make(q, plan0, plan1);
    // As in make_codes, for two columns at once.
    if (shifts && (saturates ||
                   (tile::fp8x4_normal<kFmt>(w0) & tile::fp8x4_normal<kFmt>(w1)) != 0x80808080u)) {
      const tile::CodeShift<kFmt, false> down0(plan_shift(plan0)), down1(plan_shift(plan1));
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        make(q, plan_unshifted(plan0), plan_unshifted(plan1));
        w0[q] = down0.rounded(w0[q]), w1[q] = down1.rounded(w1[q]);
      }
    }
    if (plan_nan(plan0)) w0[0] = w0[1] = w0[2] = w0[3] = 0x7F7F7F7Fu;
    if (plan_nan(plan1)) w1[0] = w1[1] = w1[2] = w1[3] = 0x7F7F7F7Fu;
    const int chunk = (2 * b + half) ^ (pair & 7);
    *reinterpret_cast<uint4*>(&s.codes[c][16 * chunk]) = make_uint4(w0[0], w0[1], w0[2], w0[3]);
    *reinterpret_cast<uint4*>(&s.codes[c + 1][16 * chunk]) = make_uint4(w1[0], w1[1], w1[2], w1[3]);
  }
}

template <class T, bool kFull>
__device__ __forceinline__ void write_cols(const QuantizeSmem<T>& s, const QuantizeArgs& a,
                                           int64_t r0, int64_t c0, uint8_t* codes, int64_t ld) {
  const int chunk = threadIdx.x % 8;
  const int64_t row = r0 + 16 * chunk;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int c = threadIdx.x / 8 + 32 * i;
    const uint8_t* const from = &s.codes[c][16 * (chunk ^ (c / 2 & 7))];
    uint8_t* const to = codes + (c0 + c) * ld + row;
    if constexpr (kFull) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    } else if (c0 + c < a.cols) {
      for (int j = 0; j < 16 && row + j < a.rows; ++j) to[j] = from[j];
    }
  }
}

// Plain scale bytes of row r of a direction: up to four of `blocks` a row.
__device__ __forceinline__ void write_plain_scales(const TileScales& s, int r, uint8_t* to,
                                                   int64_t row, int64_t rows, int64_t block0,
                                                   int64_t blocks) {
  if (row >= rows) return;
  for (int b = 0; b < 4 && block0 + b < blocks; ++b) {
    to[row * blocks + block0 + b] = static_cast<uint8_t>(s.blocks[r][b] & 0xFF);
  }
}

// Packed words of one direction: tile t of `tiles`, step k.
__device__ __forceinline__ void write_packed_scales(const TileScales& s, int cls, int r,
                                                    uint32_t* scales, int64_t k, int64_t t,
                                                    int64_t tiles) {
  const int64_t padded = (tiles + 1) / 2 * 2;
  uint32_t* const words = scales + (k * padded + t) * kScaleWords;
  s.write_words(cls, r, words);
  if (t == tiles - 1 && padded != tiles) write_empty_tile(r, words + kScaleWords);
}

template <class T, tile::Fp8 kFmt>
__global__ void __launch_bounds__(kQuantizeThreads)
    quantize_kernel(const __grid_constant__ QuantizeParams p) {
  extern __shared__ __align__(16) char raw[];
  QuantizeSmem<T>& s = *reinterpret_cast<QuantizeSmem<T>*>(raw);
  const QuantizeArgs& a = p.a;
  const int per_group = p.group * p.col_tiles, group = blockIdx.x / per_group,
            inside = blockIdx.x - group * per_group;
  const int first = group * p.group, height = min(p.group, p.row_tiles - first);
  const int ct = inside / height, rt = first + inside - ct * height;
  const int64_t r0 = static_cast<int64_t>(rt) * 128, c0 = static_cast<int64_t>(ct) * 128;
  const bool row_packed = a.row_packed.codes != nullptr, col_packed = a.col_packed.codes != nullptr;
  const bool rows_wanted = row_packed || a.row_codes != nullptr;
  const bool cols_wanted = col_packed || a.col_codes != nullptr;

  if (threadIdx.x == 0) s.row.clear(), s.col.clear();
  uint32_t high, low;
  {
    uint4 v[8][Input<T>::kVectors];
    load_tile<T>(s, a, r0, c0, v);
    scan_rows<T, kFmt>(s, v, a.rule, high, low);
  }
  __syncthreads();
  s.row.add_range(high, low);
  if (a.col_sum != nullptr) {
    scan_cols<T, kFmt, true>(s, a);
  } else if (cols_wanted) {
    scan_cols<T, kFmt, false>(s, a);
  }
  __syncthreads();
  const int r = threadIdx.x % 128;
  const bool row_half = threadIdx.x < 128;
  if (row_half ? row_packed : col_packed) (row_half ? s.row : s.col).examine(r, a.spread);
  if (a.col_sum != nullptr && row_half && c0 + r < a.cols) {
    a.col_sum_ws[static_cast<int64_t>(rt) * a.cols + c0 + r] =
        (s.sums[0][r] + s.sums[1][r]) + (s.sums[2][r] + s.sums[3][r]);
  }
  __syncthreads();
  const int row_class = row_packed ? s.row.tile_class(a.spread) : 2;
  const int col_class = col_packed ? s.col.tile_class(a.spread) : 2;
  if (row_half) {
    if (row_packed) {
      write_packed_scales(s.row, row_class, r, a.row_packed.scales, ct, rt, p.row_tiles);
    } else if (rows_wanted) {
      write_plain_scales(s.row, r, a.row_scales, r0 + r, a.rows, ct * 4, (a.cols + 31) / 32);
    }
    s.row.plan(row_class, r, a.rule == ScaleRule::floor);
  } else {
    if (col_packed) {
      write_packed_scales(s.col, col_class, r, a.col_packed.scales, rt, ct, p.col_tiles);
    } else if (cols_wanted) {
      write_plain_scales(s.col, r, a.col_scales, c0 + r, a.cols, rt * 4, (a.rows + 31) / 32);
    }
    s.col.plan(col_class, r, a.rule == ScaleRule::floor);
  }
  __syncthreads();
  const bool inside_x = r0 + 128 <= a.rows && c0 + 128 <= a.cols;
  if (cols_wanted) stage_cols<T, kFmt>(s);
  if (rows_wanted) {
    uint8_t* const codes = row_packed ? a.row_packed.codes : a.row_codes;
    const int64_t ld = row_packed ? packed_ld(a.cols) : a.cols;
    if (inside_x && ld % 8 == 0 && reinterpret_cast<uintptr_t>(codes) % 8 == 0) {
      write_rows<T, kFmt, true>(s, a, r0, c0, codes, ld);
    } else {
      write_rows<T, kFmt, false>(s, a, r0, c0, codes, ld);
    }
  }
  if (!cols_wanted) return;
  __syncthreads();
  uint8_t* const codes = col_packed ? a.col_packed.codes : a.col_codes;
  const int64_t ld = col_packed ? packed_ld(a.rows) : a.rows;
  if (inside_x && ld % 16 == 0 && reinterpret_cast<uintptr_t>(codes) % 16 == 0) {
    write_cols<T, true>(s, a, r0, c0, codes, ld);
  } else {
    write_cols<T, false>(s, a, r0, c0, codes, ld);
  }
}

}  // namespace te_mx::sm90
