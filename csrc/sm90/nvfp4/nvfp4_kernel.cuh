// Rows of x, bf16 or fp16, times NVFP4 weights that stand still (sm90_nvfp4.h):
// out[row, n] = scale * sum over k of x[row, k] w[n, k].
//
// Grid: x = tiles of weights * blocks of kCols rows (decode_rows.cuh) * CTAs of a cluster. The
// transposed product on wgmma: weights are operand A, codes times block scales from registers, so
// that nothing is scaled until the end; x is operand B, from shared memory as it came. CTAs of a
// cluster have parts of k, whose sums go to the CTA that adds them up, in order: the bits of a row
// depend on n and k, not on the other rows of x nor on their number.
//
// One warp asks for quads, first of all those of weights, before it waits for the kernel that wrote
// x; every warpgroup multiplies 64 rows of weights.
#pragma once

#include <type_traits>
#include <utility>

#include "common/shares.cuh"
#include "decode/decode_out.cuh"
#include "mxtile/sm90/cluster.cuh"
#include "mxtile/sm90/tma.cuh"
#include "nvfp4/nvfp4_operand.cuh"

namespace te_mx::sm90 {

inline constexpr int kNvfp4MostStages = 12;

struct Nvfp4Params {
  const uint8_t* w = nullptr;  // codes
  const uint8_t* w_scales = nullptr;
  const float* scale = nullptr;      // of every matrix
  int n = 0, groups = 0, quads = 0;  // groups: of 64 rows of a matrix
  int cluster = 1, blocks = 1, stages = 0, sums_at = 0;
  Shares parts;  // of quads
  DecodeOut out;
};

// What goes where in shared memory behind the barriers: stages of x, then of weights, from 0 on;
// sums, at 0 where they take the place of all that.
struct Nvfp4Room {
  int stages, sums_at, bytes;
};

// kCols: rows of x in a block. kGroups: of 64 rows of weights in a tile.
template <int kColumns, int kTileGroups, int kCtasOfSm, bool kIsHalf, int kAtOnce = 2>
struct Nvfp4Math {
  using Operand = Nvfp4Operand<kIsHalf>;
  static constexpr bool kHalf = kIsHalf;
  static constexpr int kCols = kColumns, kGroups = kTileGroups, kCtas = kCtasOfSm;
  static constexpr int kFloats = kCols / 2, kTogether = kAtOnce;
  static constexpr int kBatch = kCols > 64 ? 2 : 4;  // operands that are made together
  // NOTE: a whole warpgroup that asks gives its registers away.
  static constexpr bool kManyRegisters = kCols > 128;
  static constexpr int kMath = 128 * kGroups, kThreads = kMath + (kManyRegisters ? 128 : 32);
  static constexpr int kX = kCols * kNvfp4Quad * 2, kW = kGroups * kNvfp4Block;
  static constexpr int kFragments = kCols / 8 * kGroups * 4;
  // Never more CTAs on an SM: those of one product would gather on some, of the next on others.
  static constexpr int kSmem = (kCtas == 1 ? 226 : kCtas == 2 ? 112 : 74) * 1024;
  static constexpr int kLeastSmem = (kCtas == 1 ? 114 : kCtas == 2 ? 76 : 57) * 1024;
  static constexpr int sums_bytes(int cluster) {
    return (kFragments + cluster - 1) / cluster * cluster * 512;
  }
  // Of a part of so many quads. Sums lie behind the stages, or in their place where there would be
  // too few of these.
  static constexpr Nvfp4Room room(int cluster, int quads) {
    const int stage = kX + kW, sums = sums_bytes(cluster), space = kSmem - 1024;
    const auto stages = [&](int bytes) {
      const int fit = bytes / stage;
      return fit < quads ? (fit < kNvfp4MostStages ? fit : kNvfp4MostStages)
                         : (quads < kNvfp4MostStages ? quads : kNvfp4MostStages);
    };
    const int apart = stages(space - sums), over = stages(space);
    if (cluster > 1 && (apart >= 4 || apart == over))
      return {apart, apart * stage, 1024 + apart * stage + sums};
    return {over, 0, 1024 + (over * stage > sums ? over * stage : sums)};
  }
};

template <class Math>
struct Nvfp4Place {
  static constexpr int kCodes = 4 * kNvfp4Codes, kScales = 4 * kNvfp4Scales;  // of 64 rows
  const Nvfp4Params& p;
  const DecodeRows& rows;
  uint8_t* smem;
  int rank, tile_n, first, length;  // first, length: of its quads
  uint32_t base, full, empty;       // barriers of stages that are there, were read
  uint64_t* bars;

