// D[M, N] = lhs[M, K] @ rhs[N, K]^T where rhs, and perhaps lhs, lies in plain codes of 4 bits: a
// warpgroup for each unpacks them to tiles inside the main loop, so that one launch is all.
//
//   warpgroup 0   warp 0 asks for codes of 4 bits, warp 1 prepares steps (gemm_kernel.cuh), warp 2
//                 asks for lhs where that is tiles
//   1, 2          multiply, 64 rows of a block each
//   3, 4          unpack rhs and lhs, a row of a tile a thread (gemm_codes.cuh)
//
// A step of K passes three barriers before `ready`: its codes of 4 bits are there (`raw_full`),
// both tiles have their scale words (`full`), and what follows from these words and the codes of 8
// bits arrive at `ready` apart.
//
// With K in parts a cluster computes a block, each CTA a part. Its sums stay in shared memory; then
// every CTA adds the parts of some rows up, in their order, and has the epilogue of those rows.
#pragma once

#include "gemm/gemm_codes_config.cuh"
#include "mxtile/sm90/cluster.cuh"

namespace te_mx::sm90 {

// Barriers of the warpgroups that unpack, one each; and one of those that finish.
inline constexpr int kUnpackBarrier = 8, kFinishBarrier = 10;

// For a warp, of which one lane asks: ask(i, place, step) for every step, where i is a stage of a
// ring of kStages whose `empty(i)` has been waited for.
template <int kStages, class Empty, class Ask>
__device__ __forceinline__ void ask_for_steps(const CodesParams& p, const Empty& empty,
                                              const Ask& ask) {
  const bool leader = tile::elect_one();
  Ring<kStages> ring;
  CodesScheduler schedule(p);
  CodesScheduler::Place at;
  while (schedule.take(at)) {
#pragma unroll 1
    for (int step = at.first; step < at.end; ++step, ring.next()) {
      const int i = ring.stage;
      tile::mbar_wait_asleep(empty(i), ring.phase ^ 1);
      __syncwarp();  // a lane that waits later would miss this phase
      if (leader) ask(i, at, step);
    }
  }
}

template <class Config>
__device__ __forceinline__ void ask_for_codes(const CodesParams& p, const CUtensorMap& lhs_map,
                                              const CUtensorMap& rhs_map,
                                              const Smem<Config>& smem) {
  ask_for_steps<Config::kRaw>(
      p, [&](int i) { return smem.raw_empty(i); },
      [&](int i, const CodesScheduler::Place& at, int step) {
        tile::mbar_arrive_expect(smem.raw_full(i), Config::kRawBytes);
        tile::tma_load(smem.raw(Role::rhs, i), &rhs_map, smem.raw_full(i), step * kRawRowBytes,
                       at.n0);
        if constexpr (Config::Operands::kLhsNibbles)
          tile::tma_load(smem.raw(Role::lhs, i), &lhs_map, smem.raw_full(i), step * kRawRowBytes,
                         at.m0);
      });
}

// The same of lhs in tiles, which go to the stages themselves.
template <class Config>
__device__ __forceinline__ void ask_for_tiles(const CodesParams& p, const CUtensorMap& lhs_map,
                                              const Smem<Config>& smem) {
  ask_for_steps<Config::kStages>(
      p, [&](int s) { return smem.empty(s); },
      [&](int s, const CodesScheduler::Place& at, int step) {
        const uint32_t* const words =
            p.lhs_scales + (static_cast<int64_t>(step) * p.lhs_tiles + at.m0 / 128) * kScaleWords;
        tile::mbar_arrive_expect(smem.full(s), Config::kLhsScaleBytes);
        tile::bulk_load(tile::smem_addr(smem.scales(Role::lhs, s)), words, Config::kLhsScaleBytes,
                        tile::smem_addr(smem.full(s)));
        tile::mbar_arrive_expect(smem.ready(s), Config::kLhsBytes);
        tile::tma_load(smem.lhs(s), &lhs_map, smem.ready(s), step * 128, at.m0);
      });
}

// Of one warp, or with TE_MX_RACECHECK of its threads.
inline constexpr int kWarpArrivals = kArrivals / 4;
__device__ __forceinline__ void arrive_as_warp(uint64_t* barrier, int lane) {
  __syncwarp();
  if (lane < kWarpArrivals) tile::mbar_arrive(barrier);
}

// Steps of all blocks of a CTA.
class Steps {
 public:
  __device__ __forceinline__ explicit Steps(const CodesParams& p) : schedule_(p) {}
  __device__ __forceinline__ bool next() {
    if (++step < at_.end) return true;
    if (!schedule_.take(at_)) return false;
    step = at_.first;
    return true;
  }
  __device__ __forceinline__ bool first() const { return step == at_.first; }  // of its block
  int step = 0;

