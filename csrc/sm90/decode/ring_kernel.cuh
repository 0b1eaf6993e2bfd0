// Rows of x times weights that stand still in tiles, as rows_kernel.cuh, with its sums: of the
// first k to the last. Here runs of quads (of 128 k) are dealt in turns to the warpgroups of a
// cluster, two of each CTA: a warpgroup multiplies a run, and keeps its products until it has the
// sums of all runs before; it adds them up one after the other and passes the sums on, warp by
// warp, to the warpgroup beside it or to the next CTA. So all of k is on its way at once, what is
// sent does not grow with it, and no bit depends on how long runs are or how many CTAs there are.
//
// Grid: x = weights / 64 * CTAs of a cluster, y = blocks of rows of x. One warp asks for quads,
// first of all those of weights, before it waits for the kernel that wrote x; scales of weights are
// asked for by all others.
#pragma once

#include "common/shares.cuh"
#include "decode/rows_kernel.cuh"
#include "mxtile/sm90/cluster.cuh"

namespace te_mx::sm90 {

inline constexpr int kRingMostStages = 24;

struct RingParams {
  AlignedInput x;
  const uint8_t* words = nullptr;            // scales of tiles
  int64_t words_quad = 0, words_matrix = 0;  // bytes from a quad, or a matrix, to the next
  int n = 0, stages = 0, cluster = 1;
  int runs = 1;    // of all quads
  Shares lengths;  // of runs, in quads
  DecodeOut out;
};

// Where things lie in shared memory, behind the stages of weights. Of x: stages, or what is made;
// of all quads of a CTA scales of weights, and classes; sums that the other warpgroup leaves, and
// those that another CTA sends.
struct RingRoom {
  int x_at, words_at, x_scales_at, classes_at, sums_at, sent_at, bars_at, bytes;
};

// kMakes: CTAs make their x. kAhead: quads of a run at most, whose products a warpgroup keeps.
// kCtas: that an SM has registers for.
template <int kX_, bool kMakes, int kAhead_, int kCtas_ = 2>
struct RingMath {
  static constexpr int kX = kX_, kFloats = kX / 2, kAhead = kAhead_, kCtas = kCtas_;
  static constexpr bool kMakesX = kMakes;
  static constexpr int kCodes = kX * kDecodeQuad, kScales = kX * 4;
  static constexpr int kWeights = kRowsWeights * kDecodeQuad, kWords = kRowsWeights * 4;
};

// So many of all runs, which are dealt two by two, has CTA `rank` of a cluster; the first the most.
__host__ __device__ inline int dealt_to(int all, int cluster, int rank) {
  const int round = 2 * cluster, left = all % round - 2 * rank;
  return all / round * 2 + (left < 0 ? 0 : left < 2 ? left : 2);
}

// length, run: quads of a CTA, and of a run, at most. once: there are no more runs than warpgroups.
template <class Math>
__host__ __device__ constexpr RingRoom ring_room(int stages, int length, int run, bool once) {
  const int copies = Math::kMakesX ? (once ? 2 : 4) * run : stages;
  RingRoom r{};
  int at = stages * Math::kWeights;
  r.x_at = at, at += copies * Math::kCodes;
  r.words_at = at, at += length * Math::kWords;
  r.x_scales_at = at, at += (Math::kMakesX ? copies : length) * Math::kScales;
  r.sums_at = at, at += kRowsMath * Math::kFloats * 4;
  r.sent_at = at, at += kRowsMath * Math::kFloats * 4;
  r.bars_at = at, at += (kRowsBars + kRingMostStages + 4) * 8;
  r.classes_at = at, at += length * 4;
  r.bytes = at;
  return r;
}

// What a CTA has to do, and where.
template <class Math>
struct RingPlace : RowsBlock<RingParams> {
  int rank, runs, longer, length;  // of the CTA: runs, those that are longer, quads
  RingRoom room;
  uint8_t* smem;
  uint32_t base, full, empty;  // shared addresses; barriers: quads are there, stages were read
  uint64_t* bars;

