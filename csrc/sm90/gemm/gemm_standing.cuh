// The grouped GEMM of rows times MXFP4 weights that stand still (te_mx/sm90_nvfp4.h): the main loop
// of gemm_kernel.cuh, whose tiles of rhs are made inside of it.
//
//   warpgroup 0   warp 0 asks for lhs, warp 3 for codes of rhs, warp 2 judges their scales, warp 1
//                 prepares steps
//   1, 2          multiply, 128 rows of a block each
//   3             unpacks: a quad of 16 rows x 128 of K a warp, two a step
//
// A step passes four barriers: its codes of 4 bits and their scales are there (RawSmem::full); it
// is said what they become (RawSmem::ready); both tiles have their scale words (Smem::full); and
// what follows from these, the codes of lhs and those that were made arrive at Smem::ready apart.
//
// Codes become E5M2, the upper bytes of fp16, which has every E2M1 number times 2^-15 .. 2^13:
// where the scales of a tile are within 2^16 of each other, which they nearly always are, all of it
// shares one. Others keep their own: class 3, which is slow.
#pragma once

#include "gemm/gemm_grouped.cuh"
#include "gemm/gemm_operands.cuh"
#include "mxtile/sm90/convert.cuh"
#include "te_mx/sm90_nvfp4.h"

namespace te_mx::sm90 {

inline constexpr int kStandingTables = 31;  // standing_table()

template <tile::Fp8 kLhs>
struct StandingOperands : ByteOperands<kLhs> {
  static constexpr tile::Fp8 kRhs = tile::Fp8::e5m2;
};

// Tiles of rhs are of class 0 or 3. A second wave without rows is left out.
struct StandingScales : PowerOfTwoScales {
  // What is decided about a step says it beside the mode; a factor has neither.
  static constexpr uint32_t kSecond = 8;
  template <int kWaves>
  struct Step : sm90::Step<kWaves> {
    bool second;
    __device__ __forceinline__ void take(const ScalesAhead<kWaves>& ahead) {
      second = (ahead.decided & kSecond) != 0;
      ScalesAhead<kWaves> rest = ahead;
      rest.decided &= ~kSecond;
      sm90::Step<kWaves>::take(rest);
    }
  };

  template <class Operands, int kWaves, class Release, class Fetch>
  static __device__ __forceinline__ void run_waves(float (&sum)[kWaves][64],
                                                   const sm90::Step<kWaves>& step,
                                                   const Release& release, const Fetch& fetch) {
    if (step.mode == Mode::one) {
      step_one<Operands>(sum, step, release, fetch);
    } else if (step.mode == Mode::tile) {
      step_tile<Operands>(sum, step, release, fetch);
    } else if (step.mode == Mode::block_tile) {
      step_blocks<Mode::block_tile, Operands>(sum, step, release, fetch);
    } else {
      step_far<Operands>(sum, step, release, fetch);
    }
  }

