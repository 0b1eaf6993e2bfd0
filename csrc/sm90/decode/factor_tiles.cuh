// Rows of x times blockwise FP8 weights that stand still in tiles (sm90_layout.h), of which a CTA
// has 128 rows: out[row, n] = sum over k of x[row, k] w[n, k].
//
// Grid: x = tiles of weights * blocks of kCols rows of x * CTAs of a cluster. The transposed
// product on wgmma: weights are operand A, from shared memory as they came; x, prepared
// (decode_input.cuh) in blocks of 64 rows, is operand B. A quad, 128 of k, has one sum, which goes
// to fp32 times the scale of the weights and then that of the row. CTAs of a cluster have parts of
// k, whose sums go to the CTA that adds them up, in order: the bits of a row depend on n, k and the
// number of parts, not on the other rows of x.
//
// One warp asks for quads, first of all those of weights, before it waits for the kernel that wrote
// x; two warpgroups multiply 64 rows of weights each.
#pragma once

#include "common/shares.cuh"
#include "common/stages.cuh"
#include "decode/decode_input.cuh"
#include "decode/decode_out.cuh"
#include "mxtile/sm90/cluster.cuh"
#include "mxtile/sm90/shared.cuh"
#include "mxtile/sm90/tma.cuh"
#include "mxtile/sm90/wgmma_registers.cuh"
#include "mxtile/sm90/wgmma_shared.cuh"

namespace te_mx::sm90 {

inline constexpr int kFactorMath = 256, kFactorThreads = kFactorMath + 32;
inline constexpr int kFactorMostStages = 12;
inline constexpr int kFactorTile = 128;                           // rows of weights
inline constexpr int kFactorWeights = kFactorTile * kDecodeQuad;  // bytes of a quad
inline constexpr int kMadeCodes = decode_input_bytes(kDecodeMostRows, false),
                     kMadeScales = decode_scale_bytes(kDecodeMostRows);  // of prepared x

struct FactorTilesParams {
  const uint8_t* made = nullptr;  // x: [64 rows][quad], codes, then scales
  const uint8_t* made_scales = nullptr;
  const uint8_t* factors = nullptr;  // of weights
  int64_t factors_quad = 0;          // bytes from a quad to the next
  bool factor_rows = false;          // every row has its own; else 128
  int m = 0, n = 0, quads = 0;
  int cluster = 1, blocks = 1, stages = 0, sums_at = 0;
  Shares parts;  // of quads
  DecodeOut out;
};

struct FactorRoom {
  int stages, sums_at, bytes;
};

// kBlock: rows of x in a block, 64 or 128.
template <int kBlock>
struct FactorMath {
  static constexpr int kCols = kBlock, kFloats = kCols / 2, kPieces = kCols / kDecodeMostRows;
  static constexpr bool kTwoQuads = kCols == 64;  // are multiplied at once: there are registers
  static constexpr int kX = kCols * kDecodeQuad, kStage = kX + kFactorWeights;
  static constexpr int kScales = kCols * 4, kBeside = kScales + kFactorTile * 4;
  static constexpr int kFragments = kCols / 8 * (kFactorTile / 16);
  // One CTA an SM, as others of the same product would gather on some.
  static constexpr int kSmem = 226 * 1024, kLeastSmem = 114 * 1024;
  // Of a part of so many quads. Sums lie behind the stages, or in their place where there would be
  // too few of these.
  static constexpr FactorRoom room(int cluster, int quads) {
    const int sums = (kFragments + cluster - 1) / cluster * cluster * 512;
    const int stage = kStage + kBeside, space = kSmem - 1024;
    const auto fit = [&](int bytes) {
      const int some = bytes / stage, most = some < kFactorMostStages ? some : kFactorMostStages;
      return quads < most ? quads : most;
    };
    const int apart = fit(space - sums), over = fit(space);
    if (apart >= 4 || apart == over) return {apart, apart * stage, 1024 + apart * stage + sums};
    return {over, 0, 1024 + (over * stage > sums ? over * stage : sums)};
  }
};

template <class Math>
struct FactorPlace {
  const FactorTilesParams& p;
  uint8_t* smem;
  int rank, tile_n, block, first, length;  // first, length: of its quads
  uint32_t base, full, empty;              // barriers of stages that are there, were read
  uint64_t* bars;

