// Packs plain MX codes by tiles of 128 x 128: the same classes and words as the quantizer. Codes
// that lie k first pass through shared memory, transposed, and go on as the others do. Codes of
// MXFP4 stay nibbles until the tile's class is known; then they become those of E4M3 at once.
// Several operands of one size, the weights of groups, take one launch; those of groups without
// rows are left out. So do the operands of 4 bits of a product (unpack_kernel).
#pragma once

#include <cstdint>

#include "common/groups.cuh"
#include "mxtile/sm90/copy_async.cuh"
#include "nvfp4/nvfp4_operand.cuh"
#include "quantize/plain_codes.cuh"
#include "quantize/plain_tasks.h"
#include "quantize/quantize_input.cuh"

namespace te_mx::sm90 {

inline constexpr int kPackThreads = 256;

struct PackSide {
  PackTask a;
  int64_t ld, scale_ld, out_ld;  // bytes from a row, or from a k where that lies first
  int row_tiles;
  int last_rows, last_k;  // of the last tiles
  bool vectors;  // codes have aligned vectors only: 16 bytes, or 8 of 4 bits or where k lies first
  bool words;    // and a row's scales aligned words, of four blocks
};

struct PackParams : PackSide {
  GroupTable groups;  // of a stack, which has an operand for each
};

template <tile::Fp8 kFmt, bool kTransposed>
struct PackSmem {
  static constexpr bool kNibbles = kIsFp4<kFmt> && !kTransposed;
  // Codes that lie k first: [row][k], 16-byte chunks xored with (row / 8) % 8. Without vectors, 64
  // bytes of each thread's own, or 32 of nibbles.
  alignas(16) uint8_t codes[kNibbles ? 64 : 128][128];
  TileScales scales;
};

// Codes [k, rows] of the tile at (r0, k0), of which `ks` by `rows` exist, to v[i]: 16 codes of row
// tid / 8 + 32 i, at k 16 (tid % 8).
template <class Smem>
__device__ __forceinline__ void load_transposed(Smem& s, uint32_t (&v)[4][4], const PackTask& a,
                                                bool vectors, int64_t r0, int64_t k0, int rows,
                                                int ks) {
  const int r = threadIdx.x % 16 * 8, k = threadIdx.x / 16 * 8;  // a thread brings 8 x 8 codes
  uint32_t w[8][2];
  load_codes<8, 8>(w, a.codes + (k0 + k) * a.rows + r0 + r, a.rows, 1, ks - k, rows - r, vectors,
                   &s.codes[0][0] + 64 * threadIdx.x);
  if (!vectors) __syncthreads();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    tile::transpose_bytes(w[0][half], w[1][half], w[2][half], w[3][half]);
    tile::transpose_bytes(w[4][half], w[5][half], w[6][half], w[7][half]);
  }
  uint8_t* const to = &s.codes[r][16 * (k / 16 ^ r / 8 % 8) + k % 16];
#pragma unroll
  for (int j = 0; j < 8; ++j)
    *reinterpret_cast<uint2*>(to + 128 * j) = make_uint2(w[j % 4][j / 4], w[4 + j % 4][j / 4]);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = threadIdx.x / 8 + 32 * i;
    const uint4 q =
        *reinterpret_cast<const uint4*>(&s.codes[row][16 * (threadIdx.x % 8 ^ row / 8 % 8)]);
    v[i][0] = q.x, v[i][1] = q.y, v[i][2] = q.z, v[i][3] = q.w;
  }
}

// The operand of group i in a stack.
template <tile::Fp8 kFmt, bool kTransposed>
__device__ __forceinline__ PackTask matrix_of(const PackTask& all, int i) {
  PackTask a = all;
  a.codes += i * (a.rows * row_bytes(a.k, kIsFp4<kFmt> && !kTransposed)),
      a.scales += i * (a.rows * ((a.k + 31) / 32));
  a.out.codes += i * (a.rows * packed_ld(a.k));
  a.out.scales += i * packed_scale_words(a.rows, a.k);
  return a;
}

// What a tile's scales decide, once every thread has given its blocks: its class, and what they
// share. alone: rows have nothing of others.
struct TileDecision {
  uint32_t exponent;
  int cls;