  template <class Operands, class Turns, class Release, class Fetch>
  static __device__ __forceinline__ void run(float (&sum)[2][64], const Step<2>& step, const Turns&,
                                             const Release& release, const Fetch& fetch) {
    if (step.second || step.mode == Mode::block_tile || step.mode == Mode::far)
      return run_waves<Operands>(sum, step, release, fetch);
    sm90::Step<1> first;
    static_cast<StepPlaces&>(first) = step;
    first.rows[0] = step.rows[0], first.rows[1] = step.rows[1];
    first.factor = step.factor;
    auto& alone = reinterpret_cast<float (&)[1][64]>(sum);
    if (step.mode == Mode::one) {
      step_one<Operands>(alone, first, release, fetch);
    } else {
      step_tile<Operands>(alone, first, release, fetch);
    }
  }
};

template <class Operands>
struct StandingConfig : GemmConfig<BlockShape<256, 3, 1, 1>, Operands, StandingScales> {
  using Base = GemmConfig<BlockShape<256, 3, 1, 1>, Operands, StandingScales>;
  static constexpr int kUnpackWarps = 4, kRaw = 5;  // stages of codes
  static constexpr int kThreads = Base::kThreads + 32 * kUnpackWarps;
  static constexpr int kReady = 2 + kUnpackWarps, kFull = 2;
  static constexpr int kRawCodes = 8 * kNvfp4Codes, kRawScales = 8 * kMxfp4Scales;
  static constexpr int kRawBytes = kRawCodes + kRawScales;
  static constexpr int kRawAt = (Base::kSmem + 127) / 128 * 128;
  static constexpr int kSaid = kRawAt + kRaw * kRawBytes;
  static constexpr int kRawBarriers = kSaid + 16 * kRaw;
  static constexpr int kTables = kRawBarriers + 3 * 8 * kRaw;  // standing_table()
  static constexpr int kSmem = kTables + 8 * kStandingTables;
  static_assert(kSmem <= 232448, "a block has 227 KiB of shared memory");
  static constexpr int kOtherRegs = 24, kUnpackRegs = 40, kMathRegs = 224;
};

// Stages of codes, and what is said of each: where its bytes find their tables, and whether it is
// one.
template <class Config>
struct RawSmem {
  char* base;
  __device__ __forceinline__ uint32_t codes(int i) const {
    return tile::smem_addr(base + Config::kRawAt + i * Config::kRawBytes);
  }
  __device__ __forceinline__ uint32_t scales(int i) const { return codes(i) + Config::kRawCodes; }
  __device__ __forceinline__ uint32_t said(int i) const {
    return tile::smem_addr(base + Config::kSaid + 16 * i);
  }
  __device__ __forceinline__ uint32_t tables() const {
    return tile::smem_addr(base + Config::kTables);
  }
  __device__ __forceinline__ uint64_t* full(int i) const {
    return reinterpret_cast<uint64_t*>(base + Config::kRawBarriers) + i;
  }
  __device__ __forceinline__ uint64_t* empty(int i) const { return full(Config::kRaw + i); }
  __device__ __forceinline__ uint64_t* ready(int i) const { return full(2 * Config::kRaw + i); }
};

// As produce() in gemm_kernel.cuh, of lhs: as many waves of 64 rows as have some.
template <class Config>
__device__ __forceinline__ void ask_for_rows(const GroupedParams& p, const CUtensorMap& lhs_map,
                                             const Smem<Config>& smem) {
  using Promotion = typename Config::Promotion;
  constexpr int kTile = Promotion::kLhsTileBytes, kWave = 64 * 128;
  const bool leader = tile::elect_one();
  Ring<Config::kStages> ring;
  ScheduleOf<Config, GroupedParams> schedule(p);
  TileSources from;
  WorkTile work;
  while (schedule.next(from, work, smem, ring, 0)) {
    const uint32_t* at = Promotion::lhs_scales(p.lhs_scales, from.lhs_tile);
    const int waves = min(Config::kM / 64, (work.m_end - work.m0 + 63) / 64);
#pragma unroll 1
    for (; from.k_steps > 0; --from.k_steps, from.k0 += 128, ring.next()) {
      const int s = ring.stage;
      const uint32_t full = tile::smem_addr(smem.full(s)), ready = tile::smem_addr(smem.ready(s)),
                     scales = tile::smem_addr(smem.scales(s)), to = tile::smem_addr(smem.lhs(s));
      tile::mbar_wait_asleep(smem.empty(s), ring.phase ^ 1);
      if (leader) {
        tile::mbar_arrive_expect(full, Config::kLhsScaleBytes);
        tile::bulk_load(scales, at, kTile, full);
        tile::bulk_load(scales + kTile, at + from.second * Promotion::kLhsTileWords, kTile, full);
        tile::mbar_arrive_expect(ready, waves * kWave);
#pragma unroll
        for (int w = 0; w < Config::kM / 64; ++w)
          if (w < waves)
            tile::tma_load(to + w * kWave, &lhs_map, ready, from.k0, from.m_row + 64 * w);
      }
      at += p.lhs_tiles * Promotion::kLhsTileWords;
    }
  }
  schedule.finish(smem, ring);
}

template <class Config>
__device__ __forceinline__ void ask_for_standing(const GroupedParams& p,
                                                 const RawSmem<Config>& raw) {
  ScheduleOf<Config, GroupedParams> schedule(p);
  Ring<Config::kRaw> ring;
  TileSources from;
  WorkTile work;
  const bool leader = tile::elect_one();
  const auto* const scales = reinterpret_cast<const uint8_t*>(p.rhs_scales);
  while (schedule.take(from, work, 0)) {
    const int first = work.n0 / kNvfp4Rows;
    const int64_t block = (int64_t{work.group} * p.blocks + first) * p.k_steps;
    // Rows past the end are no one's: any will do.
    const int64_t second = first + 1 < p.blocks ? p.k_steps : 0;
    constexpr int kCodes = 4 * kNvfp4Codes, kScales = 4 * kMxfp4Scales;
    const uint8_t *codes_at = p.codes + block * kCodes, *scales_at = scales + block * kScales;
#pragma unroll 1
    for (int left = work.k_steps; left > 0; --left, ring.next()) {
      const int i = ring.stage;
      tile::mbar_wait_asleep(raw.empty(i), ring.phase ^ 1);
      if (leader) {
        const uint32_t full = tile::smem_addr(raw.full(i));
        tile::st_shared_u32(raw.said(i), 1);
        tile::mbar_arrive_expect(full, Config::kRawBytes);
        tile::bulk_load(raw.scales(i), scales_at, kScales, full);
        tile::bulk_load(raw.scales(i) + kScales, scales_at + second * kScales, kScales, full);
        tile::bulk_load(raw.codes(i), codes_at, kCodes, full);
        tile::bulk_load(raw.codes(i) + kCodes, codes_at + second * kCodes, kCodes, full);
      }
      codes_at += kCodes, scales_at += kScales;
    }
  }
  tile::mbar_wait_asleep(raw.empty(ring.stage), ring.phase ^ 1);
  if (leader) tile::st_shared_u32(raw.said(ring.stage), 0), tile::mbar_arrive(raw.full(ring.stage));
  __syncwarp();
}

// What the scale bytes of a tile decide. A byte is that of E8M0 + kMxfp4Bias; those of blocks that
// are not zeros are at least kLeast, and others count only where they look like these.
struct StandingTile {
  static constexpr uint32_t kLeast = kMxfp4Bias + 127 + kMxfp4Least, kMostApart = 16;
  uint32_t cls, exponent;       // of the tile: its class, and E of the words
  uint32_t floor, factor, add;  // of bytes, two at a time, to the places of their tables