  __device__ __forceinline__ RingPlace(const RingParams& p, uint8_t* smem)
      : RowsBlock<RingParams>{p, DecodeRows(p.x.rows_of),
                              static_cast<int>(tile::cluster_index()) * kRowsWeights},
        rank(static_cast<int>(tile::cluster_rank())),
        smem(smem) {
    runs = dealt_to(p.runs, p.cluster, rank), longer = dealt_to(p.lengths.longer, p.cluster, rank);
    length = before(runs);
    room = room_of(p);
    base = tile::smem_addr(smem), full = base + room.bars_at, empty = full + 8 * kRowsBars;
    bars = reinterpret_cast<uint64_t*>(smem + room.bars_at);
  }
  // The same in all CTAs of a cluster.
  static __host__ __device__ __forceinline__ RingRoom room_of(const RingParams& p) {
    const int most = dealt_to(p.runs, p.cluster, 0);
    const int length = most * p.lengths.least + dealt_to(p.lengths.longer, p.cluster, 0);
    return ring_room<Math>(p.stages, length, p.lengths.least + (p.lengths.longer > 0), most <= 2);
  }
  // Of the CTA's run i: its number, its length, and how many quads of the CTA come before it.
  __device__ __forceinline__ int run(int i) const { return (i / 2 * p.cluster + rank) * 2 + i % 2; }
  __device__ __forceinline__ int count(int i) const { return p.lengths.least + (i < longer); }
  __device__ __forceinline__ int before(int i) const {
    return i * p.lengths.least + min(i, longer);
  }
  __device__ __forceinline__ int first(int i) const { return p.lengths.begin(run(i)); }
  __device__ __forceinline__ uint32_t w(int s) const { return base + s * Math::kWeights; }
  __device__ __forceinline__ uint32_t x(int s) const { return base + room.x_at + s * Math::kCodes; }
  __device__ __forceinline__ uint32_t x_scales(int q) const {
    return base + room.x_scales_at + q * Math::kScales;
  }
  // Of quad q of the CTA. NOTE: that of kRowsBars before is over, as in rows_kernel.cuh: a round
  // has half as many at most.
  __device__ __forceinline__ uint32_t full_bar(int q) const {
    return full + q % static_cast<uint32_t>(kRowsBars) * 8;
  }
  __device__ __forceinline__ uint64_t* empty_bar(int s) const { return bars + kRowsBars + s; }
  // Of sums that a warp gets from another CTA: they are there; their bytes.
  __device__ __forceinline__ uint64_t* sent_bar(int warp) const {
    return bars + kRowsBars + kRingMostStages + warp;
  }
  __device__ __forceinline__ int sent_bytes() const { return (block.count + 1) / 2 * 128; }
  // By one warp.
  __device__ __forceinline__ void start(int lane) const {
    tile::mbar_init(bars + lane, 1);
    if (lane < p.stages) tile::mbar_init(empty_bar(lane), kRowsMath / 32);
    if (lane < 4) tile::mbar_init(sent_bar(lane), 1);
    tile::mbar_init_fence();
    if (lane < 4) tile::mbar_arrive_expect(sent_bar(lane), sent_bytes());
  }
};

// One lane of the warp that asks for what the others multiply.
template <class Math>
struct RingProducer {
  const RingPlace<Math>& at;
  const CUtensorMap* map;