  __device__ __forceinline__ Nvfp4Place(const Nvfp4Params& p, const DecodeRows& rows, int tile_n,
                                        uint8_t* smem)
      : p(p), rows(rows), smem(smem), rank(static_cast<int>(tile::cluster_rank())), tile_n(tile_n) {
    const Range quads(p.parts, rank);
    first = quads.first, length = quads.last - first;
    bars = reinterpret_cast<uint64_t*>(smem);
    base = tile::smem_addr(smem) + 1024, full = base - 1024, empty = full + 8 * kNvfp4MostStages;
  }
  __device__ __forceinline__ uint64_t* sums_bar() const { return bars + 2 * kNvfp4MostStages; }
  __device__ __forceinline__ int mine() const {
    return (Math::kFragments - rank + p.cluster - 1) / p.cluster;
  }
  __device__ __forceinline__ uint32_t x(int s) const { return base + s * Math::kX; }
  __device__ __forceinline__ uint32_t w(int s) const {
    return base + p.stages * Math::kX + s * Math::kW;
  }
  __device__ __forceinline__ uint32_t w_scales(int s) const {
    return w(s) + Math::kGroups * kCodes;
  }
  __device__ __forceinline__ bool over() const { return p.sums_at == 0; }
  __device__ __forceinline__ uint8_t* sums() const { return smem + 1024 + p.sums_at; }
  __device__ __forceinline__ void start() const {
    for (int i = 0; i < p.stages; ++i) {
      tile::mbar_init(bars + i, 1);
      tile::mbar_init(bars + kNvfp4MostStages + i, Math::kMath / 32);
    }
    tile::mbar_init(sums_bar(), 1);
    tile::mbar_init_fence();
    if (p.cluster > 1) tile::mbar_arrive_expect(sums_bar(), mine() * p.cluster * 512);
  }
  // Asks for quad i of the CTA, to stage s, by one thread.
  __device__ __forceinline__ void ask_weights(int i, int s) const {
    const uint32_t bar = full + 8 * s;
    const int group = tile_n * Math::kGroups, count = min(Math::kGroups, p.groups - group);
    tile::mbar_arrive_expect(bar, Math::kX + count * kNvfp4Block);
    int64_t from = (int64_t{rows.group} * p.groups + group) * p.quads + first + i;
#pragma unroll
    for (int g = 0; g < Math::kGroups; ++g) {
      if (g < count) {
        tile::bulk_load(w(s) + g * kCodes, p.w + from * kCodes, kCodes, bar);
        tile::bulk_load(w_scales(s) + g * kScales, p.w_scales + from * kScales, kScales, bar);
      }
      from += p.quads;
    }
  }
  __device__ __forceinline__ void ask_x(const CUtensorMap* map, int i, int s) const {
    const uint32_t bar = full + 8 * s;
    const int k = (first + i) * kNvfp4Quad;
    tile::tma_load(x(s), map, bar, k, rows.first);
    tile::tma_load(x(s) + Math::kX / 2, map, bar, k + 64, rows.first);
  }
  __device__ __forceinline__ void ask_all(const CUtensorMap* map) const {
    const int ahead = min(p.stages, length);
    for (int i = 0; i < ahead; ++i) ask_weights(i, i);
    if (rows.early()) tile::await_predecessors();
    for (int i = 0; i < ahead; ++i) ask_x(map, i, i);
    int s = 0, phase = 0;
    for (int i = ahead; i < length; ++i) {
      tile::mbar_wait(empty + 8 * s, phase);
      ask_weights(i, s);
      ask_x(map, i, s);
      if (++s == p.stages) s = 0, phase ^= 1;
    }
  }
};

// Products of kQuads quads of the warpgroup with x. w, w_scales: of the warp's quad, shared
// addresses of the lane's; x: wgmma_desc.
template <class Math, int kQuads>
__device__ __forceinline__ void multiply_quads(float (&d)[Math::kFloats],
                                               const uint32_t (&w)[kQuads],
                                               const uint32_t (&w_scales)[kQuads],
                                               const uint32_t (&x)[kQuads]) {
  using Operand = typename Math::Operand;
  constexpr int kBatch = Math::kBatch;
  uint32_t scales[4];
  uint4 codes{};
  uint32_t a[2 * kBatch][4];
  const auto batch = [&](auto b) {
    // NOTE: while one batch is multiplied, the next is made.
    if constexpr (b >= 2) tile::wgmma_wait<1>();
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int all = b * kBatch + i, q = all / 8, j = all % 8;  // of 16 of k
      if (j == 0) {
        const uint4 four = tile::load_shared16(w_scales[q]);
        scales[0] = four.x, scales[1] = four.y, scales[2] = four.z, scales[3] = four.w;
      }
      if (j % 4 == 0) codes = tile::load_shared16(w[q] + j / 4 * 512);
      const uint32_t word = j % 4 == 0   ? codes.x
                            : j % 4 == 1 ? codes.y
                            : j % 4 == 2 ? codes.z
                                         : codes.w;
      Operand::make(a[all % (2 * kBatch)], word,
                    j % 2 == 0 ? Operand::template scales<0>(scales[j / 2])
                               : Operand::template scales<1>(scales[j / 2]));
    }
    tile::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int all = b * kBatch + i, q = all / 8, j = all % 8;
      Operand::multiply(d, a[all % (2 * kBatch)], x[q] + j / 4 * (Math::kX / 2 / 16) + j % 4 * 2);
    }
    tile::wgmma_commit();
  };
  const auto all = [&]<int... kB>(std::integer_sequence<int, kB...>) {
    (batch(std::integral_constant<int, kB>{}), ...);
  };
  all(std::make_integer_sequence<int, kQuads * 8 / kBatch>{});
  tile::wgmma_wait<0>();
  tile::wgmma_pin(d);
}

