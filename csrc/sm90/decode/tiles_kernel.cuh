// Rows of x times MXFP8 weights that stand still in tiles (sm90_layout.h), of which a CTA has 128
// rows: out[row, n] = sum over k of x[row, k] w[n, k].
//
// Grid: x = tiles of weights * blocks of kCols rows * CTAs of a cluster. The transposed product on
// wgmma: weights are operand A, from shared memory as they came; x, aligned for 128 of k
// (aligned_rows.cuh), is operand B, so that a tile of one scale for a row has one sum of a quad to
// go to fp32. CTAs of a cluster have parts of k, whose sums go to the CTA that adds them up, in
// order: the bits of a row depend on n and k, not on the other rows of x nor on their number.
//
// One warp asks for quads, first of all those of weights, before it waits for the kernel that wrote
// x; two warpgroups multiply 64 rows of weights each. A few rows of x every CTA makes by itself,
// some quads ahead of those that it multiplies; of more, CTAs of kPeers tiles of weights, in one
// cluster, make a share each and send it to all.
#pragma once

#include <type_traits>

#include "decode/decode_weights.cuh"
#include "decode/tiles_make.cuh"
#include "mxtile/sm90/tma.cuh"
#include "mxtile/sm90/wgmma_shared.cuh"

namespace te_mx::sm90 {

// One lane of the warp that asks for what the others multiply.
template <class Math>
struct TilesProducer {
  const TilesPlace<Math>& at;
  const CUtensorMap* map;
  int rows;  // of weights, that there are: others are not asked for (TensorMaps)

  __device__ __forceinline__ TilesProducer(const TilesPlace<Math>& at, const CUtensorMap& whole,
                                           const CUtensorMap& end)
      : at(at), rows(max(min(kTilesRows, at.p.n - at.tile_n * kTilesRows), 0)) {
    map = rows == kTilesRows ? &whole : &end;
  }
  // Weights of the CTA's quad i to stage s.
  __device__ __forceinline__ void ask_weights(int i, int s, uint32_t bar) const {
    const int q = at.first + i;
    tile::mbar_arrive_expect(bar, Math::kStage + Math::kBeside - (kTilesRows - rows) * kDecodeQuad);
    if (rows > 0) tile::tma_load(at.stage(s), map, bar, q * kDecodeQuad, at.tile_n * kTilesRows);
    tile::bulk_load(at.beside(s), at.p.words + q * at.p.words_quad + at.tile_n * kTilesWords,
                    kTilesWords, bar);
  }
  __device__ __forceinline__ void ask_x(int pass, int i, int s, uint32_t bar) const {
    if constexpr (!Math::kMakesX) {
      const uint8_t* const from = at.p.x.at(at.block, pass, at.first + i);
      tile::bulk_load(at.stage(s) + kTilesWeights, from, Math::kCodes, bar);
      tile::bulk_load(at.beside(s) + kTilesWords, from + Math::kCodes, Math::kScales, bar);
    }
  }
  // All quads, one after the other.
  __device__ __forceinline__ void ask_all() const {
    const int stages = at.p.stages, ahead = min(stages, at.length);
    for (int i = 0; i < ahead; ++i) ask_weights(i, i, at.full + 8 * i);
    tile::await_predecessors();
    for (int i = 0; i < ahead; ++i) ask_x(0, i, i, at.full + 8 * i);
    int s = 0, phase = 0;
    for (int i = ahead; i < at.length; ++i) {
      tile::mbar_wait(at.empty + 8 * s, phase);
      ask_weights(i, s, at.full + 8 * s);
      ask_x(0, i, s, at.full + 8 * s);
      if (++s == stages) s = 0, phase ^= 1;
    }
  }
  // Further passes, which are rare: one quad after the other.
  __device__ __forceinline__ void ask_passes() const {
    const uint32_t bar = tile::smem_addr(at.pass_bar(0));
    int turn = 0;
    for (int pass = 1; pass < *at.most_passes; ++pass) {
      for (int i = 0; i < at.length; ++i) {
        if (at.passes[i] <= pass) continue;
        if (turn > 0) tile::mbar_wait(at.pass_bar(1), (turn - 1) & 1);
        ask_weights(i, 0, bar);
        ask_x(pass, i, 0, bar);
        ++turn;
      }
    }
  }
};

// Sums of a warp: of lane 4g + t rows g and g + 8 of its 16 of weights, rows 8j + 2t and
// 8j + 2t + 1 of x.
template <class Math>
struct TilesSums {
  static constexpr int kFloats = Math::kFloats;
  float v[kFloats] = {};

  // Adds d times the scales of the lane's rows of weights and of those of x. kLater: of a further
  // pass, where rows with a scale of 0 have none.
  template <bool kLater>
  __device__ __forceinline__ void promote(const float (&d)[kFloats], float low, float high,
                                          const float (&x)[Math::kX / 4]) {
#pragma unroll
    for (int i = 0; i < kFloats; ++i) {
      // NOTE: one product after the other; that of the scales need not be a number of fp32.
      const float one = x[i / 4 * 2 + i % 2];
      if (!kLater || one != 0.0f) v[i] = fmaf(d[i] * (i % 4 < 2 ? low : high), one, v[i]);
    }
  }

