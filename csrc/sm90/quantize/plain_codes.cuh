// Reading plain MX codes: the part of a tile that belongs to one thread. Those of MXFP4 lie two a
// byte along k, or one a byte where k lies first; they become codes of E4M3.
#pragma once

#include <cstdint>

#include "mxtile/sm90/fp4.cuh"
#include "mxtile/sm90/fp8.cuh"
#include "te_mx/sm90_layout.h"
#include "te_mx/types.h"

namespace te_mx::sm90 {

// Bytes of a row of `width` codes that are two a byte or one.
__host__ __device__ constexpr int64_t row_bytes(int64_t width, bool nibbles) {
  return nibbles ? (width + 1) / 2 : width;
}

// What a code of 8 bits stands for, that of E2M1 as one of E4M3.
__device__ __forceinline__ float value_of(Element element, uint8_t code) {
  using namespace mxtile::sm90;
  return __low2float(element == Element::e5m2 ? fp8x2_to_half2<Fp8::e5m2>(code)
                                              : fp8x2_to_half2<Fp8::e4m3>(code));
}

// kRows rows of kBytes codes, `step` rows apart, whose first is at `from`; of `rows` by `cols`
// codes that exist, the others are zero.
template <int kRows, int kBytes>
__device__ __forceinline__ void load_codes(uint32_t (&w)[kRows][kBytes / 4], const uint8_t* from,
                                           int64_t ld, int step, int rows, int cols, bool vectors,
                                           uint8_t* slot) {
  if (cols <= 0) rows = 0;
  if (vectors) {
#pragma unroll
    for (int i = 0; i < kRows; ++i, from += step * ld) {
      uint4 v = make_uint4(0, 0, 0, 0);
      if (step * i < rows) {
        if constexpr (kBytes == 16) {
          v = __ldg(reinterpret_cast<const uint4*>(from));
        } else if constexpr (kBytes == 8) {
          const uint2 two = __ldg(reinterpret_cast<const uint2*>(from));
          v.x = two.x, v.y = two.y;
        } else {
          v.x = __ldg(reinterpret_cast<const uint32_t*>(from));
        }
      }
      w[i][0] = v.x;
      if constexpr (kBytes >= 8) w[i][1] = v.y;
      if constexpr (kBytes == 16) w[i][2] = v.z, w[i][3] = v.w;
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < kRows; ++i, from += step * ld) {
#pragma unroll 1
    for (int j = 0; j < kBytes; ++j)
      slot[kBytes * i + j] = step * i < rows && j < cols ? from[j] : 0;
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < kBytes / 4; ++j)
      w[i][j] = reinterpret_cast<const uint32_t*>(slot)[kBytes / 4 * i + j];
  }
}

// The largest and the smallest byte of words of scales, of all lanes of a warp: a word is four
// blocks of a row, and a lane has four rows, of which those exist that have a bit in `rows`, in
// every lane if kWhole.
struct ScaleEnds {
  uint32_t high, low;

  template <bool kWhole>
  static __device__ __forceinline__ ScaleEnds of(const uint32_t (&w)[4], uint32_t rows) {
    uint32_t high = 0, low = 0x00FF00FFu;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t none = kWhole || (rows >> i & 1) ? 0u : ~0u;
      const uint32_t most = kWhole ? w[i] : w[i] & ~none, least = kWhole ? w[i] : w[i] | none;
      high = __vmaxu2(high, __vmaxu2(most & 0x00FF00FFu, __byte_perm(most, 0, 0x4341)));
      low = __vminu2(low, __vminu2(least & 0x00FF00FFu, __byte_perm(least, 0, 0x4341)));
    }
    return {__reduce_max_sync(~0u, max(high & 0xFFFF, high >> 16)),
            __reduce_min_sync(~0u, min(low & 0xFFFF, low >> 16))};
  }
  // Whether a tile of MXFP4 whose blocks may all count has one exponent: they are so near to each
  // other, and not near the ends of the range, where blocks of zeros might change sums.
  __device__ __forceinline__ bool share(uint32_t spread) const {
    constexpr uint32_t kLeast = 40;
    return low >= kLeast && high <= kFarExponent && high - low <= spread;
  }
  __device__ __forceinline__ uint32_t exponent() const { return high - mxtile::sm90::kFp4Headroom; }
};

// Sixteen codes of two words of nibbles.
__device__ __forceinline__ void fp4_to_fp8(uint32_t (&to)[4], uint32_t first, uint32_t second,
                                           const mxtile::sm90::Fp4Table& table) {
  const uint2 a = table.eight(first), b = table.eight(second);
  to[0] = a.x, to[1] = a.y, to[2] = b.x, to[3] = b.y;
}

}  // namespace te_mx::sm90