  // The CTA's quads, one after the other.
  struct Cursor {
    int i = 0, j = 0, quad, count;
    __device__ __forceinline__ explicit Cursor(const RingPlace<Math>& at)
        : quad(at.first(0)), count(at.count(0)) {}
    __device__ __forceinline__ void next(const RingPlace<Math>& at) {
      ++quad;
      if (++j < count) return;
      j = 0, ++i, quad = at.first(i), count = at.count(i);
    }
  };
  __device__ __forceinline__ void ask_weights(const Cursor& c, int q, int s) const {
    const uint32_t bar = at.full_bar(q);
    tile::mbar_arrive_expect(
        bar, Math::kWeights +
                 (Math::kMakesX ? 0 : Math::kCodes + (c.j == 0 ? c.count * Math::kScales : 0)));
    tile::tma_load(at.w(s), map, bar, c.quad * kDecodeQuad, at.block.group * at.p.n + at.n0);
  }
  __device__ __forceinline__ void ask_x(const Cursor& c, int q, int s) const {
    if constexpr (!Math::kMakesX) {
      const uint32_t bar = at.full_bar(q);
      tile::bulk_load(at.x(s), at.p.x.at(blockIdx.y, 0, c.quad), Math::kCodes, bar);
      if (c.j == 0)
        tile::bulk_load(at.x_scales(q), at.p.x.scales_at(blockIdx.y, 0, c.quad),
                        c.count * Math::kScales, bar);
    }
  }
  __device__ __forceinline__ void ask_all() const {
    const int ahead = min(at.p.stages, at.length);
    Cursor c(at);
    for (int q = 0; q < ahead; ++q, c.next(at)) ask_weights(c, q, q);
    tile::await_predecessors();
    Cursor of_x(at);
    for (int q = 0; q < ahead; ++q, of_x.next(at)) ask_x(of_x, q, q);
    int s = 0, phase = 0;
    for (int q = ahead; q < at.length; ++q, c.next(at)) {
      tile::mbar_wait(at.empty + 8 * s, phase);
      ask_weights(c, q, s), ask_x(c, q, s);
      if (++s == at.p.stages) s = 0, phase ^= 1;
    }
  }
};

// Makes x of runs, by a warpgroup: bf16 values in whole vectors, of rows that are there; half a
// warp has a quad of one. The first ones are loaded before.
template <class Math>
struct RingMaker {
  static constexpr int kSteps = 4, kWorkers = kRowsMath / 16, kBatch = kSteps * kWorkers;
  const RingPlace<Math>& at;
  int lane, worker, rows, factor;
  const __nv_bfloat16* from;
  uint4 v[kSteps];

  __device__ __forceinline__ explicit RingMaker(const RingPlace<Math>& at) : at(at) {
    lane = static_cast<int>(threadIdx.x) % 16;
    worker = static_cast<int>(threadIdx.x) % kRowsMath / 16;
    rows = at.block.count, factor = quotient_factor(rows);
    from =
        static_cast<const __nv_bfloat16*>(at.p.x.in.x) + at.block.first * at.p.x.in.ld + lane * 8;
  }
  __device__ __forceinline__ int place_of(int done, int j) const {
    return done + j * kWorkers + worker;
  }
  // Quads [first, first + count).
  __device__ __forceinline__ void load(int done, int first, int count) {
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      const int place = place_of(done, j), quad = place * factor >> 16, row = place - quad * rows;
      const int k = (first + quad) * kDecodeQuad;
      v[j] = make_uint4(0, 0, 0, 0);
      // NOTE: past L1, which may hold what was there before.
      if (quad < count && k + lane * 8 < at.p.x.k)
        v[j] = __ldcg(reinterpret_cast<const uint4*>(from + row * at.p.x.in.ld + k));
    }
  }
  // What was loaded, and the others, to shared addresses.
  template <bool kFactors>
  __device__ __forceinline__ void make(uint32_t to, uint32_t scales_to, int first, int count) {
    const int all = rows * count;
#pragma unroll 1
    for (int done = 0; done < all; done += kBatch) {
      if (done > 0) load(done, first, count);
      float scales[kSteps];
      const auto store = [&](int j, uint32_t low, uint32_t high) {
        const int place = place_of(done, j), quad = place * factor >> 16, row = place - quad * rows;
        if (place < all)
          tile::st_shared_u32x2(to + quad * Math::kCodes + row / 8 * 1024 +
                                    tile::swizzle128(row % 8, lane / 2) + lane % 2 * 8,
                                low, high);
      };
      if constexpr (kFactors) {
        using Eight = AlignedValues<__nv_bfloat16, true, true>;
#pragma unroll
        for (int j = 0; j < kSteps; ++j) {
          Eight x;
          x.v[0] = v[j];
          const EightMade made = x.made(at.p.x.in);
          store(j, made.words.x, made.words.y);
          scales[j] = made.scale;
        }
      } else {
        using Eight = AlignedValues<__nv_bfloat16, true>;
        Eight x[kSteps];
#pragma unroll
        for (int j = 0; j < kSteps; ++j) x[j].v[0] = v[j];
        const QuadBytes<kSteps> own(x, at.p.x.in);
#pragma unroll
        for (int j = 0; j < kSteps; ++j) {
          const uint2 codes = own.codes(x[j], j);
          store(j, codes.x, codes.y);
          scales[j] = aligned_scale(own.largest[j]);
        }
      }
      const float low = lane & 1 ? scales[1] : scales[0], high = lane & 1 ? scales[3] : scales[2];
      const int place = place_of(done, lane), quad = place * factor >> 16;
      if (lane < kSteps && place < all)
        tile::st_shared_u32(scales_to + quad * Math::kScales +
                                aligned_scale_place<Math::kX == 8>(place - quad * rows) * 4,
                            __float_as_uint(lane & 2 ? high : low));
    }
  }
};