// Adds the parts of this CTA's fragments up and writes them out: half a warp has a fragment, a lane
// a row of x and eight of the weights.
template <class Math>
__device__ __forceinline__ void finish_tile(const Nvfp4Place<Math>& at) {
  const int lane = threadIdx.x % 16, half = lane % 2, mine = at.mine();
  const float scale = __ldg(at.p.scale + at.rows.group) / kNvfp4Down;
  for (int slot = static_cast<int>(threadIdx.x) / 16; slot < mine; slot += Math::kMath / 16) {
    const int fragment = at.rank + slot * at.p.cluster;
    const int col = fragment / (4 * Math::kGroups) * 8 + lane / 2;
    const int n =
        at.tile_n * Math::kGroups * kNvfp4Rows + fragment % (4 * Math::kGroups) * 16 + half * 8;
    const int there = min(8, at.p.n - n);
    if (col >= at.rows.count || there <= 0) continue;
    const float* const from = reinterpret_cast<const float*>(at.sums()) +
                              slot * at.p.cluster * 128 + lane / 4 * 4 + half * 2 + lane / 2 % 2;
    float v[8];
    add_parts(from, at.p.cluster, v);
#pragma unroll
    for (float& one : v) one *= scale;
    write_eight(at.p.out, at.rows.first + col, n, int64_t{at.rows.group} * at.p.n, there, v);
  }
}

