// What a CTA of tiles_kernel.cuh has to do, and where; rows of x that it makes.
#pragma once

#include "common/shares.cuh"
#include "decode/aligned_rows.cuh"
#include "decode/decode_out.cuh"
#include "mxtile/sm90/cluster.cuh"
#include "mxtile/sm90/shared.cuh"

namespace te_mx::sm90 {

inline constexpr int kTilesMath = 256, kTilesThreads = kTilesMath + 32;
inline constexpr int kTilesRows = 128;                          // of weights
inline constexpr int kTilesWeights = kTilesRows * kDecodeQuad;  // bytes of a quad
inline constexpr int kTilesWords = 4 * (kTilesRows + 4);        // and of its scales
inline constexpr int kTilesMostStages = 8;

struct TilesParams {
  AlignedInput x;
  const uint8_t* words = nullptr;                  // scales of tiles
  int64_t words_quad = 0;                          // bytes from a quad to the next
  int n = 0, cluster = 1, blocks = 1, stages = 0;  // cluster: parts of k
  Shares parts;                                    // of quads
  DecodeOut out;
};

// Where things lie in shared memory, behind the stages.
struct TilesRoom {
  int x_at, sums_at, x_scales_at, flags_at, beside_at, passes_at, bars_at, rows_at, bytes;
};

// kMakes: CTAs make their x. kShare: so many a share of it.
template <int kCols, bool kMakes, int kShare = 1>
struct TilesMath {
  static constexpr int kX = kCols, kFloats = kCols / 2, kPeers = kShare;
  static constexpr bool kMakesX = kMakes, kShares = kPeers > 1;
  static_assert(kMakes || !kShares);
  static constexpr int kCodes = kCols * kDecodeQuad, kScales = kCols * 4;
  // Of a stage, with prepared x; beside it scales of both.
  static constexpr int kStage = kTilesWeights + (kMakesX ? 0 : kCodes);
  static constexpr int kBeside = kTilesWords + (kMakesX ? 0 : kScales);
  // Quads of x that are made at once, by a CTA and by all peers, and in how many steps by a thread.
  static constexpr int kSteps = 4, kOwnChunk = kMakesX ? 64 / kCols : 1;
  static constexpr int kChunk = kOwnChunk * kPeers;
  static constexpr int kFlags = kShares ? kChunk * kX * 4 : 0;  // passes of rows of a chunk
};

// parts: of k. longest: quads of the longest one.
template <class Math>
__host__ __device__ constexpr TilesRoom tiles_room(int stages, int parts, int longest) {
  const int sums = (Math::kX + parts - 1) / parts * parts * 512;
  const int made = Math::kMakesX ? 2 * Math::kChunk : 0;
  TilesRoom r{};
  int at = stages * Math::kStage;
  r.x_at = at, at += made * Math::kCodes;
  r.sums_at = at, at += sums;
  r.x_scales_at = at, at += made * Math::kScales;
  r.flags_at = at, at += 2 * Math::kFlags;
  r.beside_at = at, at += stages * Math::kBeside;
  r.passes_at = at, at += (longest + 1) / 2 * 8;
  r.bars_at = at, at += (2 * kTilesMostStages + 8) * 8;
  r.rows_at = at, at += 16;
  r.bytes = at;
  return r;
}

// What a CTA has to do, and where.
template <class Math>
struct TilesPlace {
  static constexpr int kPeers = Math::kPeers;
  const TilesParams& p;
  int part, peer, tile_n, block, first, length;  // first, length: of its part, in quads
  TilesRoom room;
  uint8_t* smem;
  uint32_t base, full, empty;  // shared addresses; barriers of stages that are there, were read
  uint64_t* bars;
  int* passes;  // of quads
  int* most_passes;

