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

// kCols: rows of x in a block. kGroups: of 64 rows of weights in a tile, a warpgroup each.
template <int kColumns, int kTileGroups, bool kIsHalf>
struct Nvfp4Many {
  using Operand = Nvfp4Operand<kIsHalf>;
  static constexpr bool kHalf = kIsHalf, kMakes = false;
  static constexpr int kCols = kColumns, kGroups = kTileGroups, kParts = 1, kInStage = 1;
  static constexpr int kFloats = kCols / 2, kWarps = 4 * kGroups;
  static constexpr int kMath = 32 * kWarps, kThreads = kMath + 128;
  // Batches of products, of 32 of k, that are under way, the one that is made included.
  static constexpr int kAhead = kCols == 128 ? 4 : 2;
  static constexpr int kRegisters = kGroups == 2 ? 232 : 152;
  static constexpr int kX = kCols * kNvfp4Quad * 2, kW = kGroups * kNvfp4Block;
  static constexpr int kFragments = kCols / 8 * kWarps;
  static constexpr int kStages =
      226 * 1024 / (kX + kW) < kNvfp4MostStages ? 226 * 1024 / (kX + kW) : kNvfp4MostStages;
  // Rows of out that a warpgroup has in shared memory at once, in 128 bytes each: so many times all
  // warpgroups have as much room as a stage of x.
  static constexpr int kLines = kCols / (kGroups == 2 ? 1 : 2), kLineBytes = 128;
  static_assert(kGroups * kLines * kLineBytes <= kX);
  // Pairs of fragments, of 16 rows of x, that a CTA of a cluster adds up, and sums of other CTAs.
  static constexpr int kPairs = kCols / 16;
  static __host__ __device__ constexpr int pairs_of(int rank, int cluster) {
    return kPairs / cluster + (rank < kPairs % cluster ? 1 : 0);
  }
  // Sums of all parts take the place of stages.
  static constexpr int kSums = (kFragments + kDecodeMaxCluster) * 512;
  static constexpr int kStaged = kStages * (kX + kW);
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

// The end of a tile where out has 16 bits in whole lines and nothing is done but to scale, add a
// bias and round: fragments of 16 rows of x go to shared memory at `room` and leave as rows of 128
// bytes. sum(j, v): the eight sums of the lane of pair j, of `first` to `last`.
template <class Math, class Sum>
__device__ __forceinline__ void write_lines(const Nvfp4Params& p, const DecodeBlock& rows, int n0,
                                            uint32_t room, int first, int last, const Sum& sum) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = threadIdx.x % 32;
  const int group = warp / 4, thread = threadIdx.x % 128;
  const int64_t matrix0 = int64_t{rows.group} * p.n;
  float scale[2], bias[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int n = min(n0 + warp * 16 + lane / 4 + 8 * i, p.n - 1);
    scale[i] =
        (p.mx ? 1.0f : __ldg(p.scale + (p.scale_rows ? matrix0 + n : rows.group))) * kNvfp4Up;
    if (p.out.bias != nullptr) bias[i] = load_number(p.out.bias, matrix0 + n, p.out.bias_dtype);
  }
  room += group * Math::kLines * Math::kLineBytes;
  // Sixteen bytes c of row r lie at c ^ (r % 8).
  const uint32_t to = room + (lane / 16 * 8 + lane % 8) * Math::kLineBytes +
                      ((warp % 4 * 2 + lane / 8 % 2) ^ (lane % 8)) * 16;
  const int chunk = thread % 8, line = thread / 8, n = n0 + group * kNvfp4Rows + chunk * 8;
  const uint32_t from = room + line * Math::kLineBytes + (chunk ^ (line % 8)) * 16;
  auto* const out = static_cast<uint16_t*>(p.out.out) + (int64_t{rows.first} + line) * p.out.ld + n;
  constexpr int kEach = Math::kLines / 16;
#pragma unroll
  for (int pass = 0; pass < Math::kPairs; pass += kEach) {
    if (pass + kEach <= first || pass >= last) continue;
    if (pass > first) tile::named_barrier(3 + group, 128);  // all have read the lines before
#pragma unroll
    for (int j = pass; j < pass + kEach; ++j) {
      if (j < first || j >= last) continue;
      float v[8];
      sum(j, v);
      uint32_t m[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        m[i] = pair_of(p.out.dtype, __fadd_rn(__fmul_rn(v[2 * i], scale[i % 2]), bias[i % 2]),
                       __fadd_rn(__fmul_rn(v[2 * i + 1], scale[i % 2]), bias[i % 2]));
      tile::stmatrix_x4_turned(to + (j - pass) * 16 * Math::kLineBytes, m[0], m[1], m[2], m[3]);
    }
    tile::named_barrier(3 + group, 128);
#pragma unroll 4
    for (int j = max(pass, first); j < min(pass + kEach, last); ++j) {
      const uint4 four = tile::load_shared16(from + (j - pass) * 16 * Math::kLineBytes);
      if (j * 16 + line < rows.count && n < p.n)
        *reinterpret_cast<uint4*>(out + int64_t{j} * 16 * p.out.ld) = four;
    }
  }
}

// Of a cluster: CTA r adds up pairs_of(r) pairs of all warps. Each warp keeps its sums of these and
// sends the others to the same warp of who adds them up, in the order of ranks.
template <class Math>
__device__ __forceinline__ void add_over_cluster(const Nvfp4Place<Math>& at, const Nvfp4Params& p,
                                                 const DecodeBlock& rows, int n0,
                                                 const float (&d)[Math::kFloats]) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = threadIdx.x % 32;
  const int cluster = p.cluster, rank = at.rank, mine = Math::pairs_of(rank, cluster);
  int owner = 0, inside = 0, of = Math::pairs_of(0, cluster), first = 0;
  for (int r = 0; r < rank; ++r) first += Math::pairs_of(r, cluster);
#pragma unroll
  for (int j = 0; j < Math::kPairs; ++j) {
    if (owner != rank) {
      float4* const to = reinterpret_cast<float4*>(at.sums()) +
                         ((warp * of + inside) * (cluster - 1) + rank - (rank > owner)) * 64 + lane;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* const v = d + 8 * j + 4 * half;
        tile::send(to + 32 * half,
                   uint4{__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                         __float_as_uint(v[3])},
                   at.sums_bar(), owner);
      }
    }
    if (++inside == of) inside = 0, of = Math::pairs_of(++owner, cluster);
  }
  tile::mbar_wait_sent(at.sums_bar(), 0);
  const float4* const got = reinterpret_cast<const float4*>(at.sums()) +
                            (warp * mine - first) * (cluster - 1) * 64 + lane;
  const uint32_t room = at.base + Math::kWarps * mine * (cluster - 1) * 1024;
  write_lines<Math>(p, rows, n0, room, first, first + mine, [&](int j, float (&v)[8]) {
    const float4* from = got + j * (cluster - 1) * 64;
#pragma unroll 1
    for (int part = 0; part < cluster; ++part) {
      float own[8];
      if (part == rank) {
#pragma unroll
        for (int i = 0; i < 8; ++i) own[i] = d[8 * j + i];
      } else {
        const float4 a = from[0], b = from[32];
        own[0] = a.x, own[1] = a.y, own[2] = a.z, own[3] = a.w;
        own[4] = b.x, own[5] = b.y, own[6] = b.z, own[7] = b.w;
        from += 64;
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = part == 0 ? own[i] : __fadd_rn(v[i], own[i]);
    }
  });
}

