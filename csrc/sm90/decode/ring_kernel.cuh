// Few rows of x times weights, with the sums of rows_sums.cuh. Runs of quads (of 128 k) are dealt
// in turns to the warpgroups of a cluster, two of each CTA: a warpgroup multiplies a run, and keeps
// its products until it has the sums of all runs before; it adds them up one after the other and
// passes the sums on, warp by warp, to the warpgroup beside it or to the next CTA. So all of k is
// on its way at once, what is sent does not grow with it, and no bit depends on how long runs are
// or how many CTAs there are. While a warpgroup adds up all others wait: nothing else is left to do
// then.
//
// Grid: x = weights / 64 * CTAs of a cluster, y = blocks of rows of x; of groups of rows, with a
// weight each, those of decode_rows.cuh. One warp asks for quads, first of all those of weights,
// before it waits for the kernel that wrote x; scales of weights are asked for by all others.
#pragma once

#include "common/shares.cuh"
#include "decode/rows_sums.cuh"
#include "mxtile/sm90/cluster.cuh"
#include "mxtile/sm90/copy_async.cuh"
#include "mxtile/sm90/tma.cuh"

namespace te_mx::sm90 {

inline constexpr int kRowsWeights = 64;  // rows of weights of a CTA
inline constexpr int kRowsOthers = 2 * kRowsMath, kRowsThreads = kRowsOthers + 32;
inline constexpr int kRingMostStages = 24;
// Barriers of quads that are there: quad q of a CTA has barrier q % kRowsBars, however few stages
// there are. NOTE: a wait by parity tells phases apart that are next to each other, so who waits
// has to know that the one before is over. Of a stage it may not be: quads arrive in any order, and
// the other warpgroup may still wait for the one before in the stage. Of quads two rounds ago it
// is.
inline constexpr int kRowsBars = 32;

// Where things lie in shared memory, behind the stages of weights. Of x: stages, or what is made;
// of all quads of a CTA scales of weights, and classes; sums that the other warpgroup leaves, and
// those that another CTA sends.
struct RingRoom {
  int x_at = 0, words_at = 0, x_scales_at = 0, classes_at = 0, sums_at = 0, sent_at = 0;
  int bars_at = 0, bytes = 0;
};

// Things that are dealt two by two to the CTAs of a cluster: the first one has the most.
struct Dealt {
  int rounds = 0, left = 0;
  __host__ __device__ __forceinline__ int to(int rank) const {
    const int more = left - 2 * rank;
    return rounds * 2 + (more < 0 ? 0 : more < 2 ? more : 2);
  }
};

struct RingParams {
  AlignedInput x;
  const uint8_t* words = nullptr;            // scales of tiles
  int64_t words_quad = 0, words_matrix = 0;  // bytes from a quad, or a matrix, to the next
  int n = 0, stages = 0, cluster = 1;
  int at_once = 0;      // quads of weights that are asked for at once, beside x that CTAs make
  int runs = 1;         // of all quads
  Shares lengths;       // of runs, in quads
  Dealt dealt, longer;  // runs; those that are longer
  RingRoom room;
  DecodeOut out;
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

template <class Math>
RingRoom ring_room(const RingParams& p) {
  // Of the CTA that has the most: quads, and those of a run.
  const int runs = p.dealt.to(0), length = runs * p.lengths.least + p.longer.to(0);
  const int run = p.lengths.least + (p.lengths.longer > 0);
  const int copies = Math::kMakesX ? (runs <= 2 ? 2 : 4) * run : p.stages;
  RingRoom r;
  int at = p.stages * Math::kWeights;
  r.x_at = at, at += copies * Math::kCodes;
  r.words_at = at, at += length * Math::kWords;
  r.x_scales_at = at, at += (Math::kMakesX ? copies : length) * Math::kScales;
  r.sums_at = at, at += kRowsMath * Math::kFloats * 4;
  r.sent_at = at, at += p.cluster > 1 ? kRowsMath * Math::kFloats * 4 : 0;
  r.bars_at = at, at += (kRowsBars + kRingMostStages + 4) * 8;
  r.classes_at = at, at += length * 4;
  r.bytes = at;
  return r;
}

// What a CTA has to do, and where.
template <class Math>
struct RingPlace {
  const RingParams& p;
  DecodeRows block;
  int n0;                          // the first row of its weights
  int rank, runs, longer, length;  // of the CTA: runs, those that are longer, quads
  const RingRoom& room;
  uint8_t* smem;
  uint32_t base, full, empty;  // shared addresses; barriers: quads are there, stages were read
  uint64_t* bars;

