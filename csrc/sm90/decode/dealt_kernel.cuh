// Rows of x times weights that stand still in tiles, as ring_kernel.cuh, with its sums: of the
// first k to the last. Here quads are dealt to the CTAs of a cluster in turns, which multiply 128
// rows of weights each, and every product is sent as it is, with its scales, to the CTA that adds
// up these 16 rows of weights: all of k is on its way at once, and only what is added waits.
//
// Grid: x = tiles of weights * blocks of rows of x * CTAs of a cluster. One warp asks for quads,
// first of all those of weights, before it waits for the kernel that wrote x; two warpgroups
// multiply 64 rows of weights each; of a cluster, a warp for each group of 16 rows adds up, round
// by round: a round is a product of each CTA, and a slot has room for one. Of a cluster of one,
// whoever multiplies adds up.
//
// What is dealt are units: quads, but of tiles that are spread blocks of 32, each of which has a
// sum of its own.
#pragma once

#include "common/shares.cuh"
#include "decode/rows_sums.cuh"
#include "mxtile/sm90/cluster.cuh"
#include "mxtile/sm90/tma.cuh"

namespace te_mx::sm90 {

inline constexpr int kDealtMath = 256;
inline constexpr int kDealtProducer = kDealtMath / 32, kDealtAdders = kDealtProducer + 1;  // warps
inline constexpr int kDealtGroups = kWideRows / kDecodeRows;  // that a tile of weights has
inline constexpr int kDealtMostAdders = kDealtGroups / 2;     // of a cluster of two
inline constexpr int kDealtWeights = kWideRows * kDecodeQuad;
inline constexpr int kDealtMostStages = 8, kDealtMostSlots = 4, kDealtMostQuads = 4095;

struct DealtParams {
  AlignedInput x;
  const uint8_t* words = nullptr;  // scales of tiles
  int64_t words_quad = 0;          // bytes from a quad to the next
  int n = 0, cluster = 1, blocks = 1, stages = 0, slots = 0, adders = 0;
  Shares groups;  // of a tile: who adds them up
  DecodeOut out;
};

// Where things lie in shared memory, behind the stages.
struct DealtRoom {
  int x_at, slots_at, beside_at, x_scales_at, units_at, bars_at, rows_at, bytes;
};

// kCols: rows of x of a block.
template <int kCols>
struct DealtMath {
  static constexpr int kX = kCols, kFloats = kCols / 2;
  static constexpr int kThreads = kDealtMath + 32 + 32 * kDealtMostAdders;
  static constexpr int kCodes = kCols * kDecodeQuad, kScales = kCols * 4;
  static constexpr int kStage = kDealtWeights, kBeside = kWideWords;  // bytes, and those beside it
  static constexpr int kChunk = 64 / kCols;  // units whose x is made at once
  // A product of 16 rows of weights, its scales of these and of x.
  static constexpr int kProduct = kCols / 8 * 512, kRecord = kProduct + kDecodeRows * 4 + kScales;
};

template <class Math>
__host__ __device__ constexpr DealtRoom dealt_room(int stages, int records, int quads) {
  DealtRoom r{};
  int at = stages * Math::kStage;
  r.x_at = at, at += 2 * Math::kChunk * Math::kCodes;
  r.slots_at = at, at += records * Math::kRecord;
  r.beside_at = at, at += stages * Math::kBeside;
  r.x_scales_at = at, at += 2 * Math::kChunk * Math::kScales;
  r.units_at = at, at += quads * 8;
  r.bars_at = at, at += 2 * (kDealtMostStages + kDealtMostSlots) * 8;
  r.rows_at = at, at += 16;
  r.bytes = at;
  return r;
}

// What a CTA has to do, and where.
template <class Math>
struct DealtPlace {
  const DealtParams& p;
  int rank, tile_n, block;
  Range groups;  // that it adds up
  DealtRoom room;
  uint8_t* smem;
  uint32_t base, full, empty;  // shared addresses; barriers of stages that are there, were read
  uint64_t* bars;