template <class Math>
__global__ void __launch_bounds__(Math::kThreads, Math::kCtas)
    nvfp4_kernel(const __grid_constant__ CUtensorMap map, const __grid_constant__ Nvfp4Params p,
                 const __grid_constant__ DecodeRows given) {
  extern __shared__ __align__(1024) uint8_t smem[];
  // NOTE: a number that the compiler sees is the same in all lanes: addresses stay uniform.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = threadIdx.x % 32;
  const int index = static_cast<int>(tile::cluster_index()), tile_n = index / p.blocks;
  DecodeRows rows = given;
  if (!rows.early()) tile::await_predecessors();
  if (!rows.begin(index - tile_n * p.blocks)) return;
  if (rows.group < 0) {
    const int n = tile_n * Math::kGroups * kNvfp4Rows;
    if (tile::cluster_rank() == 0)
      clear<Math::kThreads>(p.out, rows, n, min(p.n, n + Math::kGroups * kNvfp4Rows));
    return;
  }
  const Nvfp4Place<Math> at(p, rows, tile_n, smem);
  if (threadIdx.x == Math::kMath) tile::tma_prefetch(&map), at.start();
  __syncthreads();
  if (p.cluster > 1 && !at.over()) tile::cluster_arrive_relaxed();  // who has waited may send
  tile::let_dependents_start();

  if (warp >= Math::kMath / 32) {
    if constexpr (Math::kManyRegisters) tile::registers_down<40>();
    if (warp == Math::kMath / 32 && tile::elect_one()) at.ask_all(&map);
    __syncwarp();
    if (p.cluster > 1) {
      if (at.over()) tile::cluster_arrive();
      tile::cluster_wait();
    }
    return;
  }

  if constexpr (Math::kManyRegisters) tile::registers_up<232>();
  float d[Math::kFloats] = {};
  int s = 0;
  uint32_t phase = 0;
  // Quads that are multiplied in one go.
  const auto quads = [&](auto count) {
    uint32_t w[count], w_scales[count], x[count];
    int of[count];
#pragma unroll
    for (int q = 0; q < count; ++q) {
      tile::mbar_wait(at.full + 8 * s, phase);
      w[q] = at.w(s) + warp * kNvfp4Codes + lane * 16;
      w_scales[q] = at.w_scales(s) + warp * kNvfp4Scales + lane / 4 * 16;
      x[q] = tile::wgmma_desc_at(at.x(s)), of[q] = s;
      if (++s == p.stages) s = 0, phase ^= 1;
    }
    multiply_quads<Math, count>(d, w, w_scales, x);
    __syncwarp();
    if (tile::elect_one()) {
#pragma unroll
      for (int q = 0; q < count; ++q) tile::mbar_arrive(at.bars + kNvfp4MostStages + of[q]);
    }
  };
  int left = at.length;
#pragma unroll 1
  for (; left >= Math::kTogether; left -= Math::kTogether)
    quads(std::integral_constant<int, Math::kTogether>{});
  if constexpr (Math::kTogether > 1) {
#pragma unroll 1
    for (; left > 0; --left) quads(std::integral_constant<int, 1>{});
  }
  if (p.cluster > 1) {
    if (at.over()) tile::cluster_arrive();
    tile::cluster_wait();
  } else if (at.over()) {
    tile::named_barrier(2, Math::kMath);  // all have read their stages
  }
  constexpr int kWarps = Math::kMath / 32;
  float4* const all = reinterpret_cast<float4*>(at.sums()) + at.rank * 32 + lane;
#pragma unroll
  for (int j = 0; j < Math::kCols / 8; ++j) {
    const int fragment = j * kWarps + warp, turn = fragment / p.cluster;
    const float* const v = d + 4 * j;
    float4* const to = all + turn * p.cluster * 32;
    if (p.cluster == 1) {
      *to = {v[0], v[1], v[2], v[3]};
    } else {
      tile::send(to,
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
  finish_tile(at);
}

}  // namespace te_mx::sm90