  template <tile::Fp8 kFmt>
  static __device__ __forceinline__ TileDecision of(TileScales& s, int asked, bool alone) {
    const ScaleRange all = s.range();
    const uint32_t exponent = all.exponent(kHeadroom<kFmt>);
    const int spread = kIsFp4<kFmt> ? tile::kFp4Spread : asked;
    int cls = alone && !all.empty() ? kUndecided : TileScales::early_class(all, spread);
    if (cls == kUndecided) {
      if (threadIdx.x < 128) s.examine(all, threadIdx.x, spread, kHeadroom<kFmt>, alone);
      __syncthreads();
      cls = alone ? 1 : s.late_class(all);
    }
    return {exponent, cls};
  }
};

// Tile (rt, kt) of an operand by the CTA; all_rows and all_k of it exist.
template <tile::Fp8 kFmt, bool kTransposed>
__device__ __forceinline__ void pack_tile(PackSmem<kFmt, kTransposed>& s, const PackSide& p,
                                          const PackTask& a, int rt, int kt, int all_rows,
                                          int all_k) {
  const int64_t r0 = rt * int64_t{128}, k0 = kt * int64_t{128};
  const int r = threadIdx.x / 8, k = threadIdx.x % 8 * 16;  // 8 lanes hold a row, 2 a block
  const int rows = all_rows - r, block = k / 32;
  uint32_t v[4][4], e[4];
  [[maybe_unused]] uint32_t nibbles[4][2];
  if constexpr (kIsFp4<kFmt> && !kTransposed) {
    load_codes<4, 8>(nibbles, a.codes + (r0 + r) * p.ld + kt * int64_t{64} + k / 2, p.ld, 32, rows,
                     (all_k - k + 1) / 2, p.vectors, &s.codes[0][0] + 32 * threadIdx.x);
  } else if constexpr (!kTransposed) {
    load_codes<4, 16>(v, a.codes + (r0 + r) * p.ld + k0 + k, p.ld, 32, rows, all_k - k, p.vectors,
                      &s.codes[0][0] + 64 * threadIdx.x);
  }
  const int64_t b = kt * int64_t{4} + block, step = kTransposed ? 32 : 32 * p.scale_ld;
  const uint8_t* from =
      a.scales + (kTransposed ? b * p.scale_ld + r0 + r : (r0 + r) * p.scale_ld + b);
  const int there = 32 * block < all_k ? rows : 0;
#pragma unroll
  for (int i = 0; i < 4; ++i, from += step) e[i] = 32 * i < there ? __ldg(from) : 0;
  if constexpr (kTransposed) load_transposed(s, v, a, p.vectors, r0, k0, all_rows, all_k);
  if constexpr (kIsFp4<kFmt> && kTransposed) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      nibbles[i][0] = tile::pack_nibbles(v[i][0] & 0x0F0F0F0Fu, v[i][1] & 0x0F0F0F0Fu);
      nibbles[i][1] = tile::pack_nibbles(v[i][2] & 0x0F0F0F0Fu, v[i][3] & 0x0F0F0F0Fu);
    }
  }
  if (threadIdx.x == 0) s.scales.clear();
  ScaleRange range;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t any;
    if constexpr (kIsFp4<kFmt>) {
      any = (nibbles[i][0] | nibbles[i][1]) & 0x77777777u;
    } else {
      any = (v[i][0] | v[i][1] | v[i][2] | v[i][3]) & 0x7F7F7F7Fu;
    }
    any |= __shfl_xor_sync(~0u, any, 1);
    if (any != 0 && e[i] != 255) e[i] |= kCounts;
    range.add(e[i]);
    if (k % 32 == 0) s.scales.blocks[block][r + 32 * i] = static_cast<uint16_t>(e[i]);
  }
  s.scales.add_range(range);
  __syncthreads();
  const auto [exponent, cls] = TileDecision::of<kFmt>(s.scales, a.spread, a.spread == kByRows);
  if (threadIdx.x < 128) {
    write_words(s.scales, exponent, cls, threadIdx.x, tile_words(a.out.scales, kt, rt, p.row_tiles),
                rt == p.row_tiles - 1 && (p.row_tiles & 1) != 0);
  }
  // out_ld is a multiple of 16: the last vector may reach into the padding of its row.
  const int count = k < all_k ? rows : 0;
  uint8_t* to = a.out.codes + (r0 + r) * p.out_ld + k0 + k;