  __device__ __forceinline__ DealtPlace(const DealtParams& p, uint8_t* smem)
      : p(p), rank(static_cast<int>(tile::cluster_rank())), groups(p.groups, rank), smem(smem) {
    const int index = static_cast<int>(tile::cluster_index());
    tile_n = index / p.blocks, block = index - tile_n * p.blocks;
    room = dealt_room<Math>(p.stages, p.slots * p.cluster * p.adders, p.x.quads);
    base = tile::smem_addr(smem), full = base + room.bars_at, empty = full + 8 * kDealtMostStages;
    bars = reinterpret_cast<uint64_t*>(smem + room.bars_at);
  }
  __device__ __forceinline__ DecodeBlock rows() const {
    DecodeRows all = p.x.rows_of;
    all.begin(block);
    return all;
  }
  // How many units there are where tiles are spread; 0: quads are units.
  __device__ __forceinline__ int& spread_units() const {
    return *reinterpret_cast<int*>(smem + room.rows_at);
  }
  // Then 8 * quad + block, or + kWhole.
  __device__ __forceinline__ int16_t* units() const {
    return reinterpret_cast<int16_t*>(smem + room.units_at);
  }
  static constexpr int kWhole = 4;
  __device__ __forceinline__ uint32_t stage(int s) const { return base + s * Math::kStage; }
  __device__ __forceinline__ uint32_t beside(int s) const {
    return base + room.beside_at + s * Math::kBeside;
  }
  // Of slots: all products of a round are there; were read, by those who add up in all CTAs.
  __device__ __forceinline__ uint64_t* slot_full(int i) const {
    return bars + 2 * kDealtMostStages + i;
  }
  __device__ __forceinline__ uint64_t* slot_empty(int i) const {
    return slot_full(i) + kDealtMostSlots;
  }
  // In a slot that of CTA `from`, for the adder-th group of a CTA.
  __device__ __forceinline__ uint8_t* record(int slot, int from, int adder) const {
    return smem + room.slots_at + ((slot * p.cluster + from) * p.adders + adder) * Math::kRecord;
  }
  // Words of the tile in a quad, with its class behind; or its factor and three neighbours of it.
  __device__ __forceinline__ const uint8_t* tile_words(int quad) const {
    return p.words + quad * p.words_quad + (p.x.factors ? (tile_n & ~3) * 4 : tile_n * kWideWords);
  }
  __device__ __forceinline__ int class_of(int quad) const {
    return __ldg(reinterpret_cast<const int*>(tile_words(quad)) + kWideRows);
  }
  // By one thread.
  __device__ __forceinline__ void start() const {
    for (int i = 0; i < p.stages; ++i) {
      tile::mbar_init(bars + i, 1);
      tile::mbar_init(bars + kDealtMostStages + i, kDealtMath / 32);
    }
    for (int i = 0; i < p.slots; ++i) {
      tile::mbar_init(slot_full(i), 1);
      tile::mbar_init(slot_empty(i), kDealtGroups);
    }
    tile::mbar_init_fence();
  }
  // By one warp, of a weight that is there.
  __device__ __forceinline__ void find_units(int lane) const {
    bool any = false;
    if (!p.x.factors)
      for (int q = lane; q < p.x.quads; q += 32) any |= class_of(q) >= 2;
    int all = 0;
    if (__any_sync(~0u, any)) {
#pragma unroll 1
      for (int first = 0; first < p.x.quads; first += 32) {
        const int q = first + lane;
        const bool there = q < p.x.quads, spread = there && class_of(q) >= 2;
        const int own = spread ? 4 : there ? 1 : 0;
        int end = own;
#pragma unroll
        for (int i = 1; i < 32; i *= 2) {
          const int other = __shfl_up_sync(~0u, end, i);
          if (lane >= i) end += other;
        }
        for (int i = 0; i < own; ++i)
          units()[all + end - own + i] = static_cast<int16_t>(q * 8 + (spread ? i : kWhole));
        all += __shfl_sync(~0u, end, 31);
      }
    }
    if (lane == 0) spread_units() = all;
  }
  // Who adds up a group of the tile.
  __device__ __forceinline__ int owner(int group) const {
    const int longer = (p.groups.least + 1) * p.groups.longer;
    return group < longer ? group / (p.groups.least + 1)
                          : p.groups.longer + (group - longer) / p.groups.least;
  }
};

// What a CTA knows of its units when it knows how tiles are.
template <class Math>
struct DealtUnits {
  const DealtPlace<Math>& at;
  const bool spread;
  const int all, length;

