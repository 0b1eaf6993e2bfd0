// Unpacks plain codes of 4 bits to tiles of 128 x 128 before a product, which has the bits that it
// would have of those of pack_kernel.cuh: one operand or both.
//
// Integer instructions are what takes time, so there are few: a warp has 32 rows of a tile and
// learns from the scales of all of them what is shared (gemm_codes.cuh), without a word to the
// other warps; codes become those of E4M3 by tables in shared memory. Tiles that scales do not
// decide, and what is not whole, take the whole CTA.
#pragma once

#include <cstdint>

#include "gemm/gemm_codes.cuh"
#include "gemm/gemm_params.cuh"
#include "mxtile/sm90/barrier.cuh"
#include "mxtile/sm90/copy_async.cuh"
#include "quantize/plain_codes.cuh"
#include "quantize/plain_tasks.h"
#include "quantize/tile_classes.cuh"

namespace te_mx::sm90 {

namespace tile = mxtile::sm90;

inline constexpr int kUnpackThreads = 128;

struct UnpackSide {
  const uint8_t* codes;
  const uint8_t* scales;
  uint8_t* out_codes;
  uint32_t* out_scales;
  int64_t ld, out_ld, blocks;
  int row_tiles, padded_tiles;
  int last_rows;  // of the last tile
  bool vectors;   // rows have whole 8 bytes and start there
  bool words;     // and scales whole 4 bytes, and offsets in a tile 32 bits
};

struct UnpackParams {
  UnpackSide sides[2];
  int k_tiles, last_k;  // of both; of the last tile
};

struct UnpackSmem {
  uint2 tables[kFp4Tables];
  TileScales scales;
  alignas(16) uint8_t slots[kUnpackThreads * 64];
};

// A tile by all threads.
__device__ __forceinline__ void unpack_tile(UnpackSmem& s, const UnpackSide& a, int rt, int kt,
                                            int all_rows, int all_k) {
  TileScales& scales = s.scales;
  const int r = threadIdx.x / 8, k = threadIdx.x % 8 * 16;  // 8 lanes hold a row, 2 a block
  const int rows = all_rows - r, block = k / 32;
  const int64_t row = rt * int64_t{128} + r;
  uint32_t nibbles[8][2], e[8];
  load_codes<8, 8>(nibbles, a.codes + row * a.ld + kt * int64_t{64} + k / 2, a.ld, 16, rows,
                   (all_k - k + 1) / 2, a.vectors, s.slots + 64 * threadIdx.x);
  {
    const uint8_t* scale = a.scales + row * a.blocks + kt * int64_t{4} + block;
    const int count = 32 * block < all_k ? rows : 0;
#pragma unroll
    for (int i = 0; i < 8; ++i, scale += 16 * a.blocks) e[i] = 16 * i < count ? __ldg(scale) : 0;
  }
  __syncthreads();  // the scales of the tile before are read no more
  if (threadIdx.x == 0) scales.clear();
  ScaleRange range;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    uint32_t any = (nibbles[i][0] | nibbles[i][1]) & 0x77777777u;
    any |= __shfl_xor_sync(~0u, any, 1);
    if (any != 0 && e[i] != 255) e[i] |= kCounts;
    range.add(e[i]);
    if (k % 32 == 0) scales.blocks[block][r + 16 * i] = static_cast<uint16_t>(e[i]);
  }
  scales.add_range(range);
  if (threadIdx.x < kTileWarps - kUnpackThreads / 32)
    scales.seen[kUnpackThreads / 32 + threadIdx.x] = 0;  // of warps that are not
  __syncthreads();
  const ScaleRange all = scales.range();
  const uint32_t exponent = all.exponent(tile::kFp4Headroom);
  int cls = TileScales::early_class(all, tile::kFp4Spread);
  if (cls == kUndecided) {
    scales.examine(all, threadIdx.x, tile::kFp4Spread, tile::kFp4Headroom);
    __syncthreads();
    cls = scales.late_class(all);
  }
  write_words(scales, exponent, cls, threadIdx.x, tile_words(a.out_scales, kt, rt, a.row_tiles),
              rt == a.row_tiles - 1 && (a.row_tiles & 1) != 0);
  // out_ld is a multiple of 16: the last vector may reach into the padding of its row.
  const int count = k < all_k ? rows : 0;
  uint8_t* to = a.out_codes + row * a.out_ld + kt * int64_t{128} + k;
#pragma unroll
  for (int i = 0; i < 8; ++i, to += 16 * a.out_ld) {
    const bool shifted = cls < 2 && (e[i] & kCounts);
    const uint32_t shared = cls == 0 ? exponent : shifted ? scales.target[r + 16 * i] : 0;
    const uint32_t u = shifted ? tile::kFp4Headroom + shared - (e[i] & 0xFF) : tile::kFp4Headroom;
    uint32_t v[4];
    fp4_to_fp8(v, nibbles[i][0], nibbles[i][1], tile::Fp4Table(u));
    if (e[i] == 255) v[0] = v[1] = v[2] = v[3] = 0x7F7F7F7Fu;
    if (16 * i < count) *reinterpret_cast<uint4*>(to) = make_uint4(v[0], v[1], v[2], v[3]);
  }
}

