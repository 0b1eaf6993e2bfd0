// What kernels that have rows of x in shared memory, aligned for 128 of k, and 128 rows of weights
// a CTA have in common (wide_e2m1.cuh): where things lie, x that every CTA makes by itself, sums on
// their way to the CTA of the cluster that adds them up, in order.
#pragma once

#include "common/shares.cuh"
#include "decode/aligned_rows.cuh"
#include "decode/decode_out.cuh"
#include "decode/decode_weights.cuh"
#include "mxtile/sm90/cluster.cuh"
#include "mxtile/sm90/tma.cuh"

namespace te_mx::sm90 {

inline constexpr int kWideMath = 256, kWideThreads = kWideMath + 32;
inline constexpr int kWideRows = 128;                   // of weights
inline constexpr int kWideWords = 4 * (kWideRows + 4);  // bytes of the scales of a tile
inline constexpr int kWideMostStages = 8;

struct WideParams {
  AlignedInput x;
  const uint8_t* words = nullptr;  // scales of tiles
  int64_t words_quad = 0;          // bytes from a quad to the next
  int n = 0, cluster = 1, blocks = 1, stages = 0;
  Shares parts;  // of stages
  DecodeOut out;
};

// Where things lie in shared memory. x: of a CTA that makes it, codes of all quads, then scales.
struct WideRoom {
  int x_at, sums_at, x_scales_at, beside_at, passes_at, bars_at, rows_at, tables_at, bytes;
};

// longest: stages of the longest part.
template <class Math>
__host__ __device__ constexpr WideRoom wide_room(int stages, int cluster, int longest) {
  const int quads = Math::kMakesX ? longest : 0;
  WideRoom r{};
  r.x_at = stages * Math::kStage;
  r.sums_at = r.x_at + quads * Math::kCodes;
  r.x_scales_at = r.sums_at + (Math::kX + cluster - 1) / cluster * cluster * 512;
  r.beside_at = r.x_scales_at + quads * Math::kScales;
  r.passes_at = r.beside_at + stages * Math::kBeside;
  r.bars_at = r.passes_at + (Math::kPassLists * longest + 1) / 2 * 8;
  r.rows_at = r.bars_at + (2 * kWideMostStages + 2) * 8;
  r.tables_at = r.rows_at + 16;
  r.bytes = r.tables_at + Math::kTables;
  return r;
}

// What a CTA has to do, and where.
template <class Math>
struct WidePlace {
  static constexpr int kWorkers = kWideMath / 16;  // that make x
  const WideParams& p;
  int rank, tile_n, block, first, length;  // first, length: of its part, in stages
  WideRoom room;
  uint8_t* smem;
  uint32_t base, full, empty;  // shared addresses; barriers of stages that are there, were read
  uint64_t* bars;
  int* passes;  // of quads
  int* most_passes;