  __device__ __forceinline__ explicit DealtUnits(const DealtPlace<Math>& at)
      : at(at),
        spread(at.spread_units() > 0),
        all(spread ? at.spread_units() : at.p.x.quads),
        length(of_cta(at, all)) {}
  static __device__ __forceinline__ int of_cta(const DealtPlace<Math>& at, int all) {
    return (all - at.rank + at.p.cluster - 1) / at.p.cluster;
  }
  __device__ __forceinline__ int unit(int i) const { return at.rank + i * at.p.cluster; }
  __device__ __forceinline__ int quad(int i) const {
    return spread ? at.units()[unit(i)] >> 3 : unit(i);
  }
  __device__ __forceinline__ int part(int i) const {
    return spread ? at.units()[unit(i)] & 7 : at.kWhole;
  }
  __device__ __forceinline__ int rounds() const { return (all + at.p.cluster - 1) / at.p.cluster; }
  __device__ __forceinline__ int in_round(int r) const {
    return min(at.p.cluster, all - r * at.p.cluster);
  }
};

// One lane of the warp that asks for what the others multiply.
template <class Math>
struct DealtProducer {
  const DealtPlace<Math>& at;
  const CUtensorMap* map;
  int rows;  // of weights, that there are: others are not asked for (TensorMaps)

  __device__ __forceinline__ DealtProducer(const DealtPlace<Math>& at, const CUtensorMap& whole,
                                           const CUtensorMap& end)
      : at(at), rows(min(kWideRows, at.p.n - at.tile_n * kWideRows)) {
    map = rows == kWideRows ? &whole : &end;
  }
  __device__ __forceinline__ void ask_weights(int quad, int s) const {
    const uint32_t bar = at.full + 8 * s;
    const int words = at.p.x.factors ? 16 : kWideWords;
    tile::mbar_arrive_expect(bar, rows * kDecodeQuad + words);
    tile::tma_load(at.stage(s), map, bar, quad * kDecodeQuad, at.tile_n * kWideRows);
    tile::bulk_load(at.beside(s), at.tile_words(quad), words, bar);
  }
  // As many as there are stages, before it is known whether tiles are spread.
  __device__ __forceinline__ void ask_first(int ahead) const {
    for (int i = 0; i < ahead; ++i) ask_weights(at.rank + i * at.p.cluster, i);
  }
  __device__ __forceinline__ void ask_others(int ahead) const {
    const DealtUnits<Math> units(at);
    tile::await_predecessors();
    // NOTE: where tiles are spread nobody multiplies those.
    const int unused = units.spread ? ahead : 0;
    int s = ahead % at.p.stages, phase = 0;
    for (int i = ahead; i < units.length + unused; ++i) {
      if (i >= at.p.stages) tile::mbar_wait(at.empty + 8 * s, phase);
      const int quad = units.quad(i - unused);
      ask_weights(quad, s);
      if (++s < at.p.stages) continue;
      s = 0;
      if (i >= at.p.stages) phase ^= 1;
    }
  }
};

// Makes x of the CTA's units, bf16 values in whole vectors, some at a time, by the warps that
// multiply; half a warp has a quad of a row.
template <class Math>
struct DealtMaker {
  static constexpr int kSteps = 4, kX = Math::kX, kWorkers = kDealtMath / 16;
  static constexpr int kStepUnits = kWorkers / kX, kChunk = Math::kChunk;
  static_assert(kX <= kWorkers && kChunk == kSteps * kStepUnits);
  const DealtPlace<Math>& at;
  const DealtUnits<Math>& units;
  int lane, row, first;  // first: of the chunk, of step 0
  const __nv_bfloat16* from;
  bool has;
  uint4 v[kSteps];