  // w: wgmma_desc of the warpgroup's weights; words: shared address of that of the lane's low row;
  // cls: of the class; x, scales: of the quad of x, scales of the lane. read(): the stage was.
  template <bool kLater, class Read>
  __device__ __forceinline__ void add(uint32_t w, uint32_t words, uint32_t cls, uint32_t x,
                                      uint32_t scales, const Read& read) {
    float d[kFloats] = {};
    const auto start = [&](int i, auto adds) { tile::wgmma_shared<adds>(d, w + 2 * i, x + 2 * i); };
    uint32_t low = tile::ld_shared_u32(words), high = tile::ld_shared_u32(words + 32);
    const bool shared = tile::ld_shared_u32(cls) < 2;
    float of_x[Math::kX / 4];
    const auto load_scales = [&] {
      if constexpr (Math::kX == 8) {
        const uint2 two = tile::load_shared8(scales);
        of_x[0] = __uint_as_float(two.x), of_x[1] = __uint_as_float(two.y);
      } else {
#pragma unroll
        for (int i = 0; i < Math::kX / 16; ++i) {
          const uint4 s = tile::load_shared16(scales + i * 64);
          of_x[4 * i] = __uint_as_float(s.x), of_x[4 * i + 1] = __uint_as_float(s.y);
          of_x[4 * i + 2] = __uint_as_float(s.z), of_x[4 * i + 3] = __uint_as_float(s.w);
        }
      }
    };
    if (shared) {
      tile::wgmma_fence();
      start(0, std::false_type{}), start(1, std::true_type{});
      start(2, std::true_type{}), start(3, std::true_type{});
      tile::wgmma_commit();
      load_scales();
      tile::wgmma_wait<0>();
      tile::wgmma_pin(d);
      read();
      // NOTE: the low bits of such words may say how to unpack codes.
      promote<kLater>(d, __uint_as_float(low & 0x7F800000u), __uint_as_float(high & 0x7F800000u),
                      of_x);
      return;
    }
    load_scales();
#pragma unroll 1
    for (int i = 0; i < 4; ++i, low >>= 8, high >>= 8) {
      tile::wgmma_fence();
      start(i, std::false_type{});
      tile::wgmma_commit();
      tile::wgmma_wait<0>();
      tile::wgmma_pin(d);
      promote<kLater>(d, scale_of(low, 0), scale_of(high, 0), of_x);
    }
    read();
  }
};

// Passes of the CTA's quads of prepared x, by the warps that multiply.
template <class Math>
__device__ __forceinline__ void find_tiles_passes(const TilesPlace<Math>& at) {
  constexpr int kGroups = Math::kX / kAlignRows;
  const int groups = (at.rows().count + kAlignRows - 1) / kAlignRows;
  for (int i = threadIdx.x; i < at.length; i += kTilesMath) {
    int most = 1;
    for (int g = 0; g < groups; ++g)
      most = max(most, int{__ldcg(at.p.x.passes + int64_t{at.block * kGroups + g} * at.p.x.quads +
                                  at.first + i)});
    if (most > 1) at.count_passes(i, most);
  }
}

// Sends the sums of a CTA's part of k to those who add them up.
template <class Math>
__device__ __forceinline__ void send_tiles(const TilesPlace<Math>& at, const TilesSums<Math>& sums,
                                           int warp, int lane) {
  const int parts = at.p.cluster;
  float4* const all = reinterpret_cast<float4*>(at.sums()) + at.part * 32 + lane;
#pragma unroll
  for (int j = 0; j < Math::kX / 8; ++j) {
    const int fragment = j * 8 + warp, turn = fragment / parts;
    send_sums(
        all + turn * parts * 32, sums.v + 4 * j, parts, [&] { return at.sums_bar(); },
        [&] { return (fragment - turn * parts) * Math::kPeers + at.peer; });
  }
}

template <class Math>
__global__ void __launch_bounds__(kTilesThreads, 2)
    tiles_kernel(const __grid_constant__ CUtensorMap map, const __grid_constant__ CUtensorMap end,
                 const __grid_constant__ TilesParams p) {
  extern __shared__ __align__(1024) uint8_t smem[];
  // NOTE: a number that the compiler sees is the same in all lanes: addresses stay uniform.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = threadIdx.x % 32;
  const TilesPlace<Math> at(p, smem);
  if (!at.take_rows()) return;
  if (threadIdx.x == kTilesMath) tile::tma_prefetch(&map), at.start();
  for (int i = threadIdx.x; i < at.length; i += kTilesThreads) at.passes[i] = 1;
  __syncthreads();
  // Whoever has waited for it may send.
  if (at.in_cluster()) tile::cluster_arrive_relaxed();
  if (Math::kShares) tile::cluster_wait();
  tile::let_dependents_start();
  const auto all_may_get = [&] {
    if (!Math::kShares && at.in_cluster()) tile::cluster_wait();
  };

  constexpr int kPassesKnown = 1, kMath = 2;  // named barriers
  if (warp == kTilesMath / 32) {
    const TilesProducer<Math> producer(at, map, end);
    const bool asks = tile::elect_one();
    if (asks) producer.ask_all();
    __syncwarp();
    tile::named_barrier(kPassesKnown, kTilesThreads);
    if (asks) producer.ask_passes();
    __syncwarp();
    all_may_get();
    return;
  }

  tile::await_predecessors();
  TilesSums<Math> sums;
  int s = 0;
  uint32_t phase = 0;
  // Quad i of the CTA, in stage `stage`; place: of made x.
  const auto multiply = [&](int stage, int place, auto later, const auto& read) {
    const uint32_t w = at.stage(stage), beside = at.beside(stage);
    const uint32_t x =
        Math::kMakesX ? at.base + at.room.x_at + place * Math::kCodes : w + kTilesWeights;
    const uint32_t scales = Math::kMakesX ? at.base + at.room.x_scales_at + place * Math::kScales
                                          : beside + kTilesWords;
    sums.template add<later>(tile::wgmma_desc_at(w + warp / 4 * (kTilesWeights / 2)),
                             beside + (warp * kDecodeRows + lane / 4) * 4, beside + kTilesRows * 4,
                             tile::wgmma_desc_at(x), scales + lane % 4 * (Math::kX == 8 ? 8 : 16),
                             read);
  };
  const auto multiply_next = [&](int place) {
    tile::mbar_wait(at.full + 8 * s, phase);
    multiply(s, place, std::false_type{}, [&] { at.release(s); });
    if (++s == p.stages) s = 0, phase ^= 1;
  };
  if constexpr (Math::kMakesX) {
    TilesMaker<Math> maker(at, 0);
    maker.load();
    const int chunks = (at.length + Math::kChunk - 1) / Math::kChunk;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const int half = chunk & 1;
      if constexpr (Math::kShares) {
        if (threadIdx.x == 0)
          tile::mbar_arrive_expect(at.made_bar(half),
                                   Math::kChunk * (Math::kCodes + Math::kScales) + Math::kFlags);
        maker.make(chunk, half, [&] {
          if (chunk > 1) tile::mbar_wait(at.used_bar(half), (chunk / 2 - 1) & 1);
        });
        tile::mbar_wait_sent(at.made_bar(half), chunk / 2 & 1);
        maker.count_passes(at, chunk, half);
        tile::fence_async_proxy();
        maker.load();  // NOTE: on its way while this one is multiplied
      } else {
        maker.make(chunk, half, [] {});
        tile::fence_async_proxy();
        maker.load();  // NOTE: behind the fence, which would wait for it
        tile::named_barrier(kMath, kTilesMath);
      }
      const int first = chunk * Math::kChunk, last = min(first + Math::kChunk, at.length);
#pragma unroll 1
      for (int i = first; i < last; ++i) multiply_next(half * Math::kChunk + i - first);
      if constexpr (Math::kShares) at.arrive_at_peers(at.used_bar(half), chunk + 2 < chunks);
    }
  } else {
    find_tiles_passes(at);
#pragma unroll 1
    for (int i = 0; i < at.length; ++i) multiply_next(0);
  }
  tile::named_barrier(kPassesKnown, kTilesThreads);
  const int most = *at.most_passes;
  uint32_t turn = 0;
  const auto multiply_again = [&](int place) {
    tile::mbar_wait(at.pass_bar(0), turn++ & 1);
    multiply(0, place, std::true_type{}, [] {});
    __syncwarp();
    if (tile::elect_one()) tile::mbar_arrive(at.pass_bar(1));
  };
#pragma unroll 1
  for (int pass = 1; pass < most; ++pass) {
    if constexpr (Math::kMakesX) {
#pragma unroll 1
      for (int first = 0; first < at.length; first += Math::kOwnChunk) {
        const int last = min(first + Math::kOwnChunk, at.length);
        bool any = false;
        for (int i = first; i < last; ++i) any |= at.passes[i] > pass;
        if (!any) continue;
        TilesMaker<Math, true> maker(at, first / Math::kOwnChunk);
        maker.load();
        tile::named_barrier(kMath, kTilesMath);  // all have multiplied what was there
        maker.make_pass(pass);
        tile::fence_async_proxy();
        tile::named_barrier(kMath, kTilesMath);
#pragma unroll 1
        for (int i = first; i < last; ++i)
          if (at.passes[i] > pass) multiply_again(i - first);
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < at.length; ++i)
        if (at.passes[i] > pass) multiply_again(0);
    }
  }
  all_may_get();
  send_tiles(at, sums, warp, lane);
  if (p.cluster > 1) {
    tile::mbar_wait_sent(at.sums_bar(), 0);
  } else {
    tile::named_barrier(kMath, kTilesMath);
  }
  finish_fragments<kTilesMath / 32, kTilesMath, 1>(
      at, at.part, at.tile_n * kTilesRows, at.rows().count,
      [&](int col, int n, int count, float (&v)[8]) {
        write_eight(at.p.out, int64_t{at.rows().first} + col, n, 0, count, v);
      });
}

}  // namespace te_mx::sm90