// A CTA a tile: grid (k_tiles, row tiles of both sides).
__global__ void __launch_bounds__(kUnpackThreads, 8)
    unpack_kernel(const __grid_constant__ UnpackParams p) {
  __shared__ UnpackSmem s;
  const bool second = static_cast<int>(blockIdx.y) >= p.sides[0].row_tiles;
  const UnpackSide& a = p.sides[second ? 1 : 0];
  const int rt = static_cast<int>(blockIdx.y) - (second ? p.sides[0].row_tiles : 0);
  const int kt = static_cast<int>(blockIdx.x);
  const int all_rows = rt == a.row_tiles - 1 ? a.last_rows : 128;
  const int all_k = kt == p.k_tiles - 1 ? p.last_k : 128;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), lane = threadIdx.x % 32;
  // Two times 16 codes a lane of every eighth of the warp's 32 rows. Rows that do not exist are the
  // last one again: nothing is decided by them, and the same is written twice. NOTE: offsets inside
  // of a tile have 32 bits, or half of the instructions would work out addresses.
  const uint32_t last = all_rows - 1, ld = a.ld, blocks = a.blocks, out_ld = a.out_ld;
  const uint32_t first = 32 * warp + lane / 4;
  const uint8_t* const from = a.codes + rt * (128 * a.ld) + kt * int64_t{64};
  const uint8_t* const scales_from = a.scales + rt * (128 * a.blocks) + kt * int64_t{4};
  const bool whole = a.words && all_k == 128;
  if (whole) {
    // NOTE: to L2 alone, which nobody looks at before it may.
    const uint32_t row = min(32u * warp + lane, last);
    tile::prefetch_l2(scales_from + row * blocks);
    tile::prefetch_l2(from + row * ld), tile::prefetch_l2(from + row * ld + 32);
  }
  if (threadIdx.x < kFp4Tables) make_table(s.tables, static_cast<int>(threadIdx.x));
  __syncthreads();
  // NOTE: in this order, so that a kernel which starts early knows that everything before this one
  // is done (gemm_codes_kernel.cuh).
  tile::await_predecessors();
  tile::let_dependents_start();
  if (whole) {
    uint2 codes[4][2];
    uint32_t w[4];  // scales of every 32nd row, the warp's own first
#pragma unroll
    for (int i = 0; i < 4; ++i)
      w[i] = tile::read_now_u32(scales_from + min(32u * (warp + i) % 128 + lane, last) * blocks);
#pragma unroll
    for (int g = 0; g < 4; ++g) {
      const uint8_t* const row = from + (min(first + 8 * g, last) * ld + lane % 4 * 8);
      codes[g][0] = tile::read_now_u32x2(row), codes[g][1] = tile::read_now_u32x2(row + 32);
    }
    const uint32_t said = decide<true>(w[0], w[1], w[2], w[3], 15);
    if (said & kDecided) {
      const uint32_t exponent = said & 0xFF;
      uint32_t* const words = a.out_scales + (kt * int64_t{a.padded_tiles} + rt) * kScaleWords;
      words[threadIdx.x] = exponent << 23;
      if (threadIdx.x < 4) words[128 + threadIdx.x] = threadIdx.x == 1 ? exponent : 0;
      if (rt == a.padded_tiles - 2 && a.row_tiles != a.padded_tiles) {  // the tile that pads
        words[kScaleWords + threadIdx.x] = 127u << 23;
        if (threadIdx.x < 4) words[kScaleWords + 128 + threadIdx.x] = threadIdx.x == 1 ? 127 : 0;
      }
      // Offsets of the tables of this lane's row, a byte a block.
      const uint32_t own = (kEveryBlock * (tile::kFp4Headroom + exponent) - w[0]) << 3;
      const uint32_t tables = tile::smem_addr(s.tables), block = 0x4440 + lane % 4 / 2;
      uint8_t* const to = a.out_codes + rt * (128 * a.out_ld) + kt * int64_t{128};
#pragma unroll
      for (int g = 0; g < 4; ++g) {
        const uint32_t u = __shfl_sync(~0u, own, 8 * g + lane / 4);
        uint8_t* const row = to + (min(first + 8 * g, last) * out_ld + lane % 4 * 16);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const tile::Fp4Table table(
              tile::ld_shared_u32x2(tables + __byte_perm(u, 0, block + 2 * h)));
          uint32_t v[4];
          fp4_to_fp8(v, codes[g][h].x, codes[g][h].y, table);
          *reinterpret_cast<uint4*>(row + 64 * h) = make_uint4(v[0], v[1], v[2], v[3]);
        }
      }
      return;
    }
  }
  unpack_tile(s, a, rt, kt, all_rows, all_k);
}

}  // namespace te_mx::sm90