  // By a warp, of all 512 bytes.
  __device__ __forceinline__ StandingTile(uint32_t scales, int lane) {
    const uint4 mine = tile::ld_shared_u32x4(scales + 16 * lane);
    const uint32_t words[4] = {mine.x, mine.y, mine.z, mine.w};
    // Two bytes at a time, less kLeast: who does not count is below 0.
    constexpr uint32_t kTop = 0x80008000u, kDown = kTop - kLeast * 0x10001u;
    uint32_t most = 0, least = ~0u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t a = __byte_perm(words[i], 0, 0x4140) + kDown,
                     b = __byte_perm(words[i], 0, 0x4342) + kDown;
      most = __vmaxu2(most, __vmaxu2(a, b));
      least = __vminu2(least, __vminu2(a ^ kTop, b ^ kTop));
    }
    const uint32_t top = __reduce_max_sync(~0u, max(most & 0xFFFF, most >> 16)),
                   bottom = __reduce_min_sync(~0u, min(least & 0xFFFF, least >> 16));
    const bool empty = top < 0x8000;
    const uint32_t e = empty ? 128 : top - 0x8000 + kLeast - kMxfp4Bias;  // the largest
    exponent = e - 1;
    cls = empty || top - 0x8000 - bottom <= kMostApart ? 0 : 3;
    // The last table is that of the largest.
    floor = cls == 0 ? (e + kMxfp4Bias - (kStandingTables - 1)) * 0x10001u : 0;
    factor = cls == 0 ? 8 : 0;
    add = cls == 0 ? 0 - 8 * floor : 29 * 8 * 0x10001u;
  }
  // The scale word of row r of the tile.
  __device__ __forceinline__ uint32_t word(uint32_t scales, int r) const {
    if (cls == 0) return exponent << 23;
    const uint2 two = tile::ld_shared_u32x2(scales + r / 16 * kMxfp4Scales + r % 8 * 8);
    const uint32_t bytes = __byte_perm(two.x, two.y, r % 16 < 8 ? 0x6420 : 0x7531);
    uint32_t word = 0;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const uint32_t byte = bytes >> 8 * b & 0xFF;
      if (byte >= kLeast) word |= (byte - kMxfp4Bias) << 8 * b;
    }
    return word;
  }
};