  __device__ __forceinline__ DealtMaker(const DealtPlace<Math>& at, const DealtUnits<Math>& units)
      : at(at), units(units) {
    const AlignedInput& a = at.p.x;
    const int worker = static_cast<int>(threadIdx.x) / 16;
    lane = static_cast<int>(threadIdx.x) % 16, row = worker % kX, first = worker / kX;
    const DecodeBlock rows = at.rows();
    has = row < rows.count;
    from = static_cast<const __nv_bfloat16*>(a.in.x) + (rows.first + (has ? row : 0)) * a.in.ld +
           lane * 8;
  }
  __device__ __forceinline__ void load(int chunk) {
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      const int i = chunk * kChunk + first + j * kStepUnits;
      v[j] = make_uint4(0, 0, 0, 0);
      if (!has || i >= units.length) continue;
      const int k = units.quad(i) * kDecodeQuad;
      // NOTE: past L1, which may hold what was there before.
      if (k + lane * 8 < at.p.x.k) v[j] = __ldcg(reinterpret_cast<const uint4*>(from + k));
    }
  }
  // To half `half` of what there is room for.
  __device__ __forceinline__ void store(int half, int j, uint32_t low, uint32_t high) const {
    const int place = half * kChunk + first + j * kStepUnits;
    tile::st_shared_u32x2(at.base + at.room.x_at + place * Math::kCodes + row / 8 * 1024 +
                              tile::swizzle128(row % 8, lane / 2) + lane % 2 * 8,
                          low, high);
  }
  __device__ __forceinline__ void store_scales(int half, const float (&s)[kSteps]) const {
    const float low = lane & 1 ? s[1] : s[0], high = lane & 1 ? s[3] : s[2];
    if (lane < kSteps)
      tile::st_shared_u32(at.base + at.room.x_scales_at +
                              (half * kChunk + first + lane * kStepUnits) * Math::kScales +
                              aligned_scale_place<kX == 8>(row) * 4,
                          __float_as_uint(lane & 2 ? high : low));
  }
  __device__ __forceinline__ void make(int half) const {
    using Eight = AlignedValues<__nv_bfloat16, true>;
    Eight x[kSteps];
#pragma unroll
    for (int j = 0; j < kSteps; ++j) x[j].v[0] = v[j];
    const QuadBytes<kSteps> own(x, at.p.x.in);
    float scales[kSteps];
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      const uint2 codes = own.codes(x[j], j);
      store(half, j, codes.x, codes.y);
      scales[j] = aligned_scale(own.largest[j]);
    }
    store_scales(half, scales);
  }
  // The same of blocks of 128 with an fp32 scale.
  __device__ __forceinline__ void make_factors(int half) const {
    using Eight = AlignedValues<__nv_bfloat16, true, true>;
    float scales[kSteps];
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      Eight x;
      x.v[0] = v[j];
      const EightMade made = x.made(at.p.x.in);
      store(half, j, made.words.x, made.words.y);
      scales[j] = made.scale;
    }
    store_scales(half, scales);
  }
};

// A scale of weights as it is sent: a factor, or a power of two; of a block of class 3 its lowest
// bit is set.
template <class Math>
__device__ __forceinline__ void add_dealt(RowsSums<Math>& sums, const float (&d)[Math::kFloats],
                                          uint32_t low, uint32_t high,
                                          const typename RowsSums<Math>::OfX& x, bool factors,
                                          int there) {
  if (factors) {
    sums.add_factors(d, __uint_as_float(low), x, there);
  } else if (__builtin_expect((low & 1) == 0, true)) {
    sums.add(d, __uint_as_float(low), __uint_as_float(high), x);
  } else {
    sums.add_spread_far(d, static_cast<int>(low >> 23), static_cast<int>(high >> 23), x);
  }
}