  __device__ __forceinline__ WidePlace(const WideParams& p, uint8_t* smem)
      : p(p), rank(static_cast<int>(tile::cluster_rank())), smem(smem) {
    const int index = static_cast<int>(tile::cluster_index());
    tile_n = index / p.blocks, block = index - tile_n * p.blocks + static_cast<int>(blockIdx.y);
    const Range part(p.parts, rank);
    first = part.first, length = part.last - first;
    // NOTE: parts differ by a stage, places must not.
    room = wide_room<Math>(p.stages, p.cluster, p.parts.least + 1);
    base = tile::smem_addr(smem), full = base + room.bars_at, empty = full + 8 * kWideMostStages;
    bars = reinterpret_cast<uint64_t*>(smem + room.bars_at);
    passes = reinterpret_cast<int*>(smem + room.passes_at);
    most_passes = reinterpret_cast<int*>(sums_bar() + 1);
  }
  __device__ __forceinline__ uint64_t* sums_bar() const { return bars + 2 * kWideMostStages; }
  // By whole warps, before anything else; false: there is nothing to do. Until the end rows take no
  // registers.
  __device__ __forceinline__ bool take_rows() const {
    DecodeRows all = p.x.rows_of;
    const bool grouped = !all.early();
    if (grouped) tile::await_predecessors();
    if (!all.begin(block)) return false;
    if (grouped && all.group < 0) {
      if (rank == 0)
        clear<Math::kThreads>(p.out, all, tile_n * kWideRows, min(p.n, (tile_n + 1) * kWideRows));
      return false;
    }
    if (threadIdx.x == kWideMath) *reinterpret_cast<DecodeBlock*>(smem + room.rows_at) = all;
    return true;
  }
  __device__ __forceinline__ const DecodeBlock& rows() const {
    return *reinterpret_cast<const DecodeBlock*>(smem + room.rows_at);
  }
  // The first row of the CTA's weights, of those of all groups.
  __device__ __forceinline__ int row0() const { return rows().group * p.n + tile_n * kWideRows; }
  // Fragments of 16 rows of weights and 8 of x that this CTA adds up.
  __device__ __forceinline__ int mine() const {
    return (Math::kX - rank + p.cluster - 1) / p.cluster;
  }
  __device__ __forceinline__ uint32_t stage(int s) const { return base + s * Math::kStage; }
  __device__ __forceinline__ uint32_t beside(int s) const {
    return base + room.beside_at + s * Math::kBeside;
  }
  // By one thread.
  __device__ __forceinline__ void start() const {
    for (int i = 0; i < p.stages; ++i) {
      tile::mbar_init(bars + i, Math::kArrivals);
      tile::mbar_init(bars + kWideMostStages + i, kWideMath / 32);
    }
    tile::mbar_init(sums_bar(), 1);
    tile::mbar_init_fence();
    if (p.cluster > 1) tile::mbar_arrive_expect(sums_bar(), mine() * p.cluster * 512);
    for (int list = 0; list < Math::kPassLists; ++list) {
      most_passes[list] = 1;
      for (int i = 0; i < length; ++i) passes[list * (p.parts.least + 1) + i] = 1;
    }
  }
};

// Sums of a warp: of lane 4g + t rows g and g + 8 of its 16 of weights, rows 8j + 2t and
// 8j + 2t + 1 of x.
template <class Math>
struct WideTotals {
  static constexpr int kFloats = Math::kFloats;
  float v[kFloats] = {};