// For a warp ahead of those who unpack: says what becomes of the codes of a step, and writes its
// scale words.
template <class Config>
__device__ __forceinline__ void judge_steps(const Smem<Config>& smem, const RawSmem<Config>& raw,
                                            int lane) {
  Ring<Config::kRaw> from;
  Ring<Config::kStages> ring;
  for (;; from.next(), ring.next()) {
    const int i = from.stage, s = ring.stage;
    tile::mbar_wait(raw.full(i), from.phase);
    const bool more = tile::ld_shared_u32(raw.said(i)) != 0;
    if (!more) break;
    const uint32_t scales = raw.scales(i);
    const StandingTile all(scales, lane);
    if (lane == 0) {
      tile::st_shared_u32x4(raw.said(i), make_uint4(1, all.floor, all.factor, all.add));
      tile::mbar_arrive(raw.ready(i));
    }
    const uint32_t words = tile::smem_addr(smem.scales(s)) + Config::kLhsScaleBytes + 4 * lane;
    tile::mbar_wait(smem.empty(s), ring.phase ^ 1);
#pragma unroll 1
    for (int r = 0; r < 128; r += 32)
      tile::st_shared_u32(words + 4 * r, all.word(scales, r + lane));
    if (lane < 4)
      tile::st_shared_u32(words + 512, lane == 0 ? all.cls : lane == 1 ? all.exponent : 0);
    __syncwarp();
    if (lane == 0) tile::mbar_arrive(smem.full(s)), tile::mbar_arrive(raw.empty(i));
  }
  if (lane == 0) tile::mbar_arrive(raw.ready(from.stage));
  // Of the stage that says that no block follows.
  tile::mbar_wait(smem.empty(ring.stage), ring.phase ^ 1);
  if (lane == 0) tile::mbar_arrive(smem.full(ring.stage));
  __syncwarp();
}

// As prepare() in gemm_kernel.cuh, of both tiles of lhs.
template <class Config>
__device__ __forceinline__ void prepare_both(const GroupedParams& p, const Smem<Config>& smem,
                                             int lane) {
  using Promotion = typename Config::Promotion;
  Ring<Config::kStages> ring;
  ScheduleOf<Config, GroupedParams> schedule(p);
  WorkTile work;
  schedule.await(smem.full(ring.stage), ring.phase);
#pragma unroll 1
  while (schedule.next(work, smem)) {
#pragma unroll 1
    for (int left = work.k_steps; left > 0; --left, ring.next()) {
      const int s = ring.stage;
      const uint32_t words = tile::smem_addr(smem.scales(s));
      const uint32_t columns = tile::smem_addr(smem.columns(s));
      tile::mbar_wait(smem.full(s), ring.phase);
#pragma unroll
      for (int t = 0; t < Config::kLhsTiles; ++t)
        Promotion::prepare(words + t * Promotion::kLhsTileBytes, words + Config::kLhsScaleBytes,
                           columns + t * Promotion::kPreparedBytes,
                           columns + Config::kLhsTiles * Promotion::kPreparedBytes + 4 * t, lane);
      __syncwarp();
      if (lane == 0) {
#pragma unroll
        for (int t = 0; t < Config::kLhsTiles; ++t) {
          const uint32_t at = columns + Config::kLhsTiles * Promotion::kPreparedBytes + 4 * t;
          uint32_t decided = tile::ld_shared_u32(at);
          // NOTE: 2^-146, whose only bit this is, is a factor of every row as well.
          if (decided == Promotion::kSecond) decided = static_cast<uint32_t>(Mode::tile);
          if (work.m0 + 128 * t + 64 < work.m_end) decided |= Promotion::kSecond;
          tile::st_shared_u32(at, decided);
        }
        tile::mbar_arrive(smem.ready(s));
      }
    }
    schedule.await(smem.full(ring.stage), ring.phase);
  }
}

// What the eight magnitudes of E2M1 times 2^(f - 29) are in E5M2; below 2^-16 nothing counts.
__device__ __forceinline__ uint2 standing_table(int f) {
  uint32_t words[2] = {};
  for (int code = 1; code < 8 && f > 0; ++code) {
    const int field = code / 2 + f - 15, mantissa = code == 1 ? 0 : code % 2;
    const uint32_t byte = field > 0 ? 4 * field + 2 * mantissa : (2 + mantissa) >> min(-field, 31);
    words[code / 4] |= byte << 8 * (code % 4);
  }
  return {words[0], words[1]};
}