// By the warp of one of the CTA's groups, round by round.
template <class Math>
__device__ __forceinline__ void add_rounds(const DealtPlace<Math>& at,
                                           const DealtUnits<Math>& units, RowsSums<Math>& sums,
                                           int adder, int lane, int count) {
  const DealtParams& p = at.p;
  const int rounds = units.rounds(), there = count - lane % 4 * 2;
  // Of a product rows of x come two by two, those that are there.
  const int record = (count + 1) / 2 * 128 + Math::kRecord - Math::kProduct;
  const int groups = at.groups.last - at.groups.first;
  const auto expect = [&](int round, int slot) {
    if (adder == 0 && lane == 0)
      tile::mbar_arrive_expect(at.slot_full(slot), units.in_round(round) * groups * record);
  };
  for (int r = 0; r < min(p.slots, rounds); ++r) expect(r, r);
  int slot = 0;
  uint32_t phase = 0;
#pragma unroll 1
  for (int r = 0; r < rounds; ++r) {
    tile::mbar_wait_sent(at.slot_full(slot), phase);
    uint32_t from = tile::smem_addr(at.record(slot, 0, adder));
    const int products = units.in_round(r);
#pragma unroll 2
    for (int i = 0; i < products; ++i, from += p.adders * Math::kRecord) {
      float d[Math::kFloats];
#pragma unroll
      for (int j = 0; j < Math::kX / 8; ++j) {
        const uint4 w = tile::load_shared16(from + j * 512 + lane * 16);
        d[4 * j] = __uint_as_float(w.x), d[4 * j + 1] = __uint_as_float(w.y);
        d[4 * j + 2] = __uint_as_float(w.z), d[4 * j + 3] = __uint_as_float(w.w);
      }
      const uint32_t words = from + Math::kProduct + lane / 4 * 4;
      typename RowsSums<Math>::OfX x;
      x.load(from + Math::kProduct + kDecodeRows * 4 + lane % 4 * (Math::kX == 8 ? 8 : 16));
      add_dealt(sums, d, tile::ld_shared_u32(words), tile::ld_shared_u32(words + 32), x,
                p.x.factors, there);
    }
    if (r + p.slots < rounds) {
      expect(r + p.slots, slot);
      __syncwarp();
      if (lane < units.in_round(r + p.slots)) tile::mbar_arrive_at(at.slot_empty(slot), lane);
    }
    if (++slot == p.slots) slot = 0, phase ^= 1;
  }
}

