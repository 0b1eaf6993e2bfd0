// The quantizer's second half: codes of both directions, and writing them and plain scales.
#pragma once

#include "quantize/quantize_scan.cuh"

namespace te_mx::sm90 {

// Four codes of two words by the factors of each, not of MXFP4.
template <class T, tile::Fp8 kFmt>
__device__ __forceinline__ uint32_t codes_of(typename Input<T>::Word w0, typename Input<T>::Word w1,
                                             uint32_t f0, uint32_t f1) {
  const float2 a = Input<T>::scaled(w0, f0), b = Input<T>::scaled(w1, f1);
  return tile::fp8x4<kFmt>(a.x, a.y, b.x, b.y);
}

// The same of MXFP4: codes of E4M3 (fp4.cuh).
template <class T>
__device__ __forceinline__ uint32_t fp4_codes_of(typename Input<T>::Word w0,
                                                 typename Input<T>::Word w1,
                                                 const tile::Fp4Rounding& r0,
                                                 const tile::Fp4Rounding& r1) {
  float2 a, b;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    a = Input<T>::values(tile::round_to_fp4(w0, r0));
    b = Input<T>::values(tile::round_to_fp4(w1, r1));
  } else {
    const auto rounded = [](typename Input<T>::Word w, const tile::Fp4Rounding& by) -> float2 {
      const float2 v = Input<T>::scaled(w, by.factor);
      return {tile::round_to_fp4(v.x, by.magic << 16), tile::round_to_fp4(v.y, by.magic)};
    };
    a = rounded(w0, r0), b = rounded(w1, r1);
  }
  return tile::fp8x4<tile::Fp8::e4m3>(a.x, a.y, b.x, b.y);
}

// How the kernel rounds to MXFP4: to nearest even. Another policy is in quantize_random.cu.
struct Nearest {
  struct Words {};  // of row k of a thread's elements
  __device__ __forceinline__ Words words(int) const { return {}; }

  // Codes of 8 elements of a row, two by each rounding.
  template <class T>
  static __device__ __forceinline__ uint2 fp4(const typename Input<T>::Word (&x)[4],
                                              const tile::Fp4Rounding& r0,
                                              const tile::Fp4Rounding& r1,
                                              const tile::Fp4Rounding& r2,
                                              const tile::Fp4Rounding& r3, const Words&) {
    return {fp4_codes_of<T>(x[0], x[1], r0, r1), fp4_codes_of<T>(x[2], x[3], r2, r3)};
  }
};

// How the codes of a direction follow from its own rounding. E + 1 of two blocks: the tile's in
// both halves, or each row's own. Of MXFP4 it is what they share + 1.
struct Shifts {
  bool any;
  uint32_t tile;
  const uint16_t* targets;  // [128] E, or null

  __device__ __forceinline__ Shifts(bool any, uint32_t tile, const uint16_t* targets)
      : any(any), tile(tile), targets(targets) {}
  __device__ __forceinline__ Shifts(const TileScales& s, uint32_t exponent, bool packed, int cls)
      : any(packed && cls < 2),
        tile((exponent + 1) * 0x10001u),
        targets(cls == 1 ? s.target : nullptr) {}

  // E + 1 of row r twice.
  __device__ __forceinline__ uint32_t of_row(int r) const {
    return targets == nullptr ? tile : (targets[r] + 1) * 0x10001u;
  }
  // Those of columns c to c + 7.
  __device__ __forceinline__ uint4 of_cols(int c) const {
    uint4 t = make_uint4(tile, tile, tile, tile);
    if (targets != nullptr) {
      t = *reinterpret_cast<const uint4*>(targets + c);
      t.x += 0x10001u, t.y += 0x10001u, t.z += 0x10001u, t.w += 0x10001u;
    }
    return t;
  }
  __device__ __forceinline__ tile::Fp4Rounding fp4(uint32_t factors, uint32_t target) const {
    return any ? tile::fp4_rounding(factors, target) : tile::fp4_rounding(factors);
  }
};

// Codes of 8 elements of one row, rounded to the block's own scale first: one block.
template <class T, tile::Fp8 kFmt, class Rounds = Nearest>
__device__ __forceinline__ uint2 row_codes(const typename Input<T>::Word (&x)[4],
                                           const BlockFactors& f, int b, int r,
                                           const Shifts& shifts,
                                           const typename Rounds::Words& words = {}) {
  const uint32_t scale = f.of[b][r] * 0x10001u;
  if constexpr (kIsFp4<kFmt>) {
    const tile::Fp4Rounding by = shifts.fp4(scale, shifts.of_row(r));
    return Rounds::template fp4<T>(x, by, by, by, by, words);
  } else {
    uint2 w = {codes_of<T, kFmt>(x[0], x[1], scale, scale),
               codes_of<T, kFmt>(x[2], x[3], scale, scale)};
    if (shifts.any) {
      const uint32_t down = tile::half2_shifts(scale, shifts.of_row(r));
      w = {tile::fp8x4_times<kFmt>(w.x, down, down), tile::fp8x4_times<kFmt>(w.y, down, down)};
    }
    return w;
  }
}

