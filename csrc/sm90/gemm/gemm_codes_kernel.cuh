// D[M, N] = lhs[M, K] @ rhs[N, K]^T where rhs lies in plain codes of 4 bits: they become tiles
// inside the main loop. lhs is tiles, which the kernel before may still be making
// (quantize/pack.cu).
//
//   warpgroup 0   warp 0 asks for codes of rhs, warp 1 prepares steps (gemm_kernel.cuh),
//                 warp 2 asks for lhs, warp 3 reads scales of rhs
//   1, 2          multiply, 64 rows of a block each
//   3, 4          unpack, a row of a tile a thread (gemm_codes.cuh), a step each in turn
//
// A step of K passes three barriers before `ready`: its codes of 4 bits are there (`raw_full`),
// both tiles have their scale words (`full`), and what follows from these words and the codes of 8
// bits arrive at `ready` apart.
//
// With K in parts a cluster computes a block, each CTA a part, and they send each other their sums
// (gemm_exchange.cuh).
#pragma once

#include "gemm/gemm_codes_config.cuh"

namespace te_mx::sm90 {

// Barriers of the warpgroups that unpack, one each.
inline constexpr int kUnpackBarrier = 8;

// For a warp, of which one lane asks: ask(i, place, step) for every step, where i is a stage of a
// ring of kStages whose `empty(i)` has been waited for. begin(): before the first one.
template <int kStages, class Begin, class Empty, class Ask>
__device__ __forceinline__ void ask_for_steps(const CodesParams& p, const Begin& begin,
                                              const Empty& empty, const Ask& ask) {
  const bool leader = tile::elect_one();
  Ring<kStages> ring;
  CodesScheduler schedule(p);
  CodesScheduler::Place at;
  bool more = schedule.take(at);
  begin();
  for (; more; more = schedule.take(at)) {
#pragma unroll 1
    for (int step = at.first; step < at.end; ++step, ring.next()) {
      const int i = ring.stage;
      tile::mbar_wait_asleep(empty(i), ring.phase ^ 1);
      __syncwarp();  // a lane that waits later would miss this phase
      if (leader) ask(i, at, step);
    }
  }
}

// Until codes and scales of rhs are there.
__device__ __forceinline__ void await_codes(const CodesParams& p) {
  if (!p.lhs_comes) tile::await_predecessors();
}

// While the kernels before still run, L2 fetches the codes of the first steps, as they are by then.
// NOTE: not those that several blocks of rows ask for, nor more of them: that took longer.
inline constexpr int kFetchedSteps = 4;
__device__ __forceinline__ void fetch_codes(const CodesParams& p, const CUtensorMap& rhs_map) {
  CodesScheduler schedule(p);
  CodesScheduler::Place at;
  if (p.lhs_comes || p.m_blocks > 1 || !schedule.take(at)) return;
  const bool leader = tile::elect_one();
#pragma unroll 1
  for (int step = at.first; step < min(at.first + kFetchedSteps, at.end); ++step)
    if (leader) tile::tma_prefetch_l2(&rhs_map, step * kRawRowBytes, at.n0());
}

template <class Config>
__device__ __forceinline__ void ask_for_codes(const CodesParams& p, const CUtensorMap& rhs_map,
                                              const Smem<Config>& smem) {
  const auto begin = [&] { fetch_codes(p, rhs_map), await_codes(p); };
  ask_for_steps<Config::kRaw>(
      p, begin, [&](int i) { return smem.raw_empty(i); },
      [&](int i, const CodesScheduler::Place& at, int step) {
        tile::mbar_arrive_expect(smem.raw_full(i), kRawTileBytes);
        tile::tma_load(smem.raw(i), &rhs_map, smem.raw_full(i), step * kRawRowBytes, at.n0());
      });
}

// The same of lhs, whose tiles go to the stages themselves.
template <class Config>
__device__ __forceinline__ void ask_for_tiles(const CodesParams& p, const CUtensorMap& lhs_map,
                                              const CUtensorMap& lhs_end,
                                              const Smem<Config>& smem) {
  ask_for_steps<Config::kStages>(
      p, [] { tile::await_predecessors(); }, [&](int s) { return smem.empty(s); },
      [&](int s, const CodesScheduler::Place& at, int step) {
        const uint32_t* const words =
            p.lhs_scales + (static_cast<int64_t>(step) * p.lhs_tiles + at.m0() / 128) * kScaleWords;
        tile::mbar_arrive_expect(smem.full(s), Config::kLhsScaleBytes);
        tile::bulk_load(tile::smem_addr(smem.scales(Role::lhs, s)), words, Config::kLhsScaleBytes,
                        tile::smem_addr(smem.full(s)));
        const int rows = min(128, p.lhs_rows - at.m0());
        tile::mbar_arrive_expect(smem.ready(s), rows * 128);
        tile::tma_load(smem.lhs(s), rows == 128 ? &lhs_map : &lhs_end, smem.ready(s), step * 128,
                       at.m0());
      });
}

// Of one warp, or with TE_MX_RACECHECK of its threads.
inline constexpr int kWarpArrivals = kArrivals / 4;
__device__ __forceinline__ void arrive_as_warp(uint64_t* barrier, int lane) {
  __syncwarp();
  if (lane < kWarpArrivals) tile::mbar_arrive(barrier);
}

// For a warp ahead of those who unpack: has the scales of a step brought, and says where they are
// and what they decide.
template <class Config>
__device__ __forceinline__ void read_scales(const CodesParams& p, const Smem<Config>& smem,
                                            int lane) {
  const auto row0 = [](const CodesScheduler::Place& at) { return at.n0(); };
  await_codes(p);
  ScaleStream<CodesScheduler> stream(p, p.rhs, smem.stream(), lane, row0);
  Ring<Config::kRaw> raw;
  int step = 0;            // those handed over
  int old = 0, older = 0;  // before the piece that was read last, and before the one before
  CodesScheduler schedule(p);
  CodesScheduler::Place at;
  while (schedule.take(at)) {
    const uint32_t rows = stream.rows(row0(at));
    const bool whole = __all_sync(~0u, rows == 15);
    const auto hand_over = [&](uint32_t said) {
      tile::mbar_wait(smem.raw_empty(raw.stage), raw.phase ^ 1);
      if (lane == 0) tile::st_shared_u32(tile::smem_addr(smem.said(raw.stage)), said);
      arrive_as_warp(smem.raw_full(raw.stage), lane);
      raw.next(), ++step;
    };
#pragma unroll 1
    for (int pair = at.first / 2; 2 * pair < at.end; ++pair) {
      const bool piece = pair == at.first / 2 || pair % 2 == 0;
      if (piece) {
        // What the next copy overwrites. Mostly it is known that it was read: four steps a piece.
        // NOTE: who unpacks reads its own steps in their order, not those of the others.
#pragma unroll 1
        for (int read = older - Config::kTurns; read < older; ++read) {
          if (read >= max(0, step - Config::kRaw))
            tile::mbar_wait(smem.raw_empty(read % Config::kRaw), read / Config::kRaw & 1);
        }
        older = old, old = step;
      }
      uint2 w[4];
      const uint32_t place = stream.at(w, pair, piece, row0) << 8;
      uint32_t even, odd;
      if (whole) {
        even = decide<true>(w[0].x, w[1].x, w[2].x, w[3].x, rows);
        odd = decide<true>(w[0].y, w[1].y, w[2].y, w[3].y, rows);
      } else {
        even = decide<false>(w[0].x, w[1].x, w[2].x, w[3].x, rows);
        odd = decide<false>(w[0].y, w[1].y, w[2].y, w[3].y, rows);
      }
      if (2 * pair >= at.first) hand_over(even | place);
      if (2 * pair + 1 < at.end) hand_over(odd | (place + (4 << 8)));
    }
  }
}

// The steps of all blocks of a CTA.
__device__ __forceinline__ int steps_of(const CodesParams& p) {
  CodesScheduler schedule(p);
  CodesScheduler::Place at;
  int steps = 0;
  while (schedule.take(at)) steps += at.end - at.first;
  return steps;
}

// For a warpgroup that unpacks, one of Config::kTurns, which take steps in turn; `unpacks`
// is its number. While a step is written the codes of its next one are read: nobody waits for them.
template <class Config>
__device__ __forceinline__ void unpack(const CodesParams& p, const Smem<Config>& smem,
                                       int unpacks) {
  const int thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32;
  const uint32_t seen = tile::smem_addr(smem.seen(unpacks)),
                 tables = tile::smem_addr(smem.tables()),
                 chunk = tile::smem_addr(smem.raw(0)) + tile::swizzle64(thread, 0),
                 saids = tile::smem_addr(smem.said(0)),
                 scales = tile::smem_addr(smem.stream()) + 16 * thread;
  Ring<Config::kRaw> raw;
  Ring<Config::kStages> ring;
  RowOfBlocks row;
  uint32_t said, turn = 0;
  // Where the codes of the row are. What is known of it is read.
  const auto arrived = [&] {
    tile::mbar_wait(smem.raw_full(raw.stage), raw.phase);
    said = tile::ld_shared_u32(saids + raw.stage * 4);
    row.scales = tile::ld_shared_u32(scales + (said >> 8 & 0xFFFF));
    return chunk + raw.stage * kRawTileBytes;
  };
  int left = steps_of(p);
  if (unpacks != 0) raw.next(), ring.next(), --left;
  // NOTE: a read of shared memory may still be under way when an arrival behind it is seen, and the
  // copy engine write the next codes below it. The fence has the warp wait for it.
  const auto hand_back = [&] {
    tile::fence_async_proxy();
    arrive_as_warp(smem.raw_empty(raw.stage), lane);
  };
  if (left > 0) row.read(arrived()), hand_back();
#pragma unroll 1
  for (; left > 0; left -= Config::kTurns) {
    const int s = ring.stage;
    uint32_t word, exponent, u;
    int cls = 0;
    if (said & kDecided) {
      exponent = said & 0xFF, word = exponent << 23;
      // NOTE: rows that do not exist must not ask for tables that do not.
      u = (kEveryBlock * (tile::kFp4Headroom + exponent) - row.scales) & kEveryBlock * 15;
    } else {
      row.judge();
      TileOfRows::say(row.range(), seen + turn * (kSeenBytes / 2), thread);
      tile::named_barrier(kUnpackBarrier + unpacks, 32 * kUnpackWarps);
      const TileOfRows all(row.range(), seen + turn * (kSeenBytes / 2));
      turn ^= 1;
      word = all.word(row), exponent = all.exponent, cls = all.cls, u = all.tables(row);
    }
    tile::mbar_wait(smem.empty(s), ring.phase ^ 1);
    write_words(word, exponent, cls, thread, reinterpret_cast<uint32_t*>(smem.scales(Role::rhs, s)),
                false);
    arrive_as_warp(smem.full(s), lane);
    const bool more = left > Config::kTurns;
#pragma unroll
    for (int i = 0; i < Config::kTurns; ++i) raw.next();
    // NOTE: behind the last step it reads old codes, which nobody uses.
    const uint32_t next = more ? arrived() : chunk;
    write_row(row, u, tables, tile::smem_addr(smem.rhs(s)), thread, next);
    tile::fence_async_proxy();
    arrive_as_warp(smem.ready(s), lane);
    if (more) arrive_as_warp(smem.raw_empty(raw.stage), lane);
#pragma unroll
    for (int i = 0; i < Config::kTurns; ++i) ring.next();
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    gemm_codes_kernel(const __grid_constant__ CodesParams p,
                      const __grid_constant__ CUtensorMap lhs_map,
                      const __grid_constant__ CUtensorMap lhs_end,
                      const __grid_constant__ CUtensorMap rhs_map,
                      const __grid_constant__ CUtensorMap out_map) {
  extern __shared__ __align__(1024) char raw[];
  const Smem<Config> smem(raw);
  // The 128-byte swizzle counts from there.
  if (tile::smem_addr(raw) % 1024 != 0) __trap();
  constexpr int kUnpackers = kUnpackWarps * kWarpArrivals;
  if (threadIdx.x == 0) {
    tile::tma_prefetch(&lhs_map), tile::tma_prefetch(&lhs_end);
    tile::tma_prefetch(&rhs_map);
    if (!Config::kKeepsSums && !p.epilogue.direct) tile::tma_prefetch(&out_map);
    for (int s = 0; s < Config::kStages; ++s) {
      tile::mbar_init(smem.full(s), kUnpackers + 1);
      tile::mbar_init(smem.empty(s), kArrivals * Config::kMath);
      tile::mbar_init(smem.ready(s), kUnpackers + kPrepared + 1);
    }
    for (int i = 0; i < Config::kRaw; ++i)
      tile::mbar_init(smem.raw_full(i), 1 + kWarpArrivals),
          tile::mbar_init(smem.raw_empty(i), kUnpackers);
    tile::mbar_init_fence();
  }
  if constexpr (Config::kKeepsSums) {
    if (threadIdx.x == 128) init_exchange(smem.exchange(), p.k.parts);
  }
  if (threadIdx.x >= 32 && threadIdx.x < 32 + kFp4Tables)
    make_table(smem.tables(), static_cast<int>(threadIdx.x) - 32);
  __syncthreads();
  if constexpr (Config::kKeepsSums) tile::cluster_arrive_relaxed();
  // NOTE: each role waits for the kernels before it where it first reads or writes memory.
  tile::let_dependents_start();
  // NOTE: each role ends itself. Where roles meet, all would have as few registers as the one with
  // the fewest.
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  if (group == 0) {
    tile::registers_down<Config::kProducerRegs>();
    const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
    if (warp == 0) {
      ask_for_codes<Config>(p, rhs_map, smem);
    } else if (warp == 1) {
      if constexpr (Config::kKeepsSums) plan_units(smem, p, static_cast<int>(threadIdx.x) % 32);
      prepare<Config>(p, smem, 0, static_cast<int>(threadIdx.x) % 32, [](const WorkTile&, int) {});
    } else if (warp == 2) {
      ask_for_tiles<Config>(p, lhs_map, lhs_end, smem);
      if constexpr (Config::kKeepsSums) make_room(smem, p.k, static_cast<int>(threadIdx.x) % 32);
    } else {
      read_scales<Config>(p, smem, static_cast<int>(threadIdx.x) % 32);
    }
    if constexpr (Config::kKeepsSums) {
      if (warp != 2) await_cluster();
      leave_cluster();
    }
  } else if (group <= Config::kMath) {
    tile::registers_up<Config::kMathRegs>();
    tile::await_predecessors();
    if constexpr (Config::kKeepsSums) {
      consume_sums<1, kMostCodesParts>(p, out_map, smem, group - 1);
      leave_cluster();
    } else {
      consume<Config, Config::kEpilogue>(p, out_map, smem, 0, group - 1);
    }
  } else {
    tile::registers_down<Config::kUnpackRegs>();
    unpack<Config>(p, smem, group - 1 - Config::kMath);
    if constexpr (Config::kKeepsSums) await_cluster(), leave_cluster();
  }
}

}  // namespace te_mx::sm90