template <class Math>
__global__ void __launch_bounds__(kRowsThreads, Math::kCtas)
    ring_kernel(const __grid_constant__ CUtensorMap map, const __grid_constant__ RingParams p) {
  extern __shared__ __align__(1024) uint8_t smem[];
  constexpr int kFloats = Math::kFloats, kAhead = Math::kAhead;
  // NOTE: a number that the compiler sees is the same in all lanes: addresses stay uniform.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = threadIdx.x % 32;
  RingPlace<Math> at(p, smem);
  if (!at.take_rows()) return;
  if (warp == kRowsOthers / 32) at.start(lane);
  if (threadIdx.x == kRowsOthers) tile::tma_prefetch(&map);
  __syncthreads();
  const bool many = p.cluster > 1;
  if (many) tile::cluster_arrive_relaxed();  // whoever has waited for it may send
  tile::let_dependents_start();

  // Named barriers: of all, of two warps one each way, and of a warpgroup.
  constexpr int kMath = 1, kTurn = 2, kMade = 10;
  if (warp == kRowsOthers / 32) {
    if (tile::elect_one()) RingProducer<Math>{at, &map}.ask_all();
    __syncwarp();
    if (many) tile::cluster_wait();
    return;
  }

  const bool factors = p.x.factors;
  // Of the CTA's quads: scales of weights, and the class of their tile, or its factor. By a warp
  // each.
  int* const classes = reinterpret_cast<int*>(smem + at.room.classes_at);
  for (int i = warp; i < at.runs; i += kRowsOthers / 32) {
    const int first = at.first(i), count = at.count(i), before = at.before(i);
    if (lane < count)
      classes[before + lane] = __ldg(reinterpret_cast<const int*>(at.tile_words(first + lane)) +
                                     (factors ? 0 : kWideRows));
    if (factors) continue;
    constexpr int kEach = kRowsWeights / 4;
    const int skipped = at.n0 % kWideRows * 4;
    uint8_t* const words = smem + at.room.words_at + before * Math::kWords;
    for (int j = lane; j < count * kEach; j += 32)
      tile::copy16_async(words + j * 16,
                         at.tile_words(first + j / kEach) + skipped + j % kEach * 16, true);
  }
  tile::end_copy_group();
  if (many) tile::cluster_wait();
  const int group = warp / 4;
  tile::await_predecessors();
  RingMaker<Math> maker(at);
  if (Math::kMakesX && group < at.runs) maker.load(0, at.first(group), at.count(group));
  tile::wait_copy_groups<0>();
  tile::named_barrier(kMath, kRowsOthers);

  const int there = at.block.count - lane % 4 * 2;
  const int most = p.lengths.least + (p.lengths.longer > 0);
  const uint32_t x_at = tile::keep(tile::wgmma_desc_at(at.x(0))),
                 w_at = tile::keep(tile::wgmma_desc_at(at.w(0))),
                 words_at = tile::keep(at.base + at.room.words_at + (warp % 4 * 16 + lane / 4) * 4),
                 sums_at = tile::keep(at.base + at.room.sums_at + threadIdx.x % kRowsMath * 16);
  uint8_t* const sent = smem + at.room.sent_at + threadIdx.x % kRowsMath * 16;
  uint64_t* const sent_bar = at.sent_bar(warp % 4);
  uint32_t sent_phase = 0;
  RowsSums<Math> sums;
  using OfX = typename RowsSums<Math>::OfX;
  const auto start = [&](float (&d)[kFloats], uint32_t w, uint32_t x) {
    tile::wgmma_pin(d);
    tile::wgmma_fence();
    tile::wgmma_shared<false>(d, w, x);
    tile::wgmma_shared<true>(d, w + 2, x + 2);
    tile::wgmma_shared<true>(d, w + 4, x + 4);
    tile::wgmma_shared<true>(d, w + 6, x + 6);
    tile::wgmma_commit();
  };
  // NOTE: the low bits of such words may say how to unpack codes.
  const auto scale = [](uint32_t word) { return __uint_as_float(word & 0x7F800000u); };
  // The sums of all quads before a run, from who had the last one; and to who has the next one.
  const auto begin = [&](int run) {
    if (run == 0) return;
    if (group == 1 || !many) {
      tile::named_barrier(kTurn + warp, 64);
      sums.load(sums_at);
      return;
    }
    tile::mbar_wait_sent(sent_bar, sent_phase);
    sent_phase ^= 1;
    sums.load(tile::smem_addr(sent));
    if (lane == 0) tile::mbar_arrive_expect(sent_bar, at.sent_bytes());
  };
  const auto pass = [&](int run) {
    if (run + 1 == p.runs) return;
    if (group == 0 || !many) {
      sums.store(sums_at);
      tile::named_arrive(kTurn + (warp ^ 4), 64);
      return;
    }
    const int next = at.rank + 1 == p.cluster ? 0 : at.rank + 1;
#pragma unroll
    for (int j = 0; j < Math::kX / 8; ++j)
      if (8 * j < there)
        tile::send(sent + j * (kRowsMath * 16),
                   uint4{__float_as_uint(sums.v[4 * j]), __float_as_uint(sums.v[4 * j + 1]),
                         __float_as_uint(sums.v[4 * j + 2]), __float_as_uint(sums.v[4 * j + 3])},
                   sent_bar, next);
  };

  int run = p.runs;
#pragma unroll 1
  for (int i = group; i < at.runs; i += 2) {
    run = at.run(i);
    const int count = at.count(i), before = at.before(i);
    const int place = at.runs > 2 ? (group * 2 + i / 2 % 2) * most : group * most;
    if constexpr (Math::kMakesX) {
      const int first = at.first(i);
      factors ? maker.template make<true>(at.x(place), at.x_scales(place), first, count)
              : maker.template make<false>(at.x(place), at.x_scales(place), first, count);
      tile::fence_async_proxy();
      // NOTE: behind the fence, which would wait for it.
      if (i + 2 < at.runs) maker.load(0, at.first(i + 2), at.count(i + 2));
      tile::named_barrier(kMade + group, kRowsMath);
    }
    int s = before % p.stages;
    const auto await = [&](int j) {
      const int q = before + j;
      tile::mbar_wait(at.full_bar(q), q / kRowsBars & 1);
    };
    await(0);
    const uint32_t of_x =
        at.x_scales(Math::kMakesX ? place : before) + lane % 4 * (Math::kX == 8 ? 8 : 16);
    const uint32_t of_w = words_at + before * Math::kWords;
    const int* const cls = classes + before;
    OfX xs[kAhead];
    float low[kAhead], high[kAhead];
    bool plain = factors || lane >= count || cls[min(lane, count - 1)] < 2;
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int q = min(j, count - 1);
      xs[j].load(of_x + q * Math::kScales);
      if (factors) {
        low[j] = high[j] = __int_as_float(cls[q]);
#pragma unroll
        for (int k = 0; k < Math::kX / 4; ++k)
          plain &= k / 2 * 8 + k % 2 >= there || is_normal(xs[j].v[k] * low[j]);
      } else {
        low[j] = scale(tile::ld_shared_u32(of_w + q * Math::kWords));
        high[j] = scale(tile::ld_shared_u32(of_w + q * Math::kWords + 32));
      }
    }
    const auto w_of = [&](int s) { return w_at + s * (Math::kWeights / 16); };
    const auto x_of = [&](int s, int j) {
      return x_at + (Math::kMakesX ? place + j : s) * (Math::kCodes / 16);
    };
    if (__builtin_expect(__all_sync(~0u, plain), true)) {
      float d[kAhead][kFloats];
      int stage[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        stage[j] = s;
        if (j > 0 && j < count) await(j);
        // NOTE: behind the last one anything is multiplied: the tensor cores stop where the
        // compiler sees another way through.
        start(d[j], w_of(s), x_of(s, min(j, count - 1)));
        if (j + 1 < count && ++s == p.stages) s = 0;
      }
      tile::wgmma_wait<0>();
#pragma unroll
      for (int j = 0; j < kAhead; ++j) tile::wgmma_pin(d[j]);
      __syncwarp();
      if (tile::elect_one()) {
#pragma unroll
        for (int j = 0; j < kAhead; ++j)
          if (j < count) tile::mbar_arrive(at.empty_bar(stage[j]));
      }
      begin(run);
#pragma unroll
      for (int j = 0; j < kAhead; ++j)
        if (j < count) sums.add(d[j], low[j], high[j], xs[j]);
    } else {
      // Quads of which tiles are spread, block by block, or factors far from 1.
      begin(run);
#pragma unroll 1
      for (int j = 0; j < count; ++j) {
        float d[kFloats];
        OfX own;
        if (j > 0) await(j);
        own.load(of_x + j * Math::kScales);
        const uint32_t words = of_w + j * Math::kWords;
        const uint32_t w = w_of(s), x = x_of(s, j);
        if (factors || cls[j] < 2) {
          start(d, w, x);
          tile::wgmma_wait<0>();
          tile::wgmma_pin(d);
          if (factors) {
            sums.add_factors(d, __int_as_float(cls[j]), own, there);
          } else {
            sums.add(d, scale(tile::ld_shared_u32(words)), scale(tile::ld_shared_u32(words + 32)),
                     own);
          }
        } else {
          uint32_t low = tile::ld_shared_u32(words), high = tile::ld_shared_u32(words + 32);
#pragma unroll 1
          for (int b = 0; b < 4; ++b, low >>= 8, high >>= 8) {
            tile::wgmma_pin(d);
            tile::wgmma_fence();
            tile::wgmma_shared<false>(d, w + 2 * b, x + 2 * b);
            tile::wgmma_commit();
            tile::wgmma_wait<0>();
            tile::wgmma_pin(d);
            if (cls[j] == 2) {
              sums.add(d, scale_of(low, 0), scale_of(high, 0), own);
            } else {
              sums.add_spread_far(d, low & 0xFF, high & 0xFF, own);
            }
          }
        }
        __syncwarp();
        if (tile::elect_one()) tile::mbar_arrive(at.empty_bar(s));
        if (++s == p.stages) s = 0;
      }
    }
    pass(run);
  }
  if (run + 1 == p.runs) sums.write(p.out, at.block, at.n0 + warp % 4 * 16, p.n, lane);
}

}  // namespace te_mx::sm90