  // Adds d, which is there, times the scales of the lane's rows of weights and of those of x, which
  // lie at a shared address. kLater: of a further pass, where rows with a scale of 0 have none.
  template <bool kLater>
  __device__ __forceinline__ void promote(float (&d)[kFloats], float low, float high,
                                          uint32_t scales) {
    tile::wgmma_pin(d);
    // NOTE: one product after the other; that of the scales need not be a number of fp32.
    const auto one = [&](int i, float w, float x) {
      if (!kLater || x != 0.0f) v[i] = fmaf(d[i] * w, x, v[i]);
    };
    const auto four = [&](int i, uint32_t even, uint32_t odd) {
      one(i, low, __uint_as_float(even)), one(i + 1, low, __uint_as_float(odd));
      one(i + 2, high, __uint_as_float(even)), one(i + 3, high, __uint_as_float(odd));
    };
    if constexpr (Math::kX == 8) {
      const uint2 two = tile::load_shared8(scales);
      four(0, two.x, two.y);
    } else {
#pragma unroll
      for (int i = 0; i < Math::kX / 16; ++i) {
        const uint4 s = tile::load_shared16(scales + i * 64);
        four(8 * i, s.x, s.y), four(8 * i + 4, s.z, s.w);
      }
    }
  }
};

// Calls quads(x, quads, rows) for the CTA's slice of x, bf16 values in whole vectors, kBatch parts
// of a row at a time: quads of the slice, rows of the block, -1 of nothing. By the warps that
// multiply; half a warp has a part.
inline constexpr int kMakeBatch = 4;
using MadeEight = AlignedValues<__nv_bfloat16, true>;

template <class Eight, template <class> class Place, class Math, class Quads>
__device__ __forceinline__ void each_quad(const Place<Math>& at, const Quads& quads) {
  constexpr int kWorkers = Place<Math>::kWorkers;
  const AlignedInput& a = at.p.x;
  const int worker = static_cast<int>(threadIdx.x) / 16, lane = threadIdx.x % 16;
  // NOTE: both halves of a warp have a row of the same quad.
  const int count = at.rows().count, even = (count + 1) & ~1;
  const int all = at.length * even;
  struct Batch {
    Eight x[kMakeBatch];
    int quad[kMakeBatch], row[kMakeBatch];
  };
  const auto load = [&](Batch& to, int begin) {
#pragma unroll
    for (int j = 0; j < kMakeBatch; ++j) {
      const int one = begin + j * kWorkers, q = one / even, r = one - q * even;
      const int k = (at.first + q) * kDecodeQuad + lane * 8;
      const bool there = one < all && r < count;
      to.quad[j] = q, to.row[j] = there ? r : -1;
      to.x[j].load(a.in, at.rows().first + (there ? r : 0), k, there ? a.k - k : 0);
    }
  };
  // NOTE: the next batch is on its way while one is made.
  Batch now, next;
  load(now, worker);
#pragma unroll 1
  for (int begin = worker; begin < all; begin += kWorkers * kMakeBatch) {
    load(next, begin + kWorkers * kMakeBatch);
    quads(now.x, now.quad, now.row);
    now = next;
  }
}

template <template <class> class Place, class Math>
__device__ __forceinline__ void store_made(const Place<Math>& at, uint2 made, int e, int quad,
                                           int row, int lane) {
  if (row < 0) return;
  store_aligned(at.smem + at.room.x_at + quad * Math::kCodes, made, row, lane);
  if (lane == 0)
    reinterpret_cast<float*>(at.smem + at.room.x_scales_at +
                             quad * Math::kScales)[aligned_scale_place<Math::kX == 8>(row)] =
        aligned_scale(e);
}

// Makes the CTA's slice of x, and counts passes. NOTE: each step for all parts before the next, as
// each waits for lanes.
template <template <class> class Place, class Math>
__device__ __forceinline__ void make_first(const Place<Math>& at) {
  using In = Input<__nv_bfloat16>;
  const AlignedInput& a = at.p.x;
  const int lane = threadIdx.x % 16;
  each_quad<MadeEight>(at, [&](MadeEight(&x)[kMakeBatch], const int (&quad)[kMakeBatch],
                               const int (&row)[kMakeBatch]) {
    decltype(x[0].own_most()) most[kMakeBatch];
    uint2 codes[kMakeBatch];
    int byte[kMakeBatch], e[kMakeBatch];
    bool left[kMakeBatch];
#pragma unroll
    for (int j = 0; j < kMakeBatch; ++j) most[j] = x[j].own_most();
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2)
#pragma unroll
      for (int j = 0; j < kMakeBatch; ++j)
        most[j] = In::larger(most[j], In::shuffle_xor(most[j], lanes));
#pragma unroll
    for (int j = 0; j < kMakeBatch; ++j) {
      const float2 two = In::magnitudes(most[j]);
      const uint32_t amax = max(__float_as_uint(two.x), __float_as_uint(two.y));
      byte[j] = static_cast<int>(scale_byte(a.in, amax));
      codes[j] = x[j].codes_of(byte[j]);
      // NOTE: of codes that are all rounded to zero, too; their scale is the least that there is.
      left[j] = amax != 0 && byte[j] != 255, e[j] = left[j] ? byte[j] : -1;
    }
#pragma unroll
    for (int lanes = 4; lanes < 16; lanes *= 2)
#pragma unroll
      for (int j = 0; j < kMakeBatch; ++j) e[j] = max(e[j], __shfl_xor_sync(~0u, e[j], lanes));
    bool more = false;
#pragma unroll
    for (int j = 0; j < kMakeBatch; ++j) {
      const int down = e[j] - byte[j];
      const bool taken = left[j] && down <= a.spread;
      const uint2 made = lowered(codes[j], taken ? down : 0);
      more |= left[j] && !taken;
      store_made(at,
                 byte[j] == 255 ? nan_codes()
                 : taken        ? made
                                : uint2{0, 0},
                 e[j], quad[j], row[j], lane);
    }
    if (!__any_sync(~0u, more)) return;
#pragma unroll
    for (int j = 0; j < kMakeBatch; ++j) {
      AlignedEight eight(x[j], a.in);
      uint2 made;
      int passes = 0;
#pragma unroll 1
      for (; passes == 0 || eight.more(); ++passes) eight.pass(passes, a.spread, made);
      if (row[j] >= 0 && passes > 1)
        atomicMax(at.passes + quad[j], passes), atomicMax(at.most_passes, passes);
    }
  });
  tile::fence_async_proxy();
}