  __device__ __forceinline__ FactorPlace(const FactorTilesParams& p, uint8_t* smem)
      : p(p), smem(smem), rank(static_cast<int>(tile::cluster_rank())) {
    const int index = static_cast<int>(tile::cluster_index());
    tile_n = index / p.blocks, block = index - tile_n * p.blocks;
    const Range quads(p.parts, rank);
    first = quads.first, length = quads.last - first;
    bars = reinterpret_cast<uint64_t*>(smem);
    base = tile::smem_addr(smem) + 1024, full = base - 1024, empty = full + 8 * kFactorMostStages;
  }
  __device__ __forceinline__ uint64_t* sums_bar() const { return bars + 2 * kFactorMostStages; }
  // Fragments of 16 rows of weights and 8 of x that this CTA adds up.
  __device__ __forceinline__ int mine() const {
    return (Math::kFragments - rank + p.cluster - 1) / p.cluster;
  }
  __device__ __forceinline__ uint32_t x(int s) const { return base + s * Math::kStage; }
  __device__ __forceinline__ uint32_t w(int s) const { return x(s) + Math::kX; }
  __device__ __forceinline__ uint32_t scales(int s) const {
    return base + p.stages * Math::kStage + s * Math::kBeside;
  }
  __device__ __forceinline__ uint32_t factors(int s) const { return scales(s) + Math::kScales; }
  __device__ __forceinline__ bool over() const { return p.sums_at == 0; }
  __device__ __forceinline__ uint8_t* sums() const { return smem + 1024 + p.sums_at; }
  // Pieces of prepared x that there are of the block.
  __device__ __forceinline__ int pieces() const {
    const int all = (p.m + kDecodeMostRows - 1) / kDecodeMostRows;
    return min(Math::kPieces, all - block * Math::kPieces);
  }
  __device__ __forceinline__ void start() const {
    for (int i = 0; i < p.stages; ++i) {
      tile::mbar_init(bars + i, 1);
      tile::mbar_init(bars + kFactorMostStages + i, kFactorMath / 32);
    }
    tile::mbar_init(sums_bar(), 1);
    tile::mbar_init_fence();
    if (p.cluster > 1) tile::mbar_arrive_expect(sums_bar(), mine() * p.cluster * 512);
  }
  // Asks for quad i of the CTA, to stage s, by one thread.
  // NOTE: rows of weights that are not there are not asked for (TensorMaps).
  __device__ __forceinline__ void ask_weights(const CUtensorMap& map, const CUtensorMap& end, int i,
                                              int s) const {
    const uint32_t bar = full + 8 * s;
    const int q = first + i, bytes = p.factor_rows ? kFactorTile * 4 : 16;
    const int rows = min(kFactorTile, p.n - tile_n * kFactorTile);
    tile::mbar_arrive_expect(
        bar, rows * kDecodeQuad + bytes + pieces() * kDecodeMostRows * (kDecodeQuad + 4));
    tile::tma_load(w(s), rows == kFactorTile ? &map : &end, bar, q * kDecodeQuad,
                   tile_n * kFactorTile);
    // NOTE: of tiles four at a time, as copies start at whole 16 bytes.
    const int at = p.factor_rows ? tile_n * kFactorTile : tile_n & ~3;
    tile::bulk_load(factors(s), p.factors + q * p.factors_quad + at * 4, bytes, bar);
  }
  __device__ __forceinline__ void ask_x(int i, int s) const {
    const uint32_t bar = full + 8 * s;
    int64_t from = int64_t{block} * Math::kPieces * p.quads + first + i;
    const int there = pieces();
#pragma unroll
    for (int piece = 0; piece < Math::kPieces; ++piece) {
      if (piece < there) {
        tile::bulk_load(x(s) + piece * kMadeCodes, p.made + from * kMadeCodes, kMadeCodes, bar);
        tile::bulk_load(scales(s) + piece * kDecodeMostRows * 4, p.made_scales + from * kMadeScales,
                        kDecodeMostRows * 4, bar);
      }
      from += p.quads;
    }
  }
  __device__ __forceinline__ void ask_all(const CUtensorMap& map, const CUtensorMap& end) const {
    ask_stages(
        p.stages, length, empty, [&](int i, int s) { ask_weights(map, end, i, s); },
        [] { tile::await_predecessors(); }, [&](int i, int s) { ask_x(i, s); });
  }
  __device__ __forceinline__ void all_may_send() const {
    if (p.cluster == 1) return;
    if (over()) tile::cluster_arrive();
    tile::cluster_wait();
  }
};

// Sums of a warp: of lane 4g + t rows g and g + 8 of its 16 of weights, rows 8j + 2t and
// 8j + 2t + 1 of x.
template <class Math>
struct FactorSums {
  static constexpr int kFloats = Math::kFloats;
  float v[kFloats] = {};