 private:
  CodesScheduler schedule_;
  CodesScheduler::Place at_{};
};

// For the warpgroup that unpacks a side. While a step is written the codes of the next one are
// read, and what its rows have is said before the step is handed over: neither is waited for.
template <class Config, Role kSide>
__device__ __forceinline__ void unpack(const CodesParams& p, const Smem<Config>& smem) {
  const int thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32;
  const auto row0 = [](const CodesScheduler::Place& at) {
    return kSide == Role::lhs ? at.m0 : at.n0;
  };
  ScaleStream<CodesScheduler> stream(p, kSide == Role::lhs ? p.lhs : p.rhs, smem.stream(kSide),
                                     thread, row0);
  const uint32_t seen = tile::smem_addr(smem.seen(kSide)), tables = tile::smem_addr(smem.tables()),
                 chunk = tile::smem_addr(smem.raw(kSide, 0)) + tile::swizzle64(thread, 0);
  Ring<Config::kRaw> raw;
  Ring<Config::kStages> ring;
  Steps steps(p);
  RowOfBlocks row;
  uint32_t scales, turn = 0;
  const auto arrived = [&] {  // where the codes of the row are
    scales = stream.at(steps.step, steps.first(), row0);
    tile::mbar_wait(smem.raw_full(raw.stage), raw.phase);
    return chunk + raw.stage * Config::kRawBytes;
  };
  const auto have_read = [&] {
    arrive_as_warp(smem.raw_empty(raw.stage), lane);
    raw.next();
    row.judge(scales);
    TileOfRows::say(row.range(), seen + turn * (kSeenBytes / 2), thread);
  };
  bool more = steps.next();
  if (more) row.read(arrived()), have_read();
#pragma unroll 1
  for (; more; ring.next()) {
    const int s = ring.stage;
    tile::named_barrier(kUnpackBarrier + static_cast<int>(kSide), 32 * kUnpackWarps);
    const TileOfRows all(row.range(), seen + turn * (kSeenBytes / 2));
    const uint32_t word = all.word(row);
    tile::mbar_wait(smem.empty(s), ring.phase ^ 1);
    write_words(word, all.exponent, all.cls, thread,
                reinterpret_cast<uint32_t*>(smem.scales(kSide, s)), false);
    arrive_as_warp(smem.full(s), lane);
    more = steps.next();
    turn ^= 1;
    // NOTE: behind the last step it reads old codes, which nobody uses.
    const uint32_t next = more ? arrived() : chunk;
    all.write(row, tables, tile::smem_addr(smem.stage(kSide, s)), thread, next);
    if (more) have_read();
    tile::fence_async_proxy();
    arrive_as_warp(smem.ready(s), lane);
  }
}

// Rows of the block that the cluster has sums of, for the math warpgroups.
template <class Config>
__device__ __forceinline__ void finish_sums(const CodesParams& p, const Smem<Config>& smem) {
  static_assert(Config::kMath * 128 == 32 * kFinishRows);
  CodesScheduler schedule(p);
  CodesScheduler::Place at;
  if (!schedule.take(at)) return;
  const int thread = static_cast<int>(threadIdx.x) - 128;
  FinishSums& rows = *reinterpret_cast<FinishSums*>(smem.raw(Role::rhs, 0));
  const uint32_t base = tile::smem_addr(smem.staging(0));
  const auto sums = [&](int part, int row, int col) {
    const uint32_t from = base + sums_offset(row - at.m0, (col - at.n0) / 4);
    if (p.parts > 1) return tile::ld_cluster_f32x4(from, part);
    const uint4 v = tile::ld_shared_u32x4(from);
    return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z),
                       __uint_as_float(v.w));
  };
