// Many rows of x, bf16 or fp16, times NVFP4 weights that stand still: the product of
// nvfp4_kernel.cuh for blocks whose products take longer than weights take to come.
//
// Products of a stage are not waited for at its end but in the middle of the next one, so that
// tensor cores always have some; then the stage is given back. Where nothing is done to sums but to
// scale them, add a bias and round them, a CTA walks over tiles, and its next stages come
// meanwhile.
#pragma once

#include <algorithm>

#include "mxtile/sm90/shared.cuh"
#include "nvfp4/nvfp4_kernel.cuh"

namespace te_mx::sm90 {

// kCols: rows of x in a block. kGroups: of 64 rows of weights in a tile.
template <int kColumns, bool kIsHalf>
struct Nvfp4Many {
  using Operand = Nvfp4Operand<kIsHalf>;
  static constexpr bool kHalf = kIsHalf, kMakes = false;
  static constexpr int kCols = kColumns, kGroups = 2, kParts = 1;
  static constexpr int kFloats = kCols / 2, kWarps = 4 * kGroups;
  static constexpr int kMath = 32 * kWarps, kThreads = kMath + 128;
  static constexpr int kX = kCols * kNvfp4Quad * 2, kW = kGroups * kNvfp4Block;
  static constexpr int kFragments = kCols / 8 * kWarps;
  static constexpr int kRowBytes = 48, kRoom = 16 * kRowBytes;  // NOTE: eight rows meet all banks
  static constexpr int kSpace = 226 * 1024 - kWarps * kRoom;
  static constexpr int kStages =
      kSpace / (kX + kW) < kNvfp4MostStages ? kSpace / (kX + kW) : kNvfp4MostStages;
  static constexpr int kRoomAt = kStages * (kX + kW);
  // Sums of all parts take the place of stages.
  static constexpr int kSums = (kFragments + kDecodeMaxCluster) * 512;
  static constexpr int kStaged = kRoomAt + kWarps * kRoom;
  static constexpr int kSmem = 1024 + (kStaged > kSums ? kStaged : kSums);
};

// By a whole warp, of which all have read stage s.
template <class Math>
__device__ __forceinline__ void release(const Nvfp4Place<Math>& at, int s) {
  // NOTE: with elect_one() ptxas serializes the products behind it (C7513).
  if (threadIdx.x % 32 == 0) tile::mbar_arrive(at.bars + kNvfp4MostStages + s);
}

// Scales of a quad of a warp's rows, two for each 16 of k.
struct TwoScales {
  uint32_t two[8];
  __device__ __forceinline__ uint32_t of(int j) const { return two[j]; }
};
template <class Math>
__device__ __forceinline__ TwoScales two_scales(uint32_t at, bool mx) {
  TwoScales made;
  if (mx) {
    if constexpr (!Math::kHalf) {
      const QuadScales<Math, true> scales(at);
#pragma unroll
      for (int j = 0; j < 8; ++j) made.two[j] = scales.of(j);
    }
  } else {
    const QuadScales<Math, false> scales(at);
#pragma unroll
    for (int j = 0; j < 8; ++j) made.two[j] = scales.of(j);
  }
  return made;
}

template <class Math>
__global__ void __launch_bounds__(Math::kThreads, 1)
    nvfp4_many(const __grid_constant__ CUtensorMap map, const __grid_constant__ Nvfp4Params p,
               const __grid_constant__ DecodeRows given) {
  using Operand = typename Math::Operand;
  extern __shared__ __align__(1024) uint8_t smem[];
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = threadIdx.x % 32;
  const Nvfp4Place<Math> at(p, smem);
  const auto begin = static_cast<int>(tile::cluster_index());
  const auto by = static_cast<int>(tile::cluster_count());
  const int all = tiles_of<Math>(p.groups) * p.blocks;
  const Nvfp4Tile<Math> own_tile(p, begin);
  DecodeRows own = given;
  if (!own.early()) tile::await_predecessors();
  if (!own.begin(own_tile.block)) return;
  if (own.group < 0) {
    const int n = own_tile.tile_n * Math::kGroups * kNvfp4Rows;
    if (at.rank == 0)
      clear<Math::kThreads>(p.out, own, n, min(p.n, n + Math::kGroups * kNvfp4Rows));
    return;
  }
  if (threadIdx.x == Math::kMath) tile::tma_prefetch(&map), at.start();
  __syncthreads();
  tile::let_dependents_start();

  if (warp >= Math::kMath / 32) {
    tile::registers_down<40>();
    const bool asks = warp == Math::kMath / 32 && tile::elect_one();
    const int ahead = min(Math::kStages, at.length);
    if (asks) {
      for (int i = 0; i < ahead; ++i) at.ask_weights(own.group, own_tile.tile_n, i, i);
      if (own.early()) tile::await_predecessors();
    }
    __syncwarp();
    if (asks) {
      int s = 0, phase = 1, asked = 0;
#pragma unroll 1
      for (int index = begin; index < all; index += by) {
        const Nvfp4Tile<Math> t(p, index);
        const int row0 = index == begin ? own.first : t.block * Math::kCols;
#pragma unroll 1
        for (int i = 0; i < at.length; ++i) {
          tile::mbar_wait(at.empty + 8 * s, phase);
          if (asked >= ahead) at.ask_weights(own.group, t.tile_n, i, s);
          ++asked;
          at.ask_x(&map, row0, i, s);
          if (++s == Math::kStages) s = 0, phase ^= 1;
        }
        if (!p.walks) break;
      }
    }
    __syncwarp();
    if (p.cluster > 1) tile::cluster_arrive(), tile::cluster_wait();
    return;
  }

  tile::registers_up<232>();
  int s = 0, phase = 0, before = 0;
  const uint32_t codes0 = at.w(0) + warp * kNvfp4Codes + lane * 16;
  const bool mx = !Math::kHalf && p.mx;
  const uint32_t scales0 = at.w_scales(0) + (mx ? warp * kMxfp4Scales + lane / 4 * 8
                                                : warp * kNvfp4Scales + lane / 4 * 16);
  const int64_t matrix0 = int64_t{own.group} * p.n;
#pragma unroll 1
  for (int index = begin; index < all; index += by) {
    const Nvfp4Tile<Math> t(p, index);
    DecodeRows rows = own;
    if (index != begin) rows.begin(t.block);
    float d[Math::kFloats] = {};
#pragma unroll 1
    for (int i = 0; i < at.length; ++i) {
      tile::mbar_wait(at.full + 8 * s, phase);
      const uint32_t x = tile::wgmma_desc_at(at.x(s)), w = codes0 + s * Math::kW;
      const auto scales = two_scales<Math>(scales0 + s * Math::kW, mx);
      uint4 codes{};
      uint32_t a[4][4];
#pragma unroll
      for (int two = 0; two < 4; ++two) {  // times 16 of k
        tile::wgmma_wait<1>();
        if (two == 1 && i > 0) release(at, before);
#pragma unroll
        for (int j = 2 * two; j < 2 * two + 2; ++j) {
          if (j % 4 == 0) codes = tile::load_shared16(w + j / 4 * 512);
          const uint32_t word = j % 4 == 0   ? codes.x
                                : j % 4 == 1 ? codes.y
                                : j % 4 == 2 ? codes.z
                                             : codes.w;
          Operand::make(a[j % 4], word, scales.of(j));
        }
        tile::wgmma_fence();
#pragma unroll
        for (int j = 2 * two; j < 2 * two + 2; ++j)
          Operand::multiply(d, a[j % 4], x + j / 4 * (Math::kX / 2 / 16) + j % 4 * 2);
        tile::wgmma_commit();
      }
      before = s;
      if (++s == Math::kStages) s = 0, phase ^= 1;
    }
    tile::wgmma_wait<0>();
    tile::wgmma_pin(d);
    release(at, before);
    const int n0 = t.tile_n * Math::kGroups * kNvfp4Rows;
    if (!p.walks) {
      if (p.cluster > 1) {
        tile::cluster_arrive(), tile::cluster_wait();  // all have read their stages
      } else {
        tile::named_barrier(2, Math::kMath);
      }
      float4* const to = reinterpret_cast<float4*>(at.sums()) + at.rank * 32 + lane;
#pragma unroll
      for (int j = 0; j < Math::kCols / 8; ++j) {
        const int fragment = j * Math::kWarps + warp, turn = fragment / p.cluster;
        const float* const v = d + 4 * j;
        // NOTE: not send_sums(), whose quotients for one CTA take 1 % of a product here.
        if (p.cluster == 1) {
          to[fragment * 32] = {v[0], v[1], v[2], v[3]};
        } else {
          tile::send(to + turn * p.cluster * 32,
                     uint4{__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                           __float_as_uint(v[3])},
                     at.sums_bar(), fragment - turn * p.cluster);
        }
      }
      if (p.cluster > 1) {
        tile::mbar_wait_sent(at.sums_bar(), 0);
      } else {
        tile::named_barrier(2, Math::kMath);
      }
      finish_fragments<Math::kWarps, Math::kMath, 1>(
          at, at.rank, n0, rows.count, [&](int col, int n, int count, float (&v)[8]) {
            write_scaled(at.p, rows, matrix0, col, n, count, v);
          });
      return;
    }
    // 16 rows of x at a time, 32 bytes of each, by the warp's own room.
    float scale[2], bias[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int n = min(n0 + warp * 16 + lane / 4 + 8 * i, p.n - 1);
      scale[i] = (p.mx ? 1.0f : __ldg(p.scale + (p.scale_rows ? n : 0))) * kNvfp4Up;
      if (p.out.bias != nullptr) bias[i] = load_number(p.out.bias, n, p.out.bias_dtype);
    }
    const uint32_t room = at.base + Math::kRoomAt + warp * Math::kRoom;
    const uint32_t to = room + (lane / 16 * 8 + lane % 8) * Math::kRowBytes + lane / 8 % 2 * 16;
    const uint32_t from = room + lane / 2 * Math::kRowBytes + lane % 2 * 16;
    const int n = n0 + warp * 16 + lane % 2 * 8;
    auto* const out =
        static_cast<uint16_t*>(p.out.out) + (int64_t{rows.first} + lane / 2) * p.out.ld + n;
#pragma unroll
    for (int j = 0; j < Math::kCols / 8; j += 2) {
      uint32_t m[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const v = d + 4 * j + 2 * i;
        m[i] = pair_of(p.out.dtype, v[0] * scale[i % 2] + bias[i % 2],
                       v[1] * scale[i % 2] + bias[i % 2]);
      }
      tile::stmatrix_x4_turned(to, m[0], m[1], m[2], m[3]);
      __syncwarp();
      const uint4 v = tile::load_shared16(from);
      __syncwarp();
      if (j * 8 + lane / 2 < rows.count && n < p.n)
        *reinterpret_cast<uint4*>(out + j * 8 * p.out.ld) = v;
    }
  }
}

}  // namespace te_mx::sm90