  __device__ __forceinline__ TilesPlace(const TilesParams& p, uint8_t* smem) : p(p), smem(smem) {
    const int rank = static_cast<int>(tile::cluster_rank());
    part = rank / kPeers, peer = rank - part * kPeers;
    const int index = static_cast<int>(tile::cluster_index());
    const int tiles = index / p.blocks;
    tile_n = tiles * kPeers + peer, block = index - tiles * p.blocks;
    const Range range(p.parts, part);
    first = range.first, length = range.last - first;
    // NOTE: parts differ by a quad, places must not.
    room = tiles_room<Math>(p.stages, p.cluster, p.parts.least + 1);
    base = tile::smem_addr(smem), full = base + room.bars_at;
    empty = full + 8 * kTilesMostStages;
    bars = reinterpret_cast<uint64_t*>(smem + room.bars_at);
    passes = reinterpret_cast<int*>(smem + room.passes_at);
    most_passes = reinterpret_cast<int*>(bars + 2 * kTilesMostStages + 7);
  }
  __device__ __forceinline__ uint64_t* sums_bar() const { return bars + 2 * kTilesMostStages; }
  // Of further passes: a quad is there, was read.
  __device__ __forceinline__ uint64_t* pass_bar(int i) const { return sums_bar() + 1 + i; }
  // Of halves of what is made: it is there, was read.
  __device__ __forceinline__ uint64_t* made_bar(int half) const { return sums_bar() + 3 + half; }
  __device__ __forceinline__ uint64_t* used_bar(int half) const { return sums_bar() + 5 + half; }
  __device__ __forceinline__ bool in_cluster() const { return p.cluster * kPeers > 1; }
  // By whole warps, before anything else; false: there is nothing to do. Until the end rows take no
  // registers.
  __device__ __forceinline__ bool take_rows() const {
    DecodeRows all = p.x.rows_of;
    if (!all.begin(block)) return false;
    if (threadIdx.x == kTilesMath) *reinterpret_cast<DecodeBlock*>(smem + room.rows_at) = all;
    return true;
  }
  __device__ __forceinline__ const DecodeBlock& rows() const {
    return *reinterpret_cast<const DecodeBlock*>(smem + room.rows_at);
  }
  // Fragments of 16 rows of weights and 8 of x that this CTA adds up.
  __device__ __forceinline__ int mine() const {
    return (Math::kX - part + p.cluster - 1) / p.cluster;
  }
  __device__ __forceinline__ uint32_t stage(int s) const { return base + s * Math::kStage; }
  __device__ __forceinline__ uint32_t beside(int s) const {
    return base + room.beside_at + s * Math::kBeside;
  }
  __device__ __forceinline__ uint8_t* sums() const { return smem + room.sums_at; }
  // By one thread.
  __device__ __forceinline__ void start() const {
    for (int i = 0; i < p.stages; ++i) {
      tile::mbar_init(bars + i, 1);
      tile::mbar_init(bars + kTilesMostStages + i, kTilesMath / 32);
    }
    for (int half = 0; half < 2; ++half) {
      tile::mbar_init(made_bar(half), 1);
      tile::mbar_init(used_bar(half), kTilesMath / 32 * kPeers);
    }
    tile::mbar_init(sums_bar(), 1);
    tile::mbar_init(pass_bar(0), 1), tile::mbar_init(pass_bar(1), kTilesMath / 32);
    tile::mbar_init_fence();
    if (p.cluster > 1) tile::mbar_arrive_expect(sums_bar(), mine() * p.cluster * 512);
    *most_passes = 1;
  }
  // That quad i of the CTA takes so many.
  __device__ __forceinline__ void count_passes(int i, int count) const {
    atomicMax(passes + i, count), atomicMax(most_passes, count);
  }
  // By a warp that has read a stage.
  __device__ __forceinline__ void release(int s) const {
    __syncwarp();
    if (tile::elect_one()) tile::mbar_arrive(bars + kTilesMostStages + s);
  }
  // By a warp. NOTE: for the last ones nobody waits, and peers may have left then.
  __device__ __forceinline__ void arrive_at_peers(uint64_t* bar, bool waited_for) const {
    __syncwarp();
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (waited_for && lane < kPeers) tile::mbar_arrive_at(bar, part * kPeers + lane);
  }
};

// Makes x of a CTA, or with its peers, bf16 values in whole vectors, some quads at a time. By the
// warps that multiply; half a warp has a quad of a row. kAlone: every CTA all of it.
template <class Math, bool kAlone = !Math::kShares>
struct TilesMaker {
  static constexpr int kSteps = Math::kSteps, kX = Math::kX, kWorkers = kTilesMath / 16;
  // What a step is from the one before: as many rows or quads further.
  static constexpr int kStepQuads = kX < kWorkers ? kWorkers / kX : 1;
  static constexpr int kRowSteps = kX > kWorkers ? kX / kWorkers : 1;
  static constexpr int kChunk = kAlone ? Math::kOwnChunk : Math::kChunk;
  using Eight = AlignedValues<__nv_bfloat16, true>;
  const TilesPlace<Math>& at;
  int lane, row0, quad0;           // of step 0, of the chunk
  bool has[kRowSteps];             // rows that are there
  const uint4* from;               // of step 0
  int64_t row_step;                // vectors to the row of the next one
  int k, end;                      // of step 0; where there is no more
  uint32_t to, scale_to, flag_to;  // shared addresses, in the first half
  Eight x[kSteps];