#pragma unroll
  for (int i = 0; i < 4; ++i, to += 32 * p.out_ld) {
    const bool shifted = cls < 2 && (e[i] & kCounts);
    const uint32_t shared = cls == 0 ? exponent : shifted ? s.scales.target[r + 32 * i] : 0;
    if constexpr (kIsFp4<kFmt>) {
      const uint32_t u = shifted ? tile::kFp4Headroom + shared - (e[i] & 0xFF) : tile::kFp4Headroom;
      if (u > tile::kFp4Spread) nibbles[i][0] = nibbles[i][1] = 0;
      fp4_to_fp8(v[i], nibbles[i][0], nibbles[i][1],
                 tile::Fp4Table(min(u, uint32_t{tile::kFp4Spread})));
    } else if (shifted) {
      tile::CodeShift<kFmt>{static_cast<int>(shared - (e[i] & 0xFF))}.apply(v[i]);
    }
    if (e[i] == 255) v[i][0] = v[i][1] = v[i][2] = v[i][3] = 0x7F7F7F7Fu;
    if (32 * i < count)
      *reinterpret_cast<uint4*>(to) = make_uint4(v[i][0], v[i][1], v[i][2], v[i][3]);
  }
}

// Of sixteen codes of a row of MXFP4 that stands still (sm90_nvfp4.h), from the words of its four
// lanes, the E4M3 codes by a table; signs: 0 where all are to be zeros. kHigh: of row g + 8.
template <bool kHigh>
__device__ __forceinline__ uint4 codes_of_words(const uint32_t (&w)[4], const tile::Fp4Table& by,
                                                uint32_t signs) {
  // Lanes 2j and 2j + 1, k 2t + 8u and the one after it: nibbles of a selector, and signs.
  const auto four = [&](uint32_t a, uint32_t b, int rest, int to_sign) {
    const auto at = [](uint32_t v, int down) { return down < 0 ? v << -down : v >> down; };
    const uint32_t both = (at(a, rest) & 0x00070007u) | (at(b, rest - 8) & 0x07000700u);
    return __byte_perm(by.low, by.high, both | both >> 12) |
           (__byte_perm(a, b, 0x7531) << to_sign & signs);
  };
  if constexpr (kHigh) {
    uint32_t v[4];  // those of pair 3 where pair 0 has its own
#pragma unroll
    for (int t = 0; t < 4; ++t) v[t] = (__funnelshift_l(w[t], w[t], 6) & 0x001B001Bu) * 0x1084u;
    return {four(w[0], w[1], 3, 3), four(w[2], w[3], 3, 3), four(v[0], v[1], 6, 0),
            four(v[2], v[3], 6, 0)};
  } else {
    return {four(w[0], w[1], 6, 0), four(w[2], w[3], 6, 0), four(w[0], w[1], 0, 6),
            four(w[2], w[3], 0, 6)};
  }
}