template <class Math>
__global__ void __launch_bounds__(Math::kThreads, 2)
    dealt_kernel(const __grid_constant__ CUtensorMap map, const __grid_constant__ CUtensorMap end,
                 const __grid_constant__ DealtParams p) {
  extern __shared__ __align__(1024) uint8_t smem[];
  constexpr int kFloats = Math::kFloats;
  // NOTE: a number that the compiler sees is the same in all lanes: addresses stay uniform.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = threadIdx.x % 32;
  const DealtPlace<Math> at(p, smem);
  if (threadIdx.x == kDealtMath) tile::tma_prefetch(&map), at.start();
  __syncthreads();
  const bool many = p.cluster > 1;
  if (many) tile::cluster_arrive_relaxed();  // whoever has waited for it may send
  tile::let_dependents_start();

  constexpr int kMath = 1, kAll = 2;  // named barriers
  const int threads = kDealtMath + 32 + 32 * p.adders;
  const int ahead = min(p.stages, DealtUnits<Math>::of_cta(at, p.x.quads));
  if (warp == kDealtProducer) {
    const DealtProducer<Math> producer(at, map, end);
    const bool asks = tile::elect_one();
    if (asks) producer.ask_first(ahead);
    __syncwarp();
    tile::named_barrier(kAll, threads);
    if (asks) producer.ask_others(ahead);
    __syncwarp();
    if (many) tile::cluster_wait();
    return;
  }
  if (warp == 0) at.find_units(lane);
  tile::named_barrier(kAll, threads);
  const DealtUnits<Math> units(at);
  RowsSums<Math> sums;
  tile::await_predecessors();
  const auto write = [&](int group) {
    sums.write(p.out, at.rows(), at.tile_n * kWideRows + group * kDecodeRows, p.n, lane);
  };
  const int count = at.rows().count;
  if (warp >= kDealtAdders) {
    const int group = at.groups.first + warp - kDealtAdders;
    tile::cluster_wait();
    if (group >= at.groups.last) return;
    add_rounds(at, units, sums, warp - kDealtAdders, lane, count);
    write(group);
    return;
  }

  const bool factors = p.x.factors;
  const int there = count - lane % 4 * 2;
  int s = 0, slot = 0;
  uint32_t phase = 0, slot_phase = 1;
  const auto await_stage = [&] { tile::mbar_wait(at.full + 8 * s, phase); };
  const auto release = [&] {
    __syncwarp();
    if (tile::elect_one()) tile::mbar_arrive(at.bars + kDealtMostStages + s);
    if (++s == p.stages) s = 0, phase ^= 1;
  };
  if (units.spread)
    for (int i = 0; i < ahead; ++i) await_stage(), release();
  const int owner = many ? at.owner(warp) : 0, adder = warp - p.groups.begin(owner);
  // Unit i of the CTA; place: of made x.
  const auto multiply = [&](int i, int place) {
    await_stage();
    const uint32_t beside = at.beside(s);
    const uint32_t scales = at.base + at.room.x_scales_at + place * Math::kScales;
    const uint32_t w = tile::wgmma_desc_at(at.stage(s) + warp / 4 * (kDealtWeights / 2)),
                   x = tile::wgmma_desc_at(at.base + at.room.x_at + place * Math::kCodes);
    // Of row lane % 16 of the warp's, or the factor.
    const uint32_t own =
        factors ? beside + at.tile_n % 4 * 4 : beside + (warp * kDecodeRows + lane % 16) * 4;
    const int part = units.part(i);
    uint32_t word;
    float d[kFloats] = {};
    tile::wgmma_pin(d);
    tile::wgmma_fence();
    if (__builtin_expect(part == at.kWhole, true)) {
      tile::wgmma_shared<false>(d, w, x);
      tile::wgmma_shared<true>(d, w + 2, x + 2);
      tile::wgmma_shared<true>(d, w + 4, x + 4);
      tile::wgmma_shared<true>(d, w + 6, x + 6);
      tile::wgmma_commit();
      // NOTE: the low bits of words may say how to unpack codes.
      word = tile::ld_shared_u32(own) & (factors ? ~0u : 0x7F800000u);
      tile::wgmma_wait<0>();
    } else {
      tile::wgmma_shared<false>(d, w + 2 * part, x + 2 * part);
      tile::wgmma_commit();
      word = (tile::ld_shared_u32(own) >> (8 * part) & 0xFFu) << 23;
      word |= tile::ld_shared_u32(beside + kWideRows * 4) == 3 ? 1u : 0u;
      tile::wgmma_wait<0>();
    }
    tile::wgmma_pin(d);
    if (!many) {
      typename RowsSums<Math>::OfX of_x;
      of_x.load(scales + lane % 4 * (Math::kX == 8 ? 8 : 16));
      release();
      add_dealt(sums, d, __shfl_sync(~0u, word, lane / 4), __shfl_sync(~0u, word, lane / 4 + 8),
                of_x, factors, there);
      return;
    }
    static_assert(Math::kX <= 16);
    // Scales of x lie behind those of weights.
    if (lane >= 16 && lane < 16 + Math::kX) word = tile::ld_shared_u32(scales + (lane - 16) * 4);
    release();
    if (i >= p.slots) tile::mbar_wait(at.slot_empty(slot), slot_phase);
    uint8_t* const to = at.record(slot, at.rank, adder);
    uint64_t* const bar = at.slot_full(slot);
#pragma unroll
    for (int j = 0; j < Math::kX / 8; ++j)
      if (8 * j < there)
        tile::send(to + j * 512 + lane * 16,
                   uint4{__float_as_uint(d[4 * j]), __float_as_uint(d[4 * j + 1]),
                         __float_as_uint(d[4 * j + 2]), __float_as_uint(d[4 * j + 3])},
                   bar, owner);
    if (lane < 16 + Math::kX) tile::send(to + Math::kProduct + lane * 4, word, bar, owner);
    if (++slot == p.slots) slot = 0, slot_phase ^= 1;
  };
  DealtMaker<Math> maker(at, units);
  maker.load(0);
  const int chunks = (units.length + Math::kChunk - 1) / Math::kChunk;
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int half = chunk & 1;
    factors ? maker.make_factors(half) : maker.make(half);
    tile::fence_async_proxy();
    maker.load(chunk + 1);  // NOTE: behind the fence, which would wait for it
    tile::named_barrier(kMath, kDealtMath);
    if (many && chunk == 0) tile::cluster_wait();
    const int first = chunk * Math::kChunk, last = min(first + Math::kChunk, units.length);
#pragma unroll 1
    for (int i = first; i < last; ++i) multiply(i, half * Math::kChunk + i - first);
  }
  if (!many) write(warp);
}

}  // namespace te_mx::sm90
