// The columns of a tile that is quantized in blocks of 1 x 128 with powers of two, as the aligned
// tiles of MX (te_mx/sm90_layout.h): the four blocks of 32 of a row have the exponent of its one
// block of 128, so a tile is of class 0, 1 or 3.
#pragma once

#include "mxtile/sm90/swizzle.cuh"
#include "quantize/quantize_codes.cuh"

namespace te_mx::sm90 {

// What the columns of a tile have in common, by each of the four warps that have their factors:
// high | (511 - low) << 16, and the highest bit where one is NaN.
struct ColumnsSeen {
  alignas(16) uint32_t of[4];

  // The whole warp `w` calls it with the entries (tile_classes.cuh) of its columns.
  __device__ __forceinline__ void add(int w, uint32_t entry) {
    ScaleRange mine;
    mine.add(entry);
    const uint32_t high = __reduce_max_sync(~0u, mine.high);
    const uint32_t low_key = __reduce_max_sync(~0u, 511 - mine.low);
    const bool nan = __any_sync(~0u, entry == 255);
    if (threadIdx.x % 32 == 0) of[w] = high | low_key << 16 | (nan ? 1u << 31 : 0u);
  }
};

struct AlignedTile {
  uint32_t exponent;
  int cls;
  bool special;  // a column is NaN, or none has codes

  __device__ __forceinline__ AlignedTile(const ColumnsSeen& seen, int spread) {
    const uint4 a = *reinterpret_cast<const uint4*>(seen.of);
    const uint32_t most = __vmaxu2(__vmaxu2(a.x & 0x7FFFFFFFu, a.y & 0x7FFFFFFFu),
                                   __vmaxu2(a.z & 0x7FFFFFFFu, a.w & 0x7FFFFFFFu));
    const ScaleRange range{most & 0xFFFF, 511 - (most >> 16)};
    const int early = TileScales::early_class(range, spread);
    exponent = range.exponent(0), cls = early == kUndecided ? 1 : early;
    special = ((a.x | a.y | a.z | a.w) >> 31) != 0 || range.empty();
  }

  // What elements are multiplied by where one factor gives the codes of all columns, unless one
  // comes out subnormal; else NaN.
  __device__ __forceinline__ float factor() const {
    return __uint_as_float(cls == 0 && !special ? (254 - exponent) << 23 : 0x7FC00000u);
  }

  // Of the column with this entry; counts(b): whether its block b of 32 has a code that is not 0.
  template <class Counts>
  __device__ __forceinline__ uint32_t word(uint32_t entry, int rows, const Counts& counts) const {
    const uint32_t e = entry & 0xFF;
    if (cls < 2) return (cls == 1 && (entry & kCounts) ? e : exponent) << 23;
    uint32_t word = 0;
#pragma unroll
    for (int b = 0; b < 4; ++b)
      if (32 * b < rows && (e == 255 || counts(b))) word |= e << (8 * b);
    return word;
  }
};

// A word that the compiler does not know, so that it keeps no numbers made of it.
__device__ __forceinline__ uint32_t kept(uint32_t w) { return tile::keep(w); }
__device__ __forceinline__ uint2 kept(uint2 w) { return w; }  // registers suffice

// Codes of 8 neighbours of a row, rounded to the scales of their columns and then shifted to the
// exponent of a tile of class 0.
template <class T, tile::Fp8 kFmt>
__device__ __forceinline__ uint2 aligned_codes(const typename Input<T>::Word (&x)[4],
                                               const float* factors, const AlignedTile& of) {
  uint32_t codes[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float4 f = *reinterpret_cast<const float4*>(factors + 4 * i);
    const float2 a = Input<T>::values(kept(x[2 * i])), b = Input<T>::values(kept(x[2 * i + 1]));
    codes[i] = tile::fp8x4<kFmt>(a.x * f.x, a.y * f.y, b.x * f.z, b.y * f.w);
    if (of.cls == 0) {
      const uint32_t target = (of.exponent + 1) * 0x10001u;
      // A column of zeros has scale 1, which may be larger than what the tile shares: the halves of
      // a word must not borrow from each other. Its codes are 0 by any shift.
      const uint32_t least = (254 - of.exponent) * 0x00800080u;
      const uint32_t low =
          __vmaxu2(__byte_perm(__float_as_uint(f.x), __float_as_uint(f.y), 0x7632), least);
      const uint32_t high =
          __vmaxu2(__byte_perm(__float_as_uint(f.z), __float_as_uint(f.w), 0x7632), least);
      codes[i] = tile::fp8x4_times<kFmt>(codes[i], tile::half2_shifts(low, target),
                                         tile::half2_shifts(high, target));
    }
  }
  return {codes[0], codes[1]};
}

}  // namespace te_mx::sm90
