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
#include "nvfp4/nvfp4_operand.cuh"

namespace te_mx::sm90 {

template <tile::Fp8 kLhs>
struct StandingOperands : ByteOperands<kLhs> {
  static constexpr tile::Fp8 kRhs = tile::Fp8::e5m2;
};

// Tiles of rhs are of class 0 or 3.
struct StandingScales : PowerOfTwoScales {
  template <class Operands, int kWaves, class Turns, class Release, class Fetch>
  static __device__ __forceinline__ void run(float (&sum)[kWaves][64], const Step<kWaves>& step,
                                             const Turns&, const Release& release,
                                             const Fetch& fetch) {
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
  static constexpr int kSmem = kRawBarriers + 3 * 8 * kRaw;
  static_assert(kSmem <= 232448, "a block has 227 KiB of shared memory");
  static constexpr int kOtherRegs = 24, kUnpackRegs = 40, kMathRegs = 224;
};

// Stages of codes, and what is said of each: how its bytes become factors, and whether it is one.
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
  __device__ __forceinline__ uint64_t* full(int i) const {
    return reinterpret_cast<uint64_t*>(base + Config::kRawBarriers) + i;
  }
  __device__ __forceinline__ uint64_t* empty(int i) const { return full(Config::kRaw + i); }
  __device__ __forceinline__ uint64_t* ready(int i) const { return full(2 * Config::kRaw + i); }
};

// As produce() in gemm_kernel.cuh, of lhs.
template <class Config>
__device__ __forceinline__ void ask_for_rows(const GroupedParams& p, const CUtensorMap& lhs_map,
                                             const Smem<Config>& smem) {
  using Promotion = typename Config::Promotion;
  constexpr int kTile = Promotion::kLhsTileBytes;
  const bool leader = tile::elect_one();
  Ring<Config::kStages> ring;
  ScheduleOf<Config, GroupedParams> schedule(p);
  TileSources from;
  while (schedule.next(from, smem, ring, 0)) {
    const uint32_t* at = Promotion::lhs_scales(p.lhs_scales, from.lhs_tile);
#pragma unroll 1
    for (; from.k_steps > 0; --from.k_steps, from.k0 += 128, ring.next()) {
      const int s = ring.stage;
      const uint32_t full = tile::smem_addr(smem.full(s)), ready = tile::smem_addr(smem.ready(s)),
                     scales = tile::smem_addr(smem.scales(s));
      tile::mbar_wait_asleep(smem.empty(s), ring.phase ^ 1);
      if (leader) {
        tile::mbar_arrive_expect(full, Config::kLhsScaleBytes);
        tile::bulk_load(scales, at, kTile, full);
        tile::bulk_load(scales + kTile, at + from.second * Promotion::kLhsTileWords, kTile, full);
        tile::mbar_arrive_expect(ready, Config::kLhsBytes);
        tile::tma_load(smem.lhs(s), &lhs_map, smem.ready(s), from.k0, from.m_row);
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
  uint32_t floor, factor, add;  // of bytes, two at a time, to what fp16 codes are multiplied by

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
    // Codes are 2^-14 of their numbers where they are copied to: the largest factor is 2^15.
    floor = cls == 0 ? (e + kMxfp4Bias - 30) * 0x10001u : 0;
    factor = cls == 0 ? 1024 : 0;
    add = cls == 0 ? 0 - 1024 * floor : 0x74007400u;
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
      if (lane == 0) tile::mbar_arrive(smem.ready(s));
    }
    schedule.await(smem.full(ring.stage), ring.phase);
  }
}

// For the warpgroup that unpacks.
template <class Config>
__device__ __forceinline__ void unpack_steps(const Smem<Config>& smem, const RawSmem<Config>& raw) {
  const int thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32;
  const int warp = __shfl_sync(~0u, thread / 32, 0), g = lane / 4, t = lane % 4;
  const uint32_t to0 = warp * 4096 + g * 128 + g * 16 + 2 * t;  // in rhs: its first code
  const uint32_t codes0 = raw.codes(0) + 2 * warp * kNvfp4Codes + lane * 16,
                 scales0 = raw.scales(0) + 2 * warp * kMxfp4Scales + 8 * g;
  Ring<Config::kRaw> from;
  Ring<Config::kStages> ring;
  for (;; from.next(), ring.next()) {
    const int i = from.stage, s = ring.stage;
    tile::mbar_wait(raw.ready(i), from.phase);
    const uint4 said = tile::ld_shared_u32x4(raw.said(i));
    if (said.x == 0) break;
    const uint32_t codes_at = codes0 + i * Config::kRawBytes;
    uint4 four = tile::ld_shared_u32x4(codes_at);
    tile::mbar_wait(smem.empty(s), ring.phase ^ 1);
#pragma unroll
    for (int part = 0; part < 4; ++part) {  // halves of two quads
      const uint32_t to = to0 + s * Config::kRhsBytes + part / 2 * 2048;
      // What codes of blocks of row g, and of row g + 8, are multiplied by. NOTE: those of blocks
      // that do not count are zeros, and must not meet an infinity.
      const uint32_t bytes = tile::ld_shared_u32(scales0 + i * Config::kRawBytes +
                                                 part / 2 * kMxfp4Scales + part % 2 * 4);
      const uint32_t codes[4] = {four.x, four.y, four.z, four.w};
      if (part < 3) four = tile::ld_shared_u32x4(codes_at + (part + 1) * 512);
#pragma unroll
      for (int j = 0; j < 4; ++j) {  // of 16 of K
        const uint32_t by =
            __vmaxu2(__byte_perm(bytes, 0, j < 2 ? 0x4140 : 0x4342), said.y) * said.z + said.w;
        uint32_t a[4];
        Nvfp4Operand<true>::make(a, codes[j], by);
#pragma unroll
        for (int p = 0; p < 4; ++p) a[p] = __byte_perm(a[p], 0, 0x4431);  // E5M2
        auto* const at = reinterpret_cast<uint16_t*>(smem.rhs(0) + (to ^ 16 * (part % 2 * 4 + j)));
        at[0] = static_cast<uint16_t>(a[0]), at[4] = static_cast<uint16_t>(a[2]);
        at[512] = static_cast<uint16_t>(a[1]), at[516] = static_cast<uint16_t>(a[3]);
      }
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