  static constexpr int quad(int j) { return j / kRowSteps * kStepQuads; }
  static constexpr int more_rows(int j) { return j % kRowSteps * kWorkers; }

  __device__ __forceinline__ TilesMaker(const TilesPlace<Math>& at, int chunk) : at(at) {
    const AlignedInput& a = at.p.x;
    const int worker = static_cast<int>(threadIdx.x) / 16;
    lane = static_cast<int>(threadIdx.x) % 16;
    row0 = worker % kX, quad0 = worker / kX + (kAlone ? 0 : at.peer * Math::kOwnChunk);
    for (int j = 0; j < kRowSteps; ++j) has[j] = row0 + j * kWorkers < at.rows().count;
    k = (at.first + chunk * kChunk + quad0) * kDecodeQuad + lane * 8;
    end = min(a.k, (at.first + at.length) * kDecodeQuad);
    from = reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(a.in.x) +
                                          (at.rows().first + row0) * a.in.ld + k);
    row_step = kWorkers * a.in.ld / 8;
    to = at.base + at.room.x_at + quad0 * Math::kCodes + row0 / 8 * 1024 +
         tile::swizzle128(row0 % 8, lane / 2) + lane % 2 * 8;
    // NOTE: lanes 0 .. kSteps - 1 store scales, each of a step.
    const int own = lane % kSteps, own_row = row0 + more_rows(own), own_quad = quad0 + quad(own);
    scale_to = at.base + at.room.x_scales_at + own_quad * Math::kScales +
               aligned_scale_place<kX == 8>(own_row) * 4;
    flag_to = at.base + at.room.flags_at + (own_quad * kX + own_row) * 4;
  }
  // What comes next.
  __device__ __forceinline__ void load() {
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      // NOTE: past L1, which may hold what was there before.
      const bool there = has[j % kRowSteps] && k + quad(j) * kDecodeQuad < end;
      const uint4* const one = from + j % kRowSteps * row_step + quad(j) * (kDecodeQuad / 8);
      x[j].v[0] = make_uint4(0, 0, 0, 0);
      if (there) x[j].v[0] = __ldcg(one);
    }
    k += kChunk * kDecodeQuad, from += kChunk * (kDecodeQuad / 8);
  }
  // To half `half` of what there is room for, of this CTA or of all peers.
  __device__ __forceinline__ void store(int half, int j, uint2 codes) const {
    const uint32_t place = to + half * (Math::kChunk * Math::kCodes) + quad(j) * Math::kCodes +
                           more_rows(j) / 8 * 1024;
    if constexpr (kAlone) {
      tile::st_shared_u32x2(place, codes.x, codes.y);
    } else {
#pragma unroll
      for (int i = 0; i < Math::kPeers; ++i)
        tile::send(at.smem + (place - at.base), codes, at.made_bar(half),
                   at.part * Math::kPeers + i);
    }
  }
  __device__ __forceinline__ void store_scales(int half, const int (&e)[kSteps],
                                               const int (&passes)[kSteps]) const {
    // NOTE: opaque, or the compiler makes arrays in memory of them.
    const auto own_of = [&](const int (&all)[kSteps]) {
      static_assert(kSteps == 4);
      const int low = lane & 1 ? all[1] : all[0], high = lane & 1 ? all[3] : all[2];
      return lane & 2 ? tile::opaque(high) : tile::opaque(low);
    };
    const int own = own_of(e), own_passes = kAlone ? 0 : own_of(passes);
    const uint32_t scale = __float_as_uint(aligned_scale(own));
    const uint32_t place = scale_to + half * (Math::kChunk * Math::kScales);
    if constexpr (kAlone) {
      if (lane < kSteps) tile::st_shared_u32(place, scale);
    } else {
      // NOTE: others send what they count of passes.
      const uint32_t flag = flag_to + half * Math::kFlags;
      if (lane < 2 * kSteps) {
#pragma unroll
        for (int i = 0; i < Math::kPeers; ++i)
          tile::send(at.smem + ((lane < kSteps ? place : flag) - at.base),
                     lane < kSteps ? scale : static_cast<uint32_t>(own_passes), at.made_bar(half),
                     at.part * Math::kPeers + i);
      }
    }
  }
  // The first pass of what was loaded, and counts passes. ready(): before anything is stored.
  template <class Ready>
  __device__ __forceinline__ void make(int chunk, int half, const Ready& ready) const {
    const AlignedInput& a = at.p.x;
    int passes[kSteps];
    bool more = false;
    const QuadBytes<kSteps> own(x, a.in);
    ready();
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      const int down = own.largest[j] - own.byte[j];
      const bool taken = own.counts[j] && down <= a.spread;
      more |= own.counts[j] && !taken;
      // NOTE: codes of NaN stay NaN, others of blocks that are not taken become zeros.
      const uint32_t f = taken ? 0x3C003C00u - static_cast<uint32_t>(down) * 0x04000400u : 0;
      const uint2 codes = x[j].codes_of(own.byte[j]);
      store(half, j,
            {tile::fp8x4_times<Element::e4m3>(codes.x, f, f),
             tile::fp8x4_times<Element::e4m3>(codes.y, f, f)});
      passes[j] = 1;
    }
    if (__any_sync(~0u, more)) {
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        AlignedEight blocks(x[j], a.in);
        uint2 made;
        int count = 0;
#pragma unroll 1
        for (; count == 0 || blocks.more(); ++count) blocks.pass(count, a.spread, made);
        passes[j] = count;
        const int q = chunk * kChunk + quad0 + quad(j);
        if (kAlone && count > 1 && q < at.length) at.count_passes(q, count);
      }
    }
    store_scales(half, own.largest, passes);
  }
  // Counts the passes of a chunk that peers made.
  static __device__ __forceinline__ void count_passes(const TilesPlace<Math>& at, int chunk,
                                                      int half) {
    for (int i = threadIdx.x; i < kChunk * kX; i += kTilesMath) {
      const int passes = static_cast<int>(
          tile::ld_shared_u32(at.base + at.room.flags_at + half * Math::kFlags + i * 4));
      const int q = chunk * kChunk + i / kX;
      if (passes > 1 && q < at.length) at.count_passes(q, passes);
    }
  }
  __device__ __forceinline__ void make_pass(int number) const {
    int e[kSteps], passes[kSteps] = {};
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      AlignedEight blocks(x[j], at.p.x.in);
      uint2 made;
      e[j] = -1;
#pragma unroll 1
      for (int i = 0; i <= number; ++i) e[j] = blocks.pass(i, at.p.x.spread, made);
      store(0, j, made);
    }
    store_scales(0, e, passes);
  }
};

}  // namespace te_mx::sm90