// pack_tile of MXFP4 that stands still. A warp has a quad, a thread sixteen of k of rows g and g +
// 8, twice, so that it uses all of every word, and 8 lanes a row. Rows past the end are zeros.
__device__ __forceinline__ void unpack_tile(TileScales& s, const PackSide& p, const PackTask& a,
                                            int rt, int kt, int all_rows, int all_k) {
  const int lane = threadIdx.x % 32, quad = threadIdx.x / 32, block = lane % 8 / 2;
  const auto steps = static_cast<int>(gridDim.x);
  uint32_t w[2][4] = {}, scales[2] = {};
  if (quad / 4 * kNvfp4Rows < all_rows) {
    const int64_t of_quad = 4 * ((2 * rt + quad / 4) * steps + kt) + quad % 4;
    const uint8_t* const from =
        a.codes + of_quad * kNvfp4Codes + (lane % 8 / 4 * 512 + lane / 8 * 64 + lane % 4 * 4);
    const uint8_t* const scales_at = a.scales + of_quad * kMxfp4Scales + (lane / 8 * 8 + block * 2);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int t = 0; t < 4; ++t)
        w[j][t] = __ldcs(reinterpret_cast<const uint32_t*>(from + 256 * j + 16 * t));
      scales[j] = __ldg(reinterpret_cast<const uint16_t*>(scales_at + 32 * j));
    }
  }
  // NOTE: nobody writes such a weight meanwhile, but somebody may read what was unpacked before.
  tile::await_predecessors();
  tile::let_dependents_start();
  // Of rows g and g + 8, in the halves of a word: scale bytes, and whether blocks count.
  uint32_t bytes[2], counts[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const uint32_t all = w[j][0] | w[j][1] | w[j][2] | w[j][3];
    const uint32_t any = all | __shfl_xor_sync(~0u, all, 1);
    counts[j] =
        ((any & 0x01C701C7u) != 0 ? 0xFFFFu : 0) | ((any & 0x4C384C38u) != 0 ? ~0xFFFFu : 0);
    bytes[j] = __byte_perm(scales[j], 0, 0x4140);
  }
  const uint32_t most = __vmaxu2(bytes[0] & counts[0], bytes[1] & counts[1]),
                 least = __vminu2(bytes[0] | ~counts[0], bytes[1] | ~counts[1]),
                 top = max(most & 0xFFFF, most >> 16), bottom = min(least & 0xFFFF, least >> 16);
  s.add_range(top == 0 ? ScaleRange{} : ScaleRange{top - kMxfp4Bias, bottom - kMxfp4Bias});
  __syncthreads();
  const ScaleRange all = s.range();
  const int rows = lane % 8 * 16 < all_k ? all_rows : 0, row0 = quad * 16 + lane / 8;
  const auto ld = static_cast<int>(p.out_ld);
  uint8_t* const to = a.out.codes + (int64_t{rt * 128 + row0} * ld + (kt * 128 + lane % 8 * 16));
  uint32_t* const words = tile_words(a.out.scales, kt, rt, p.row_tiles);
  const bool pads = rt == p.row_tiles - 1 && (p.row_tiles & 1) != 0;
  // Nearly every tile: all of it shares an exponent, and tables have no subnormal numbers.
  constexpr uint32_t kNear = 11;
  if (a.spread != kByRows && all.high <= kFarExponent && all.high - all.low <= kNear) {
    const uint32_t shared = all.exponent(tile::kFp4Headroom);
    if (threadIdx.x < 128)
      write_words(shared == 0 ? 0x00400000u : shared << 23, shared, 0, threadIdx.x, words, pads);
    // As tile::Fp4Table(kFp4Headroom + shared - e). NOTE: of blocks that do not count, whose codes
    // are zeros, anything but their zero.
    const uint32_t down = shared + kMxfp4Bias + tile::kFp4Headroom - kNear,
                   low = 0x14100800u - down * 0x08080800u, high = 0x24201C18u - down * 0x08080808u;
    const auto table_of = [&](uint32_t byte) {
      return tile::Fp4Table(make_uint2(low + byte * 0x08080800u, high + byte * 0x08080808u));
    };
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint4 first = codes_of_words<false>(w[j], table_of(bytes[j] & 0xFF), 0x80808080u),
                  second = codes_of_words<true>(w[j], table_of(bytes[j] >> 16), 0x80808080u);
      if (row0 + 4 * j < rows) *reinterpret_cast<uint4*>(to + 4 * j * ld) = first;
      if (row0 + 4 * j + 8 < rows) *reinterpret_cast<uint4*>(to + (4 * j + 8) * ld) = second;
    }
    return;
  }

  uint32_t e[2][2];
  if (threadIdx.x == 0) s.clear();
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      uint32_t& one = e[j][high];
      one = ((bytes[j] >> 16 * high) - kMxfp4Bias) & 255;
      if ((counts[j] >> 16 * high & 1) != 0) one |= kCounts;
      if (lane % 2 == 0) s.blocks[block][row0 + 4 * j + 8 * high] = static_cast<uint16_t>(one);
    }
  }
  __syncthreads();
  const auto [exponent, cls] = TileDecision::of<tile::Fp8::e2m1>(s, a.spread, a.spread == kByRows);
  if (threadIdx.x < 128) write_words(s, exponent, cls, threadIdx.x, words, pads);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      const int row = 4 * j + 8 * high;
      const uint32_t one = e[j][high];
      const bool shifted = cls < 2 && (one & kCounts);
      const uint32_t shared = cls == 0 ? exponent : shifted ? s.target[row0 + row] : 0;
      const uint32_t u = shifted ? tile::kFp4Headroom + shared - (one & 0xFF) : tile::kFp4Headroom;
      // NOTE: such a weight has no NaN.
      tile::Fp4Table table(min(u, uint32_t{tile::kFp4Spread}));
      const bool kept = u <= tile::kFp4Spread;
      if (!kept) table.low = table.high = 0;
      const uint32_t signs = kept ? 0x80808080u : 0;
      const uint4 v = high ? codes_of_words<true>(w[j], table, signs)
                           : codes_of_words<false>(w[j], table, signs);
      if (row0 + row < rows) *reinterpret_cast<uint4*>(to + row * ld) = v;
    }
  }
}