// Sixteen codes of rows g and g + 8 as bytes of E5M2, of the words of two pairs of lanes. A word's
// halves are neighbours along K, each with four codes, of whose bits the lowest comes first here:
// row g 6, 7, 8 and 15; the same of row g + 8 3, 4, 5 and 12; row g, 8 of K on, 0, 1, 2 and 9; the
// same of row g + 8 14, 10, 11 and 13, with the second neighbour in the lower half.
struct StandingOrder {
  uint32_t low, high;  // selectors of bytes in the order of tables

  // swapped: the second lane of a pair comes first.
  __device__ __forceinline__ explicit StandingOrder(bool swapped)
      : low(swapped ? 0x2604 : 0x6240), high(swapped ? 0x3715 : 0x7351) {}
};
struct StandingPart {
  uint32_t w[4];
  uint2 tables[2];  // of row g, of g + 8

  __device__ __forceinline__ void read(uint32_t at, int other, uint32_t all, uint32_t by) {
    w[0] = tile::ld_shared_u32(at), w[1] = tile::ld_shared_u32(at + other);
    w[2] = tile::ld_shared_u32(at + 32), w[3] = tile::ld_shared_u32(at + other + 32);
    tables[0] = tile::ld_shared_u32x2(all + (by & 0xFFFF));
    tables[1] = tile::ld_shared_u32x2(all + (by >> 16));
  }
  template <bool kEight>
  __device__ __forceinline__ uint4 make(const StandingOrder& order) const {
    const uint2 a = four_and_four<kEight>(w[0], w[1], order),
                b = four_and_four<kEight>(w[2], w[3], order);
    return make_uint4(a.x, b.x, a.y, b.y);
  }

 private:
  // exchanged: neighbours stand in each other's place.
  __device__ __forceinline__ static uint32_t look_up(const uint2& table, uint32_t four,
                                                     uint32_t sign, bool exchanged = false) {
    const uint32_t places = exchanged ? (four >> 16) + (four << 4) : four + (four >> 12);
    // NOTE: __byte_perm() would clear the highest bit of every place, which none has.
    return tile::permute_bytes(table.x, table.y, places) | (sign & 0x80808080u);
  }
  // Four codes, and those of 8 of K on.
  template <bool kEight>
  __device__ __forceinline__ uint2 four_and_four(uint32_t a, uint32_t b,
                                                 const StandingOrder& order) const {
    constexpr uint32_t kMask = 0x07070707u;
    const uint32_t q = __byte_perm(a, b, order.low), h = __byte_perm(a, b, order.high),
                   sign = __byte_perm(h, 0, 0x3120);  // as they leave
    if constexpr (kEight)
      return {look_up(tables[1], q >> 3 & kMask, sign << 3),
              look_up(tables[1], (h >> 1 & 0x06060606u) | (h >> 6 & 0x01010101u),
                      __byte_perm(h, 0, 0x1302) << 2, true)};
    return {look_up(tables[0], (h << 2 & 0x04040404u) | (q >> 6 & 0x03030303u), sign),
            look_up(tables[0], q & kMask, sign << 6)};
  }
};