  __device__ __forceinline__ RingPlace(const RingParams& p, uint8_t* smem)
      : p(p),
        block(p.x.rows_of),
        n0(static_cast<int>(tile::cluster_index()) * kRowsWeights),
        rank(static_cast<int>(tile::cluster_rank())),
        room(p.room),
        smem(smem) {
    runs = p.dealt.to(rank), longer = p.longer.to(rank), length = before(runs);
    base = tile::smem_addr(smem), full = base + room.bars_at, empty = full + 8 * kRowsBars;
    bars = reinterpret_cast<uint64_t*>(smem + room.bars_at);
  }
  // By whole warps, before anything else; false: there is nothing to do.
  __device__ __forceinline__ bool take_rows() {
    const bool grouped = !block.early();
    if (grouped) tile::await_predecessors();
    if (!block.begin(static_cast<int>(blockIdx.y))) return false;
    if (grouped && block.group < 0) {
      clear<kRowsThreads>(p.out, block, n0, min(p.n, n0 + kRowsWeights));
      return false;
    }
    return true;
  }
  // Words of the tile of the CTA's weights in a quad, with that of the class behind; or its factor.
  __device__ __forceinline__ const uint8_t* tile_words(int quad) const {
    return p.words + block.group * p.words_matrix + quad * p.words_quad +
           n0 / kWideRows * (p.x.factors ? 4 : kWideWords);
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
  // Of quad q of the CTA. NOTE: a round has half of kRowsBars at most.
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
    static_assert(kRowsBars == 32 && kRowsBars >= kRingMostStages && kRowsBars >= 4 * Math::kAhead);
    tile::mbar_init(bars + lane, 1);
    if (lane < p.stages) tile::mbar_init(empty_bar(lane), kRowsMath / 32);
    if (lane < 4) tile::mbar_init(sent_bar(lane), 1);
    tile::mbar_init_fence();
    __syncwarp();  // one lane arrives at what all of them made
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
    for (int q = 0; q < ahead; ++q, c.next(at)) {
      // NOTE: x that CTAs make comes behind whatever was asked for before it.
      if (Math::kMakesX && q >= at.p.at_once) tile::mbar_wait(at.full_bar(q - at.p.at_once), 0);
      ask_weights(c, q, q);
    }
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

// Makes x of runs, by a warpgroup: bf16 values in whole vectors, of rows that are there, which are
// loaded before; half a warp has a quad of one.
template <class Math>
struct RingMaker {
  static constexpr int kSteps = 4, kWorkers = kRowsMath / 16, kBatch = kSteps * kWorkers;
  const RingPlace<Math>& at;
  int lane, worker, rows, factor;
  const __nv_bfloat16* from;
  uint4 v[kSteps], later[kSteps];

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
  // Of quads [first, first + count).
  __device__ __forceinline__ uint4 one(int place, int first, int count) const {
    const int quad = place * factor >> 16, row = place - quad * rows;
    const int k = (first + quad) * kDecodeQuad;
    // NOTE: past L1, which may hold what was there before.
    if (quad < count && k + lane * 8 < at.p.x.k)
      return __ldcg(reinterpret_cast<const uint4*>(from + row * at.p.x.in.ld + k));
    return make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ void load(int first, int count) {
#pragma unroll
    for (int j = 0; j < kSteps; ++j) v[j] = one(place_of(0, j), first, count);
#pragma unroll
    for (int j = 0; j < kSteps; ++j) later[j] = one(place_of(kBatch, j), first, count);
  }
  // What was loaded, to shared addresses.
  template <bool kFactors>
  __device__ __forceinline__ void make(uint32_t to, uint32_t scales_to, int count) const {
    static_assert(!Math::kMakesX || Math::kX * Math::kAhead <= 2 * kBatch);
    const int all = rows * count;
    if (all <= kWorkers) {
      const uint4 first[1] = {v[0]};
      return make_some<kFactors>(to, scales_to, 0, all, first);
    }
    make_some<kFactors>(to, scales_to, 0, all, v);
    if (all > kBatch) make_some<kFactors>(to, scales_to, kBatch, all, later);
  }
  template <bool kFactors, int kN>
  __device__ __forceinline__ void make_some(uint32_t to, uint32_t scales_to, int done, int all,
                                            const uint4 (&v)[kN]) const {
    float scales[kN];
    const auto store = [&](int j, uint32_t low, uint32_t high) {
      const int place = place_of(done, j), quad = place * factor >> 16, row = place - quad * rows;
      if (place < all)
        tile::st_shared_u32x2(to + quad * Math::kCodes + row / 8 * 1024 +
                                  tile::swizzle128(row % 8, lane / 2) + lane % 2 * 8,
                              low, high);
    };
    using Eight = AlignedValues<__nv_bfloat16, true, kFactors>;
    Eight x[kN];
#pragma unroll
    for (int j = 0; j < kN; ++j) x[j].v[0] = v[j];
    if constexpr (kFactors) {
      const QuadFactors<kN> own(x, at.p.x.in);
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        const uint2 codes = x[j].codes_by(own.of[j].factor);
        store(j, codes.x, codes.y);
        scales[j] = own.of[j].scale;
      }
    } else {
      const QuadBytes<kN> own(x, at.p.x.in);
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        const uint2 codes = own.codes(x[j], j);
        store(j, codes.x, codes.y);
        scales[j] = aligned_scale(own.largest[j]);
      }
    }
    float scale = scales[0];
#pragma unroll
    for (int j = 1; j < kN; ++j) scale = lane == j ? scales[j] : scale;
    const int place = place_of(done, lane), quad = place * factor >> 16;
    if (lane < kN && place < all)
      tile::st_shared_u32(scales_to + quad * Math::kScales +
                              aligned_scale_place<Math::kX == 8>(place - quad * rows) * 4,
                          __float_as_uint(scale));
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
  const bool many = p.cluster > 1;
  // Named barriers: of all, before anything and before scales; of two warps one each way; of a
  // warpgroup.
  constexpr int kStart = 12, kMath = 1, kTurn = 2, kMade = 10;
  if (warp == kRowsOthers / 32) {
    at.start(lane);
    tile::named_arrive(kStart, kRowsThreads);
    if (many) tile::cluster_arrive_relaxed();  // whoever has waited for it may send
    tile::let_dependents_start();
    if (tile::elect_one()) RingProducer<Math>{at, &map}.ask_all();
    __syncwarp();
    if (many) tile::cluster_wait();
    return;
  }

  const bool factors = p.x.factors;
  // Of the CTA's quads: scales of weights, and the class of their tile, or its factor. By a warp
  // each. NOTE: nobody waits for them before x is made: they come behind weights.
  int* const classes = reinterpret_cast<int*>(smem + at.room.classes_at);
  for (int i = warp; i < at.runs; i += kRowsOthers / 32) {
    const int first = at.first(i), count = at.count(i), before = at.before(i);
    if (lane < count)
      tile::copy4_async(classes + before + lane,
                        at.tile_words(first + lane) + (factors ? 0 : kWideRows * 4));
    if (factors) continue;
    constexpr int kEach = kRowsWeights / 4;
    const int skipped = at.n0 % kWideRows * 4;
    uint8_t* const words = smem + at.room.words_at + before * Math::kWords;
    for (int j = lane; j < count * kEach; j += 32)
      tile::copy16_async(words + j * 16,
                         at.tile_words(first + j / kEach) + skipped + j % kEach * 16, true);
  }
  tile::end_copy_group();
  tile::named_barrier(kStart, kRowsThreads);
  if (many) tile::cluster_arrive_relaxed();
  const int group = warp / 4;
  tile::await_predecessors();
  RingMaker<Math> maker(at);
  if (Math::kMakesX && group < at.runs) maker.load(at.first(group), at.count(group));
  if (many) tile::cluster_wait();
  const auto await_scales = [&] {
    tile::wait_copy_groups<0>();
    tile::named_barrier(kMath, kRowsOthers);
  };
  if (group >= at.runs) await_scales();

  const int there = at.block.count - lane % 4 * 2;
  const int most = p.lengths.least + (p.lengths.longer > 0);
  const uint32_t x_at = tile::keep(tile::wgmma_desc_at(at.x(0))),
                 w_at = tile::keep(tile::wgmma_desc_at(at.w(0))),
                 words_at = at.base + at.room.words_at + (warp % 4 * 16 + lane / 4) * 4,
                 sums_at = at.base + at.room.sums_at + threadIdx.x % kRowsMath * 16;
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
      factors ? maker.template make<true>(at.x(place), at.x_scales(place), count)
              : maker.template make<false>(at.x(place), at.x_scales(place), count);
      tile::fence_async_proxy();
      // NOTE: behind the fence, which would wait for it.
      if (i + 2 < at.runs) maker.load(at.first(i + 2), at.count(i + 2));
      if (i != group) tile::named_barrier(kMade + group, kRowsMath);
    }
    if (i == group) await_scales();
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
    // NOTE: while others add up nobody looks for scales: theirs are multiplied before.
    float scales[kAhead][kFloats];
    bool plain = factors || lane >= count || cls[min(lane, count - 1)] < 2;
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int q = min(j, count - 1);
      OfX own;
      own.load(of_x + q * Math::kScales);
      const uint32_t words = of_w + q * Math::kWords;
      const float low = factors ? __int_as_float(cls[q]) : scale(tile::ld_shared_u32(words)),
                  high = factors ? low : scale(tile::ld_shared_u32(words + 32));
#pragma unroll
      for (int k = 0; k < kFloats; ++k) {
        scales[j][k] = (k % 4 < 2 ? low : high) * own.v[k / 4 * 2 + k % 2];
        if (factors && k % 4 < 2) plain &= k / 4 * 8 + k % 2 >= there || is_normal(scales[j][k]);
        if (j >= count) scales[j][k] = -0.0f;
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
      if (p.stages < at.length && tile::elect_one()) {
#pragma unroll
        for (int j = 0; j < kAhead; ++j)
          if (j < count) tile::mbar_arrive(at.empty_bar(stage[j]));
      }
      // Behind the last one nothing is added: 0 * -0.
#pragma unroll
      for (int j = 1; j < kAhead; ++j) {
#pragma unroll
        for (int k = 0; k < kFloats; ++k) d[j][k] = j < count ? d[j][k] : 0.0f;
      }
      begin(run);
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
#pragma unroll
        for (int k = 0; k < kFloats; ++k) sums.v[k] = fmaf(d[j][k], scales[j][k], sums.v[k]);
      }
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