// Makes a further pass.
template <class Math>
__device__ __forceinline__ void make_pass(const WidePlace<Math>& at, int number) {
  const AlignedInput& a = at.p.x;
  const int lane = threadIdx.x % 16;
  each_quad<MadeEight>(at, [&](MadeEight(&x)[kMakeBatch], const int (&quad)[kMakeBatch],
                               const int (&row)[kMakeBatch]) {
#pragma unroll
    for (int j = 0; j < kMakeBatch; ++j) {
      AlignedEight eight(x[j], a.in);
      uint2 made;
      int e = -1;
#pragma unroll 1
      for (int i = 0; i <= number; ++i) e = eight.pass(i, a.spread, made);
      store_made(at, made, e, quad[j], row[j], lane);
    }
  });
  tile::fence_async_proxy();
}

// Passes of the CTA's quads of prepared x, by the warps that multiply.
template <class Math>
__device__ __forceinline__ void find_passes(const WidePlace<Math>& at) {
  constexpr int kGroups = Math::kX / kAlignRows;
  const int groups = (at.rows().count + kAlignRows - 1) / kAlignRows;
  for (int i = threadIdx.x; i < at.length; i += kWideMath) {
    int most = 1;
    for (int g = 0; g < groups; ++g)
      most = max(most, int{__ldcg(at.p.x.passes + int64_t{at.block * kGroups + g} * at.p.x.quads +
                                  at.first + i)});
    if (most > 1) atomicMax(at.passes + i, most), atomicMax(at.most_passes, most);
  }
}

// Sends the sums of a CTA's part of k to those who add them up.
template <class Math>
__device__ __forceinline__ void send_wide(const WidePlace<Math>& at, const WideTotals<Math>& sums,
                                          int warp, int lane) {
  const int cluster = at.p.cluster;
  float4* const all = reinterpret_cast<float4*>(at.smem + at.room.sums_at) + at.rank * 32 + lane;
#pragma unroll
  for (int j = 0; j < Math::kX / 8; ++j) {
    const int fragment = j * 8 + warp, turn = fragment / cluster;
    const float* const v = sums.v + 4 * j;
    float4* const to = all + turn * cluster * 32;
    if (cluster == 1) {
      *to = {v[0], v[1], v[2], v[3]};
    } else {
      tile::send(to,
                 uint4{__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                       __float_as_uint(v[3])},
                 at.sums_bar(), fragment - turn * cluster);
    }
  }
}

// Adds the parts of this CTA's fragments up and writes them out: half a warp has a fragment, a lane
// a row of x and eight of the weights.
template <class Math>
__device__ __forceinline__ void finish_tile(const WidePlace<Math>& at) {
  const int lane = threadIdx.x % 16, half = lane % 2, count = at.rows().count, mine = at.mine();
  for (int slot = static_cast<int>(threadIdx.x) / 16; slot < mine; slot += kWideMath / 16) {
    const int fragment = at.rank + slot * at.p.cluster, col = fragment / 8 * 8 + lane / 2;
    const int n = at.tile_n * kWideRows + fragment % 8 * kDecodeRows + half * 8;
    const int there = min(8, at.p.n - n);
    if (col >= count || there <= 0) continue;
    const float* const from = reinterpret_cast<const float*>(at.smem + at.room.sums_at) +
                              slot * at.p.cluster * 128 + lane / 4 * 4 + half * 2 + lane / 2 % 2;
    float v[8];
    add_parts(from, at.p.cluster, v);
    write_eight(at.p.out, int64_t{at.rows().first} + col, n, int64_t{at.rows().group} * at.p.n,
                there, v);
  }
}

}  // namespace te_mx::sm90