  // Starts the products of wgmma_desc w with x.
  static __device__ __forceinline__ void start(float (&d)[kFloats], uint32_t w, uint32_t x) {
    tile::wgmma_fence();
    tile::wgmma_shared<false>(d, w, x);
    tile::wgmma_shared<true>(d, w + 2, x + 2);
    tile::wgmma_shared<true>(d, w + 4, x + 4);
    tile::wgmma_shared<true>(d, w + 6, x + 6);
    tile::wgmma_commit();
  }
  // Adds what they are times the scales of the lane's rows and those of x, which lie at a shared
  // address.
  __device__ __forceinline__ void add(float (&d)[kFloats], float low, float high, uint32_t scales) {
    tile::wgmma_pin(d);
    // NOTE: one product after the other; that of the scales need not be a number of fp32.
    const auto four = [&](int i, uint32_t even_word, uint32_t odd_word) {
      const float even = __uint_as_float(even_word), odd = __uint_as_float(odd_word);
      v[i] = fmaf(d[i] * low, even, v[i]), v[i + 1] = fmaf(d[i + 1] * low, odd, v[i + 1]);
      v[i + 2] = fmaf(d[i + 2] * high, even, v[i + 2]);
      v[i + 3] = fmaf(d[i + 3] * high, odd, v[i + 3]);
    };
#pragma unroll
    for (int i = 0; i < Math::kCols / 16; ++i) {
      const uint4 s = tile::load_shared16(scales + i * 64);
      four(8 * i, s.x, s.y), four(8 * i + 4, s.z, s.w);
    }
  }
};

template <class Math>
__global__ void __launch_bounds__(kFactorThreads, 1)
    factor_tiles(const __grid_constant__ CUtensorMap map, const __grid_constant__ CUtensorMap end,
                 const __grid_constant__ FactorTilesParams p) {
  extern __shared__ __align__(1024) uint8_t smem[];
  // NOTE: a number that the compiler sees is the same in all lanes: addresses stay uniform.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = threadIdx.x % 32;
  const FactorPlace<Math> at(p, smem);
  if (threadIdx.x == kFactorMath) tile::tma_prefetch(&map), at.start();
  __syncthreads();
  if (p.cluster > 1 && !at.over()) tile::cluster_arrive_relaxed();  // who has waited may send
  tile::let_dependents_start();

  constexpr int kMath = 1;  // named barrier
  if (warp == kFactorMath / 32) {
    if (tile::elect_one()) at.ask_all(map, end);
    __syncwarp();
    at.all_may_send();
    return;
  }

  const int group = warp / 4, row = warp * 16 + lane / 4;
  const int factor = p.factor_rows ? row * 4 : at.tile_n % 4 * 4;
  const int to_high = p.factor_rows ? 32 : 0;
  FactorSums<Math> sums;
  using Products = float[Math::kFloats];
  int s = 0, phase = 0;
  const auto begin = [&](Products& d) {
    tile::mbar_wait(at.full + 8 * s, phase);
    FactorSums<Math>::start(d, tile::wgmma_desc_at(at.w(s) + group * (kFactorWeights / 2)),
                            tile::wgmma_desc_at(at.x(s)));
  };
  const auto take = [&](Products& d, int stage) {
    const uint32_t own = at.factors(stage) + factor;
    sums.add(d, __uint_as_float(tile::ld_shared_u32(own)),
             __uint_as_float(tile::ld_shared_u32(own + to_high)), at.scales(stage) + lane % 4 * 16);
    __syncwarp();
    if (tile::elect_one()) tile::mbar_arrive(at.bars + kFactorMostStages + stage);
  };
  const auto next = [&] {
    if (++s == p.stages) s = 0, phase ^= 1;
  };
  int i = 0;
  if constexpr (Math::kTwoQuads) {
#pragma unroll 1
    for (; i + 1 < at.length; i += 2) {
      Products d0, d1;
      begin(d0);
      const int first = s;
      next();
      begin(d1);
      tile::wgmma_wait<1>();
      take(d0, first);
      tile::wgmma_wait<0>();
      take(d1, s);
      next();
    }
  }
#pragma unroll 1
  for (; i < at.length; ++i) {
    Products d;
    begin(d);
    tile::wgmma_wait<0>();
    take(d, s);
    next();
  }
  at.all_may_send();
  if (p.cluster == 1 && at.over()) tile::named_barrier(kMath, kFactorMath);  // all have read theirs
  float4* const all = reinterpret_cast<float4*>(at.sums()) + at.rank * 32 + lane;
#pragma unroll
  for (int j = 0; j < Math::kCols / 8; ++j) {
    const int fragment = j * 8 + warp, turn = fragment / p.cluster;
    send_sums(
        all + turn * p.cluster * 32, sums.v + 4 * j, p.cluster, [&] { return at.sums_bar(); },
        [&] { return fragment - turn * p.cluster; });
  }
  if (p.cluster > 1) {
    tile::mbar_wait_sent(at.sums_bar(), 0);
  } else {
    tile::named_barrier(kMath, kFactorMath);
  }
  const int row0 = at.block * Math::kCols;
  finish_fragments<kFactorMath / 32, kFactorMath, 1>(
      at, at.rank, at.tile_n * kFactorTile, min(Math::kCols, p.m - row0),
      [&](int col, int n, int count, float (&v)[8]) {
        write_eight(p.out, int64_t{row0} + col, n, 0, count, v);
      });
}

}  // namespace te_mx::sm90