// For the warpgroup that unpacks. A thread makes 16 of K of two rows from the words of four lanes.
template <class Config>
__device__ __forceinline__ void unpack_steps(const Smem<Config>& smem, const RawSmem<Config>& raw) {
  const int thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32;
  const int warp = __shfl_sync(~0u, thread / 32, 0), g = lane % 8, j = lane / 8;
  // NOTE: rows two apart would meet in a bank.
  const bool swapped = g / 2 % 2 != 0;
  const StandingOrder order(swapped);
  const uint32_t to0 = tile::smem_addr(smem.rhs(0)) + warp * 4096 + g * 128 + (g ^ j) * 16;
  const uint32_t codes0 =
                     raw.codes(0) + 2 * warp * kNvfp4Codes + g * 64 + j * 4 + (swapped ? 16 : 0),
                 scales0 = raw.scales(0) + 2 * warp * kMxfp4Scales + 8 * g;
  const uint32_t select = j < 2 ? 0x4140 : 0x4342, tables = raw.tables();
  const int other = swapped ? -16 : 16;
  Ring<Config::kRaw> from;
  Ring<Config::kStages> ring;
  for (;; from.next(), ring.next()) {
    const int i = from.stage, s = ring.stage;
    tile::mbar_wait(raw.ready(i), from.phase);
    const uint4 said = tile::ld_shared_u32x4(raw.said(i));
    if (said.x == 0) break;
    const uint32_t codes_at = codes0 + i * Config::kRawBytes, to = to0 + s * Config::kRhsBytes;
    uint2 bytes[2];
#pragma unroll
    for (int quad = 0; quad < 2; ++quad)
      bytes[quad] = tile::ld_shared_u32x2(scales0 + i * Config::kRawBytes + quad * kMxfp4Scales);
    // NOTE: a part is asked for before the one before it is made: nobody else on its scheduler
    // hides how long shared memory takes.
    StandingPart part[2];
    const auto ask = [&](int n) {
      const uint32_t four = n % 2 ? bytes[n / 2].y : bytes[n / 2].x;
      const uint32_t by = __vmaxu2(__byte_perm(four, 0, select), said.y) * said.z + said.w;
      part[n % 2].read(codes_at + n * 512, other, tables, by);
    };
    ask(0);
    tile::mbar_wait(smem.empty(s), ring.phase ^ 1);
#pragma unroll
    for (int n = 0; n < 4; ++n) {  // halves of two quads
      if (n < 3) ask(n + 1);
      const StandingPart& own = part[n % 2];
      const uint32_t there = (to ^ 64 * (n % 2)) + n / 2 * 2048;
      const uint4 row = own.make<false>(order), row8 = own.make<true>(order);
      tile::st_shared_u32x4(there, row);
      tile::st_shared_u32x4(there + 1024, row8);
    }
    tile::fence_async_proxy();
    __syncwarp();
    // NOTE: what was read has been used, so the copy engine may write there.
    if (lane == 0) tile::mbar_arrive(smem.ready(s)), tile::mbar_arrive(raw.empty(i));
  }
}

// lhs_map has rows of kM, as those of gemm_kernel.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    gemm_standing_kernel(const __grid_constant__ GroupedParams p,
                         const __grid_constant__ CUtensorMap lhs_map,
                         const __grid_constant__ CUtensorMap out_map) {
  extern __shared__ __align__(1024) char base[];
  const Smem<Config> smem(base);
  const RawSmem<Config> raw{base};
  // The 128-byte swizzle counts from there.
  if (tile::smem_addr(base) % 1024 != 0) __trap();
  if (threadIdx.x == 0) {
    tile::tma_prefetch(&lhs_map);
    if (!p.epilogue.direct) tile::tma_prefetch(&out_map);
    for (int s = 0; s < Config::kStages; ++s) {
      tile::mbar_init(smem.full(s), Config::kFull);
      tile::mbar_init(smem.empty(s), kArrivals * Config::kMath);
      tile::mbar_init(smem.ready(s), Config::kReady);
    }
    for (int i = 0; i < Config::kMath; ++i)
      tile::mbar_init(smem.arrived(i), 1), tile::mbar_init(smem.staged(i), kArrivals);
    for (int i = 0; i < Config::kRaw; ++i)
      tile::mbar_init(raw.full(i), 1), tile::mbar_init(raw.ready(i), 1),
          tile::mbar_init(raw.empty(i), 1 + Config::kUnpackWarps);
    tile::mbar_init_fence();
  }
  if (threadIdx.x < kStandingTables) {
    const uint2 table = standing_table(static_cast<int>(threadIdx.x));
    tile::st_shared_u32x2(raw.tables() + 8 * threadIdx.x, table.x, table.y);
  }
  __syncthreads();
  // NOTE: nothing that another kernel writes is read, and nothing written, before this.
  tile::let_dependents_start();
  tile::await_predecessors();
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  if (group == 0) {
    tile::registers_down<Config::kOtherRegs>();
    const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (warp == 0) {
      ask_for_rows<Config>(p, lhs_map, smem);
    } else if (warp == 1) {
      prepare_both<Config>(p, smem, lane);
    } else if (warp == 2) {
      judge_steps<Config>(smem, raw, lane);
    } else {
      ask_for_standing<Config>(p, raw);
      zero_the_rest(p);
    }
  } else if (group <= Config::kMath) {
    tile::registers_up<Config::kMathRegs>();
    consume<Config, EpilogueKind::plain>(p, out_map, smem, 0, group - 1);
  } else {
    tile::registers_down<Config::kUnpackRegs>();
    unpack_steps<Config>(smem, raw);
  }
}

}  // namespace te_mx::sm90