// pack_tile of codes of 4 bits in whole vectors where the scales of a tile say by themselves that
// it has one exponent, and codes no subnormal numbers, as of nearly every tile: nothing waits for
// other warps. false: nothing was written.
__device__ __forceinline__ bool unpack_near(const PackSide& p, int rt, int kt, int all_rows) {
  const int r = threadIdx.x / 8, lane = threadIdx.x % 32, k = lane % 8 * 16;
  const uint8_t* from = p.a.codes + (rt * int64_t{128} + r) * p.ld + (kt * int64_t{64} + k / 2);
  const uint8_t* words_at = p.a.scales + (rt * int64_t{128} + lane) * p.scale_ld + kt * int64_t{4};
  uint2 nibbles[4] = {};
  uint32_t w[4] = {}, rows = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i, words_at += 32 * p.scale_ld) {
    if (lane + 32 * i >= all_rows) continue;
    w[i] = __ldg(reinterpret_cast<const uint32_t*>(words_at)), rows |= 1u << i;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i, from += 32 * p.ld)
    if (r + 32 * i < all_rows) nibbles[i] = __ldg(reinterpret_cast<const uint2*>(from));
  constexpr uint32_t kNear = 11;
  const auto ends = ScaleEnds::of<false>(w, rows);
  if (!ends.share(kNear)) return false;
  const uint32_t exponent = ends.exponent();
  if (threadIdx.x < 128)
    write_words(exponent << 23, exponent, 0, threadIdx.x,
                tile_words(p.a.out.scales, kt, rt, p.row_tiles),
                rt == p.row_tiles - 1 && (p.row_tiles & 1) != 0);
  uint8_t* to = p.a.out.codes + (rt * int64_t{128} + r) * p.out_ld + (kt * int64_t{128} + k);
#pragma unroll
  for (int i = 0; i < 4; ++i, to += 32 * p.out_ld) {
    // As tile::Fp4Table(ends.high - e).
    const uint32_t e = __shfl_sync(~0u, w[i], r) >> lane % 8 / 2 * 8 & 0xFF,
                   up = kNear - (ends.high - e);
    uint32_t v[4];
    fp4_to_fp8(
        v, nibbles[i].x, nibbles[i].y,
        tile::Fp4Table(make_uint2(0x14100800u + up * 0x08080800u, 0x24201C18u + up * 0x08080808u)));
    if (r + 32 * i < all_rows) *reinterpret_cast<uint4*>(to) = make_uint4(v[0], v[1], v[2], v[3]);
  }
  return true;
}

template <tile::Fp8 kFmt, bool kTransposed, bool kStacked>
__global__ void __launch_bounds__(kPackThreads, 5)
    pack_kernel(const __grid_constant__ PackParams p) {
  __shared__ PackSmem<kFmt, kTransposed> s;
  PackTask a = p.a;
  int rt = blockIdx.x;
  const int kt = blockIdx.y + gridDim.y * blockIdx.z;
  // NOTE: kernels that read weights which stand still before anything else start behind this one.
  tile::await_predecessors();
  if constexpr (kStacked) {
    const int group = rt / p.row_tiles;
    if (!p.groups.may_have_rows(group)) return;
    rt -= group * p.row_tiles;
    a = matrix_of<kFmt, kTransposed>(p.a, group);
  }
  const int64_t k0 = kt * int64_t{128};
  if (k0 >= a.k) return;
  const int all_rows = rt == p.row_tiles - 1 ? p.last_rows : 128;
  const int all_k = k0 + 128 >= a.k ? p.last_k : 128;
  pack_tile<kFmt, kTransposed>(s, p, a, rt, kt, all_rows, all_k);
}