#pragma unroll 1
  for (int i = static_cast<int>(blockIdx.x) % p.parts; i < 128 / kFinishRows; i += p.parts) {
    if (at.m0 + i * kFinishRows >= p.finish.m) break;
    finish_block(p.finish, rows, at.m0 / kFinishRows + i, at.n0, thread, sums,
                 [] { tile::named_barrier(kFinishBarrier, 256); });
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    gemm_codes_kernel(const __grid_constant__ CodesParams p,
                      const __grid_constant__ CUtensorMap lhs_map,
                      const __grid_constant__ CUtensorMap rhs_map,
                      const __grid_constant__ CUtensorMap out_map) {
  extern __shared__ __align__(1024) char raw[];
  const Smem<Config> smem(raw);
  // The 128-byte swizzle counts from there.
  if (tile::smem_addr(raw) % 1024 != 0) __trap();
  constexpr bool kLhsNibbles = Config::Operands::kLhsNibbles;
  constexpr int kUnpackers = kUnpackWarps * kWarpArrivals * Config::kSides;
  if (threadIdx.x == 0) {
    tile::tma_prefetch(&lhs_map);
    tile::tma_prefetch(&rhs_map);
    if (!Config::kKeepsSums && !p.epilogue.direct) tile::tma_prefetch(&out_map);
    for (int s = 0; s < Config::kStages; ++s) {
      tile::mbar_init(smem.full(s), kUnpackers + (kLhsNibbles ? 0 : 1));
      tile::mbar_init(smem.empty(s), kArrivals * Config::kMath);
      tile::mbar_init(smem.ready(s), kUnpackers + kPrepared + (kLhsNibbles ? 0 : 1));
    }
    for (int i = 0; i < Config::kRaw; ++i)
      tile::mbar_init(smem.raw_full(i), 1), tile::mbar_init(smem.raw_empty(i), kUnpackers);
    tile::mbar_init_fence();
  }
  if (threadIdx.x >= 32 && threadIdx.x < 32 + kFp4Tables)
    make_table(smem.tables(), static_cast<int>(threadIdx.x) - 32);
  __syncthreads();
  // NOTE: nothing that another kernel writes is read, and nothing written, before this.
  tile::let_dependents_start();
  tile::await_predecessors();
  // Where sums stay, all wait for those of the cluster, and for those who still read them: a CTA
  // must not leave before. NOTE: each role does so itself. Where roles meet, all would have as few
  // registers as the one with the fewest.
  const auto meet = [&] {
    if constexpr (Config::kKeepsSums) {
      __syncwarp();
      if (p.parts > 1) {
        tile::cluster_sync();
      } else {
        __syncthreads();
      }
    }
  };
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  if (group == 0) {
    tile::registers_down<Config::kProducerRegs>();
    const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
    if (warp == 0) {
      ask_for_codes<Config>(p, lhs_map, rhs_map, smem);
    } else if (warp == 1) {
      prepare<Config>(p, smem, 0, static_cast<int>(threadIdx.x) % 32, [](const WorkTile&, int) {});
    } else if (warp == 2 && !kLhsNibbles) {
      ask_for_tiles<Config>(p, lhs_map, smem);
    }
    meet(), meet();
  } else if (group <= Config::kMath) {
    tile::registers_up<Config::kMathRegs>();
    consume<Config, Config::kEpilogue>(p, out_map, smem, 0, group - 1);
    meet();
    if constexpr (Config::kKeepsSums) finish_sums<Config>(p, smem);
    meet();
  } else {
    if constexpr (Config::kSides == 1) {
      tile::registers_up<Config::kUnpackRegs>();
    } else {
      tile::registers_down<Config::kUnpackRegs>();
    }
    if (group == Config::kMath + 1) {
      unpack<Config, Role::rhs>(p, smem);
    } else if constexpr (kLhsNibbles) {
      unpack<Config, Role::lhs>(p, smem);
    }
    meet(), meet();
  }
}

}  // namespace te_mx::sm90