// The same along the columns: eight blocks.
template <class T, tile::Fp8 kFmt, class Rounds = Nearest>
__device__ __forceinline__ uint2 col_codes(const typename Input<T>::Word (&x)[4],
                                           const BlockFactors& f, int b, int c,
                                           const Shifts& shifts,
                                           const typename Rounds::Words& words = {}) {
  const uint4 scale = *reinterpret_cast<const uint4*>(&f.of[b][c]);
  if constexpr (kIsFp4<kFmt>) {
    const uint4 t = shifts.of_cols(c);
    return Rounds::template fp4<T>(x, shifts.fp4(scale.x, t.x), shifts.fp4(scale.y, t.y),
                                   shifts.fp4(scale.z, t.z), shifts.fp4(scale.w, t.w), words);
  } else {
    uint2 w = {codes_of<T, kFmt>(x[0], x[1], scale.x, scale.y),
               codes_of<T, kFmt>(x[2], x[3], scale.z, scale.w)};
    if (shifts.any) {
      const uint4 t = shifts.of_cols(c);
      w = {tile::fp8x4_times<kFmt>(w.x, tile::half2_shifts(scale.x, t.x),
                                   tile::half2_shifts(scale.y, t.y)),
           tile::fp8x4_times<kFmt>(w.y, tile::half2_shifts(scale.z, t.z),
                                   tile::half2_shifts(scale.w, t.w))};
    }
    return w;
  }
}

// Writes the codes of a thread's rows where they lie as x does.
struct RowWriter {
  uint8_t* to;
  int64_t ld;
  int rows, width;  // of what lies at and after `to`

  __device__ __forceinline__ RowWriter(const CodesOut& out, const Tile& t, const Place& at)
      : to(out.codes + (t.r0 + at.r) * out.ld + t.c0() + at.c), ld(out.ld) {
    width = (t.last_col ? out.last_width : 128) - at.c;
    rows = width > 0 ? t.rows - at.r : 0;
  }

  __device__ __forceinline__ void write(int k, uint2 w) {
    if (k < rows) *reinterpret_cast<uint2*>(to) = w;
    to += ld;
  }
  __device__ __forceinline__ void write_bytes(int k, uint2 w) {
    const uint64_t codes = w.x | static_cast<uint64_t>(w.y) << 32;
#pragma unroll 1
    for (int j = 0; j < 8 && j < width && k < rows; ++j)
      to[j] = static_cast<uint8_t>(codes >> (8 * j));
    to += ld;
  }
};

// Writes the rows code(k) of a thread; without kPlain always in vectors.
template <bool kPlain, class Code>
__device__ __forceinline__ void write_rows(const CodesOut& out, const Tile& t, const Place& at,
                                           const Code& code) {
  RowWriter writer(out, t, at);
  if (!kPlain || out.vectors) {
#pragma unroll
    for (int k = 0; k < 8; ++k) writer.write(k, code(k));
  } else {
#pragma unroll
    for (int k = 0; k < 8; ++k) writer.write_bytes(k, code(k));
  }
}

// Writes the plain codes(k) of MXFP4 of a thread's rows, two a byte; codes are those of E4M3.
template <class Code>
__device__ __forceinline__ void write_nibbles(const CodesOut& out, const Tile& t, const Place& at,
                                              const Code& code) {
  const int width = (t.last_col ? out.last_width : 64) - at.c / 2;
  const int rows = width > 0 ? t.rows - at.r : 0;
  uint8_t* to = out.codes + (t.r0 + at.r) * out.ld + (t.c0() + at.c) / 2;
#pragma unroll
  for (int k = 0; k < 8; ++k, to += out.ld) {
    const uint2 w = code(k);
    const uint32_t four = tile::pack_nibbles(tile::fp4_of_fp8x4(w.x), tile::fp4_of_fp8x4(w.y));
    if (k >= rows) continue;
    if (out.vectors) {
      *reinterpret_cast<uint32_t*>(to) = four;
    } else {
#pragma unroll 1
      for (int j = 0; j < 4 && j < width; ++j) to[j] = static_cast<uint8_t>(four >> (8 * j));
    }
  }
}