// Of the e2m1 operands of a product that are k_last: one, or two of one k.
struct UnpackParams {
  PackSide sides[2];
};

// A CTA a tile: grid (tiles along k, row tiles of both sides). It starts beside the kernel before,
// and a product may start beside it.
__global__ void __launch_bounds__(kPackThreads, 6)
    unpack_kernel(const __grid_constant__ UnpackParams p) {
  __shared__ PackSmem<tile::Fp8::e2m1, false> s;
  const int first_tiles = p.sides[0].row_tiles;
  const bool second = static_cast<int>(blockIdx.y) >= first_tiles;
  const PackSide& side = p.sides[second ? 1 : 0];
  const int rt = static_cast<int>(blockIdx.y) - (second ? first_tiles : 0);
  const int kt = static_cast<int>(blockIdx.x);
  const int all_rows = rt == side.row_tiles - 1 ? side.last_rows : 128;
  const int all_k = kt == static_cast<int>(gridDim.x) - 1 ? side.last_k : 128;
  // NOTE: to L2 alone, which nobody looks at before it may. Of the 8 lanes of a row two ask for 32
  // bytes of codes each, one for the scales.
  const int r = threadIdx.x / 8, k = threadIdx.x % 8 * 16;
  const bool codes = k % 64 == 0 && k < all_k;
  if (codes || k == 16) {
    const int64_t ld = codes ? side.ld : side.scale_ld;
    const uint8_t* from =
        codes ? side.a.codes + kt * int64_t{64} + k / 2 : side.a.scales + kt * int64_t{4};
    from += (rt * int64_t{128} + r) * ld;
#pragma unroll
    for (int i = 0; i < 4; ++i, from += 32 * ld)
      if (r + 32 * i < all_rows) tile::prefetch_l2(from);
  }
  // NOTE: in this order, so that a kernel which starts early knows that everything before this one
  // is done (gemm_codes_kernel.cuh).
  tile::await_predecessors();
  tile::let_dependents_start();
  if (side.words && side.a.spread != kByRows && all_k == 128 && unpack_near(side, rt, kt, all_rows))
    return;
  pack_tile<tile::Fp8::e2m1, false>(s, side, side.a, rt, kt, all_rows, all_k);
}

// Weights of 4 bits that stand still, or the same rows of those of groups with rows.
struct StandingParams {
  PackSide side;
  GroupTable groups;  // count 0: one matrix
  int64_t blocks;     // of 64 rows and 128 of k, from matrix to matrix
};

__global__ void __launch_bounds__(kPackThreads, 6)
    unpack_standing(const __grid_constant__ StandingParams p) {
  __shared__ TileScales s;
  const PackSide& side = p.side;
  const int kt = static_cast<int>(blockIdx.x);
  int rt = static_cast<int>(blockIdx.y);
  PackTask a = side.a;
  if (p.groups.count > 0) {
    const int group = rt / side.row_tiles;
    rt -= group * side.row_tiles;
    tile::await_predecessors();
    if (!p.groups.may_have_rows(group)) return;
    a.codes += group * p.blocks * (4 * kNvfp4Codes),
        a.scales += group * p.blocks * (4 * kMxfp4Scales);
    a.out.codes += group * (a.rows * packed_ld(a.k));
    a.out.scales += group * packed_scale_words(a.rows, a.k);
  }
  const int all_rows = rt == side.row_tiles - 1 ? side.last_rows : 128;
  const int all_k = kt == static_cast<int>(gridDim.x) - 1 ? side.last_k : 128;
  unpack_tile(s, side, a, rt, kt, all_rows, all_k);
}

}  // namespace te_mx::sm90
