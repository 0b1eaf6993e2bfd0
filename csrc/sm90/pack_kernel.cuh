// Packs plain MX codes [rows, k] by tiles of 128 x 128: the same classes, words and shifts as the
// quantizer.
#pragma once

#include <cstdint>

#include "mxtile/sm90/fp8.cuh"
#include "te_mx/sm90.h"
#include "tile_classes.cuh"

namespace te_mx::sm90 {

namespace tile = mxtile::sm90;

inline constexpr int kPackThreads = 256;

// 16 codes of half a block; missing ones are zero.
__device__ __forceinline__ uint4 load_codes(const uint8_t* codes, int64_t row, int64_t rows,
                                            int64_t col, int64_t k, bool vectors) {
  uint32_t w[4] = {0, 0, 0, 0};
  if (row < rows && col < k) {
    const uint8_t* const from = codes + row * k + col;
    if (vectors && col + 16 <= k) return __ldcs(reinterpret_cast<const uint4*>(from));
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      if (col + j < k) w[j / 4] |= static_cast<uint32_t>(from[j]) << (j % 4 * 8);
    }
  }
  return make_uint4(w[0], w[1], w[2], w[3]);
}

template <tile::Fp8 kFmt>
__global__ void __launch_bounds__(kPackThreads)
    pack_kernel(const __grid_constant__ PackArgs a, int64_t row_tiles) {
  __shared__ TileScales s;
  const int64_t rt = blockIdx.x % row_tiles, kt = blockIdx.x / row_tiles;
  const int64_t r0 = rt * 128, k0 = kt * 128, blocks = (a.k + 31) / 32;
  const bool vectors = a.k % 16 == 0 && reinterpret_cast<uintptr_t>(a.codes) % 16 == 0;
  const int lane8 = threadIdx.x % 8, r = threadIdx.x / 8;  // 8 lanes hold a row, 2 a block
  if (threadIdx.x == 0) s.clear();
  uint4 v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    v[i] = load_codes(a.codes, r0 + r + 32 * i, a.rows, k0 + 16 * lane8, a.k, vectors);
  uint32_t high = 0, low = 256;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t row = r0 + r + 32 * i, block = kt * 4 + lane8 / 2;
    uint32_t any = (v[i].x | v[i].y | v[i].z | v[i].w) & 0x7F7F7F7Fu;
    any |= __shfl_xor_sync(~0u, any, 1);
    const uint32_t e = row < a.rows && block < blocks ? a.scales[row * blocks + block] : 0;
    const bool counts = any != 0 && e != 255;
    if (counts) high = max(high, e), low = min(low, e);
    if (lane8 % 2 == 0) s.add_block(r + 32 * i, lane8 / 2, e | (counts ? kCounts : 0));
  }
  __syncthreads();
  s.add_range(high, low);
  __syncthreads();
  if (threadIdx.x < 128) s.examine(threadIdx.x, a.spread);
  __syncthreads();
  const int cls = s.tile_class(a.spread);
  if (threadIdx.x < 128) {
    const int64_t padded = packed_tiles(a.rows);
    uint32_t* const words = a.out.scales + (kt * padded + rt) * kScaleWords;
    s.write_words(cls, threadIdx.x, words);
    s.plan(cls, threadIdx.x, false);
    if (rt == row_tiles - 1 && padded != row_tiles)
      write_empty_tile(threadIdx.x, words + kScaleWords);
  }
  __syncthreads();
  const int64_t ld = packed_ld(a.k);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = r + 32 * i;
    const uint32_t plan = s.plans[row][lane8 / 2];
    uint32_t w[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
    if (cls < 2) tile::CodeShift<kFmt, true>(plan_shift(plan)).apply(w);
    if (plan_nan(plan)) w[0] = w[1] = w[2] = w[3] = 0x7F7F7F7Fu;
    // ld is a multiple of 16: the last vector may reach into the padding of its row.
    const int64_t col = k0 + 16 * lane8;
    if (r0 + row < a.rows && col < a.k) {
      *reinterpret_cast<uint4*>(a.out.codes + (r0 + row) * ld + col) =
          make_uint4(w[0], w[1], w[2], w[3]);
    }
  }
}

}  // namespace te_mx::sm90