// Transposes 8 x 8 codes, w[k] of row k, into the columns' place in shared memory.
__device__ __forceinline__ void stage_cols(uint8_t (&codes)[128][128], uint2 (&w)[8],
                                           const Place& at) {
  tile::transpose_bytes(w[0].x, w[1].x, w[2].x, w[3].x);
  tile::transpose_bytes(w[4].x, w[5].x, w[6].x, w[7].x);
  tile::transpose_bytes(w[0].y, w[1].y, w[2].y, w[3].y);
  tile::transpose_bytes(w[4].y, w[5].y, w[6].y, w[7].y);
  uint8_t* const to = &codes[at.c][16 * (at.r / 16 ^ at.c / 8 % 8) + at.r % 16];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    *reinterpret_cast<uint2*>(to + 128 * j) = make_uint2(w[j].x, w[4 + j].x);
    *reinterpret_cast<uint2*>(to + 128 * (j + 4)) = make_uint2(w[j].y, w[4 + j].y);
  }
}

// Writes the staged codes; their rows are the columns of the tile. Without kPlain always in
// vectors.
template <bool kPlain>
__device__ __forceinline__ void write_cols(const uint8_t (&codes)[128][128], const CodesOut& out,
                                           const Tile& t) {
  const int chunk = threadIdx.x % 8, c = threadIdx.x / 8;
  const int width = (t.last_row ? out.last_width : 128) - 16 * chunk;
  const int count = width > 0 ? t.cols - c : 0;
  const uint8_t* const from = &codes[c][0];
  uint8_t* to = out.codes + (t.c0() + c) * out.ld + t.k0() + 16 * chunk;
  const auto place = [&](int i) { return from + 128 * i + 16 * (chunk ^ (c + i) / 8 % 8); };
  if (!kPlain || out.vectors) {
    uint4 w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = *reinterpret_cast<const uint4*>(place(32 * i));
#pragma unroll
    for (int i = 0; i < 4; ++i, to += 32 * out.ld) {
      if (32 * i < count) *reinterpret_cast<uint4*>(to) = w[i];
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < count; i += 32, to += 32 * out.ld) {
#pragma unroll 1
      for (int j = 0; j < 16 && j < width; ++j) to[j] = place(i)[j];
    }
  }
}

// The same of plain codes of MXFP4, two a byte; staged are those of E4M3.
__device__ __forceinline__ void write_col_nibbles(const uint8_t (&codes)[128][128],
                                                  const CodesOut& out, const Tile& t) {
  const int chunk = threadIdx.x % 8;
  const int width = (t.last_row ? out.last_width : 64) - 8 * chunk;
#pragma unroll 1
  for (int c = threadIdx.x / 8; c < t.cols && width > 0; c += 32) {
    const uint4 w = *reinterpret_cast<const uint4*>(&codes[c][16 * (chunk ^ c / 8 % 8)]);
    const uint2 eight = {tile::pack_nibbles(tile::fp4_of_fp8x4(w.x), tile::fp4_of_fp8x4(w.y)),
                         tile::pack_nibbles(tile::fp4_of_fp8x4(w.z), tile::fp4_of_fp8x4(w.w))};
    uint8_t* const to = out.codes + (t.c0() + c) * out.ld + t.k0() / 2 + 8 * chunk;
    if (out.vectors) {
      *reinterpret_cast<uint2*>(to) = eight;
    } else {
      const uint64_t all = eight.x | static_cast<uint64_t>(eight.y) << 32;
#pragma unroll 1
      for (int j = 0; j < 8 && j < width; ++j) to[j] = static_cast<uint8_t>(all >> (8 * j));
    }
  }
}

// Plain scale bytes of row r of a direction, its first block `block` of `blocks`: scales
// [rows, blocks], or [blocks, rows] when `blocks_first`.
__device__ __forceinline__ void write_plain_scales(const TileScales& s, int r, uint8_t* to,
                                                   int64_t row, int64_t rows, int64_t block,
                                                   int64_t blocks, bool blocks_first) {
  if (row >= rows) return;
  uint32_t bytes = 0;
#pragma unroll
  for (int b = 0; b < 4; ++b) bytes |= (s.blocks[b][r] & 0xFFu) << (8 * b);
  const int64_t step = blocks_first ? rows : 1;
  const int count = static_cast<int>(min(blocks - block, int64_t{4}));
  to += blocks_first ? block * rows + row : row * blocks + block;
  if (!blocks_first && count == 4 && reinterpret_cast<uintptr_t>(to) % 4 == 0) {
    *reinterpret_cast<uint32_t*>(to) = bytes;
    return;
  }
#pragma unroll 1
  for (int b = 0; b < count; ++b, to += step) *to = static_cast<uint8_t>(bytes >> (8 * b));
}

}  // namespace te_mx::sm90