template <class Math>
__global__ void __launch_bounds__(Math::kThreads, 1)
    nvfp4_many(const __grid_constant__ CUtensorMap map, const __grid_constant__ CUtensorMap end,
               const __grid_constant__ Nvfp4Params p, const __grid_constant__ DecodeRows given) {
  using Operand = typename Math::Operand;
  extern __shared__ __align__(1024) uint8_t smem[];
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = threadIdx.x % 32;
  const Nvfp4Place<Math> at(p, smem);
  const int begin = p.begin + static_cast<int>(tile::cluster_index());
  const auto by = static_cast<int>(tile::cluster_count());
  const int all = p.end;
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
  if (warp == Math::kMath / 32) {
    if (lane == 0) tile::tma_prefetch(&map), tile::tma_prefetch(&end);
    at.start(p.lines ? Math::pairs_of(at.rank, p.cluster) * (p.cluster - 1) * 2 * Math::kWarps
                     : at.mine() * p.cluster);
  }
  __syncthreads();
  tile::let_dependents_start();

  if (warp >= Math::kMath / 32) {
    tile::registers_down<40>();
    const bool asks = warp == Math::kMath / 32 && tile::elect_one();
    const int ahead = min(Math::kStages, at.length);
    if (asks) {
      for (int i = 0; i < ahead; ++i) at.ask_weights(own.group, own_tile.tile_n, own.first, i, i);
      if (own.early()) tile::await_predecessors();
    }
    __syncwarp();
    if (asks) {
      int s = 0, phase = 1;
#pragma unroll 1
      for (int index = begin; index < all; index += by) {
        const Nvfp4Tile<Math> t(p, index);
        const int row0 = index == begin ? own.first : t.block * Math::kCols;
#pragma unroll 1
        for (int i = 0; i < at.length; ++i) {
          tile::mbar_wait(at.empty + 8 * s, phase);
          if (i >= ahead || index != begin) at.ask_weights(own.group, t.tile_n, row0, i, s);
          at.ask_x({map, end}, row0, i, s);
          if (++s == Math::kStages) s = 0, phase ^= 1;
        }
        if (!p.walks) break;
      }
    }
    __syncwarp();
    if (p.cluster > 1) tile::cluster_arrive(), tile::cluster_wait();
    return;
  }

  tile::registers_up<Math::kRegisters>();
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
      uint32_t a[2 * Math::kAhead][4];
#pragma unroll
      for (int two = 0; two < 4; ++two) {  // times 16 of k
        tile::wgmma_wait<Math::kAhead - 1>();
        if (two == Math::kAhead - 1 && i > 0) release(at, before);
#pragma unroll
        for (int j = 2 * two; j < 2 * two + 2; ++j) {
          if (j % 4 == 0) codes = tile::load_shared16(w + j / 4 * 512);
          const uint32_t word = j % 4 == 0   ? codes.x
                                : j % 4 == 1 ? codes.y
                                : j % 4 == 2 ? codes.z
                                             : codes.w;
          Operand::make(a[j % (2 * Math::kAhead)], word, scales.of(j));
        }
        tile::wgmma_fence();
#pragma unroll
        for (int j = 2 * two; j < 2 * two + 2; ++j)
          Operand::multiply(d, a[j % (2 * Math::kAhead)],
                            x + j / 4 * (Math::kX / 2 / 16) + j % 4 * 2);
        tile::wgmma_commit();
      }
      before = s;
      if (++s == Math::kStages) s = 0, phase ^= 1;
    }
    tile::wgmma_wait<0>();
    tile::wgmma_pin(d);
    const int n0 = t.tile_n * Math::kGroups * kNvfp4Rows;
    if (p.lines && p.cluster == 1) {
      tile::named_barrier(2, Math::kMath);  // all have read the last stage, which has room now
      write_lines<Math>(p, rows, n0, at.x(before), 0, Math::kPairs, [&](int j, float (&v)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = d[8 * j + i];
      });
      if (!p.walks) return;
      tile::fence_async_proxy();
      __syncwarp();
      release(at, before);
      continue;
    }
    release(at, before);
    if (p.cluster > 1) {
      tile::cluster_arrive(), tile::cluster_wait();  // all have read their stages
      if (p.lines) return add_over_cluster<Math>(at, p, rows, n0, d);
    } else {
      tile::named_barrier(2, Math::kMath);
    }
    float4* const to = reinterpret_cast<float4*>(at.sums()) + at.rank * 32 + lane;
#pragma unroll
    for (int j = 0; j < Math::kCols / 8; ++j) {
      const int fragment = j * Math::kWarps + warp, turn = p.of_cluster(fragment);
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
    const float whole = scale_of(p, rows.group);
    finish_fragments<Math::kWarps, Math::kMath, 1>(
        at, at.rank, n0, rows.count, [&](int col, int n, int count, float (&v)[8]) {
          write_scaled(at.p, rows, matrix0, whole, col, n, count, v);
        });
    return;
  }
}

}  // namespace te_mx::sm90
