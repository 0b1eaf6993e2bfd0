// The adaptive MXFP8 GEMM: D[M, N] = lhs[M, K] @ rhs[N, K]^T on packed operands (te_mx/sm90.h).
//
// A persistent CTA has a producer warpgroup and one to three math warpgroups. One warp of the
// producer feeds a ring of stages through the copy engine; other warps of it decide how a stage is
// promoted as soon as its scales arrived, and bring the columns' scales into shape. A stage is 128
// of K: codes of lhs [kM, 128] and rhs [128, 128], and their scale tiles. Each math warpgroup has
// its own rows, in waves of 64:
//
//   kM       0..63      64..127   128..191  192..255
//   128      math 0     math 1
//   192      math 0     math 1    math 2
//   256      math 0: waves 0, 1   math 1: waves 0, 1
//   64       math 0
//
// While one math warpgroup promotes its accumulators on the CUDA cores, the others keep the tensor
// cores busy. In a cluster of two, neighbours along N share the lhs tile: each loads one half and
// sends it to both.
#pragma once

#include "gemm/gemm_config.cuh"
#include "gemm/gemm_operands.cuh"
#include "gemm/gemm_scheduler.cuh"
#include "gemm/gemm_step.cuh"
#include "mxtile/sm90/barrier.cuh"
#include "mxtile/sm90/tma.cuh"
#include "mxtile/sm90/wgmma.cuh"

namespace te_mx::sm90 {

// For a warp, of which one lane asks: rhs of the stages that a CTA begins with, as many as are
// returned. Of an rhs that stands, before the kernels that write lhs have ended.
template <class Config, class Params>
__device__ __forceinline__ int produce_rhs(const Params& p, const CodeMaps& maps,
                                           const Smem<Config>& smem, int rank) {
  using Schedule = ScheduleOf<Config, Params>;
  using Promotion = typename Config::Promotion;
  if constexpr (Schedule::kDynamic) {
    return 0;
  } else {
    Schedule schedule(p, smem);
    TileSources from;
    if (!p.rhs_stands || !schedule.next(from, smem, Ring<Config::kStages>{}, rank)) return 0;
    const int stages = min(from.k_steps, Config::kStages);
    const typename Config::Operands::template Copies<Config> copies(p, maps, from, rank);
    if (tile::elect_one()) {
      const uint32_t* at = Promotion::rhs_scales(p.rhs_scales, from.rhs_tile);
#pragma unroll 1
      for (int s = 0; s < stages; ++s, from.k0 += 128) {
        const uint32_t full = tile::smem_addr(smem.full(s)), ready = tile::smem_addr(smem.ready(s));
        if constexpr (Promotion::kPrepares) {
          tile::mbar_arrive_expect(full, Config::kScaleBytes);
          tile::mbar_arrive_expect(ready, copies.bytes);
        } else {
          tile::mbar_arrive_expect(ready, Config::kScaleBytes + copies.bytes);
        }
        tile::bulk_load(tile::smem_addr(smem.scales(s)) + Config::kLhsScaleBytes, at,
                        Promotion::kRhsTileBytes, Promotion::kPrepares ? full : ready);
        copies.load_rhs(tile::smem_addr(smem.rhs(s)), ready, from.k0, from.n_row);
        at += p.rhs_tiles * Promotion::kRhsTileWords;
      }
    }
    __syncwarp();
    return stages;
  }
}

// For a warp, of which one lane asks. NOTE: how soon it does once a stage is free decides whether
// the tensor cores wait. So addresses are worked out before, and the whole warp walks along: then
// they stay in uniform registers. ahead: stages whose rhs was asked for.
template <class Config, class Params>
__device__ __forceinline__ void produce(const Params& p, const CodeMaps& maps,
                                        const Smem<Config>& smem, int rank, int ahead) {
  using Schedule = ScheduleOf<Config, Params>;
  using Promotion = typename Config::Promotion;
  constexpr int kTile = Promotion::kLhsTileBytes;
  const uint32_t lhs0 = tile::smem_addr(smem.lhs(0)) +
                        (Config::kCluster == 1 ? 0 : rank) * (Config::kLhsBytes / Config::kCluster);
  const uint32_t rhs0 = tile::smem_addr(smem.rhs(0)), scales0 = tile::smem_addr(smem.scales(0)),
                 barrier0 = tile::smem_addr(smem.full(0));
  uint32_t lhs = lhs0, rhs = rhs0, scales = scales0, full = barrier0;
  const bool leader = tile::elect_one();
  Ring<Config::kStages> ring;
  Schedule schedule(p, smem);
  TileSources from;
  while (schedule.next(from, smem, ring, rank)) {
    const uint32_t* at = Promotion::lhs_scales(p.lhs_scales, from.lhs_tile);
    const uint32_t* rhs_at = Promotion::rhs_scales(p.rhs_scales, from.rhs_tile);
    const typename Config::Operands::template Copies<Config> copies(p, maps, from, rank);
#pragma unroll 1
    for (; from.k_steps > 0; --from.k_steps, from.k0 += 128, ring.next()) {
      const uint32_t ready = full + Smem<Config>::kToReady;
      const uint32_t scales_there = Promotion::kPrepares ? full : ready;
      tile::mbar_wait_asleep(full + Smem<Config>::kToEmpty, ring.phase ^ 1);
      if (leader) {
        // The scales first: they are prepared while the codes are still on their way.
        if (ahead <= 0) {
          if constexpr (Promotion::kPrepares) {
            tile::mbar_arrive_expect(full, Config::kScaleBytes);
          } else {
            tile::mbar_arrive_expect(ready, Config::kScaleBytes + copies.bytes);
          }
        }
        if constexpr (Config::kM == 192 || (Config::kM == 256 && Schedule::kDynamic)) {
          tile::bulk_load(scales, at, kTile, scales_there);
          tile::bulk_load(scales + kTile, at + from.second * Promotion::kLhsTileWords, kTile,
                          scales_there);
        } else {
          tile::bulk_load(scales, at, Config::kLhsTiles * kTile, scales_there);
        }
        if (ahead <= 0) {
          tile::bulk_load(scales + Config::kLhsTiles * kTile, rhs_at, Promotion::kRhsTileBytes,
                          scales_there);
          if constexpr (Promotion::kPrepares) tile::mbar_arrive_expect(ready, copies.bytes);
        }
        copies.load_lhs(lhs, ready, from.k0);
        if (ahead <= 0) copies.load_rhs(rhs, ready, from.k0, from.n_row);
      }
      --ahead;
      at += p.lhs_tiles * Promotion::kLhsTileWords;
      rhs_at += p.rhs_tiles * Promotion::kRhsTileWords;
      const bool last = ring.stage == Config::kStages - 1;
      lhs = last ? lhs0 : lhs + Config::kLhsBytes, rhs = last ? rhs0 : rhs + Config::kRhsBytes;
      scales = last ? scales0 : scales + Config::kScaleBytes, full = last ? barrier0 : full + 8;
    }
  }
  schedule.finish(smem, ring);
}

// Before a step with `left` of `steps` left: has L2 fetch its part of a D that is added to. NOTE: a
// sum in memory waits for what it is added to, and at the end of a block nobody multiplies.
template <class Config>
__device__ __forceinline__ void fetch_out(const EpilogueParams& p, const CUtensorMap& out_map,
                                          int m0, int n0, int left, int steps) {
  constexpr int kPanels = Config::kM / 64 * 4;  // of 64 rows x 32 columns
  if (!p.accumulate || p.by_element) return;
  for (int i = left - 1; i < kPanels; i += steps)
    tile::tma_prefetch_l2(&out_map, n0 + i % 4 * 32, m0 + i / 4 * 64);
}

// One warp for each lhs tile of a stage, ahead of the math warpgroups. Calls beside(work, left)
// behind each step.
template <class Config, class Params, class Beside>
__device__ __forceinline__ void prepare(const Params& p, const Smem<Config>& smem, int lhs_tile,
                                        int lane, const Beside& beside) {
  using Schedule = ScheduleOf<Config, Params>;
  using Promotion = typename Config::Promotion;
  Ring<Config::kStages> ring;
  Schedule schedule(p);
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
      Promotion::prepare(
          words + lhs_tile * Promotion::kLhsTileBytes, words + Config::kLhsScaleBytes,
          columns + lhs_tile * Promotion::kPreparedBytes,
          columns + Config::kLhsTiles * Promotion::kPreparedBytes + 4 * lhs_tile, lane);
      __syncwarp();
      if (lane < kPrepared) tile::mbar_arrive(smem.ready(s));
      beside(work, left);
    }
    schedule.await(smem.full(ring.stage), ring.phase);
  }
}

template <class Config>
__device__ __forceinline__ void release(uint64_t* empty, int lane) {
#ifdef TE_MX_RACECHECK
  // compute-sanitizer does not see that __syncwarp orders a warp's reads before lane 0's arrival.
  for (int i = 0; i < Config::kCluster; ++i) tile::mbar_arrive_at(empty, i);
  return;
#endif
  __syncwarp();
  if constexpr (Config::kCluster == 1) {
    if (lane == 0) tile::mbar_arrive(empty);
  } else {
    if (lane < Config::kCluster) tile::mbar_arrive_at(empty, lane);
  }
}

struct NoSums {
  __device__ void operator()(const float (&)[64]) const {}
};
// EpilogueKind::sums: take(sums of a thread) behind the one block.
template <class Config, EpilogueKind kEpilogue, class Params, class Take = NoSums>
__device__ __forceinline__ void consume(const Params& p, const CUtensorMap& out_map,
                                        const Smem<Config>& smem, int rank, int math,
                                        const Take& take = {}) {
  using Schedule = ScheduleOf<Config, Params>;
  using Promotion = typename Config::Promotion;
  static_assert(!Schedule::kDynamic || Config::kSlots <= 2, "a block may store nothing by slots");
  const int thread = threadIdx.x % 128, lane = thread % 32;
  // This warpgroup's first row inside the block.
  const int row0 = math * Config::kWaves * 64;
  const uint32_t lhs_desc = __shfl_sync(~0u, tile::wgmma_desc(smem.lhs(0) + row0 * 128), 0);
  const uint32_t rhs_desc = __shfl_sync(~0u, tile::wgmma_desc(smem.rhs(0)), 0);
  // Shared address in stage 0 of the scale words of the rhs tile.
  const uint32_t rhs_words = tile::smem_addr(smem.scales(0) + Config::kLhsScaleBytes);
  const uint32_t columns = tile::smem_addr(smem.columns(0));
  const Turns<Config::kMath, Promotion::kPendingAtTurn> turns{math};
  turns.begin();
  Ring<Config::kStages> ring;
  Schedule schedule(p);
  WorkTile work;
  Wave w;
  w.phase = 0;
  schedule.await(smem.ready(ring.stage), ring.phase);
  while (schedule.next(work, smem)) {
    const int k_steps = work.k_steps;
    if constexpr (Schedule::kDynamic) {
      if (work.m0 + row0 >= work.m_end) {  // no rows for this warpgroup
        for (int k = 0; k < k_steps; ++k, ring.next()) {
          tile::mbar_wait(smem.ready(ring.stage), ring.phase);
          for (int wave = 0; wave < Config::kWaves; ++wave) turns.wait(), turns.pass();
          release<Config>(smem.empty(ring.stage), lane);
        }
        schedule.await(smem.ready(ring.stage), ring.phase);
        continue;
      }
    }
    w.m0 = work.m0 + row0, w.n0 = work.n0 + rank * 128;
    w.thread = thread;
    w.barrier = 1 + math;
    w.staging = smem.staging(math);
    w.bias = smem.bias(math);
    w.arrived = smem.arrived(math), w.staged = smem.staged(math);
    w.constants = smem.constants();
    if (p.epilogue.bias != nullptr) load_bias(p.epilogue, w, work.group);
    // The first row inside the block's scale tiles: 64 and 192 rows start in the middle of a tile
    // every other time.
    const int inside = Config::kM % 128 == 64 ? row0 + work.inside : row0;
    const int lhs_tile = inside / 128;
    const uint32_t lhs_words =
        __shfl_sync(~0u, tile::smem_addr(smem.scales(0) + lhs_tile * Promotion::kLhsTileBytes), 0);
    const int rhs_inside = Promotion::rhs_inside(w.n0 / 128);
    float sum[Config::kWaves][64];
#pragma unroll
    for (int wave = 0; wave < Config::kWaves; ++wave) {
#pragma unroll
      for (int i = 0; i < 64; ++i) {
        if (Promotion::kOwnZeros && wave > 0) {
          sum[wave][i ^ 1] = tile::own_zero();
        } else {
          sum[wave][i] = 0.0f;
        }
      }
    }
    // Where what is decided about a step lies behind what is prepared for it.
    const int decided = Config::kLhsTiles * Promotion::kPreparedBytes + 4 * lhs_tile;
    typename Promotion::template Ahead<Config::kWaves> scales;
    // Waits for the stage at `at` and reads what the step needs from shared memory at its start.
    const auto fetch = [&](const Ring<Config::kStages>& at) {
      const uint32_t from = word_of_row(lhs_words + at.stage * Config::kScaleBytes, inside % 128);
      tile::mbar_wait(smem.ready(at.stage), at.phase);
      scales.read(columns + at.stage * Config::kColumnBytes + decided, from,
                  rhs_words + at.stage * Config::kScaleBytes + rhs_inside);
    };
    const auto start_step = [&](typename Promotion::template Step<Config::kWaves>& step) {
      const int s = ring.stage;
      const uint32_t offset = s * Config::kScaleBytes;
      step.lhs = lhs_desc + s * (Config::kLhsBytes / 16);
      step.rhs = rhs_desc + s * (Config::kRhsBytes / 16);
      step.lhs_words = lhs_words + offset, step.rhs_words = rhs_words + offset;
      step.columns = columns + s * Config::kColumnBytes + lhs_tile * Promotion::kPreparedBytes;
      step.decided_at = columns + s * Config::kColumnBytes + decided;
      step.lane = lane, step.inside = inside % 128;
      step.take(scales);
      ring.next();
    };
    // Whether the first wave's sums are on their way while the second one does its last step.
    constexpr bool kApart = kEpilogue == EpilogueKind::add;
    fetch(ring);
#pragma unroll 1
    for (int left = k_steps; left > (kApart ? 1 : 0); --left) {
      const int s = ring.stage;
      typename Promotion::template Step<Config::kWaves> step;
      start_step(step);
      Promotion::template run<typename Config::Operands>(
          sum, step, turns, [&] { release<Config>(smem.empty(s), lane); },
          [&] {
            if (left > 1) fetch(ring);
          });
    }
    if constexpr (kApart) {
      const int s = ring.stage;
      typename Promotion::template Step<Config::kWaves> step;
      start_step(step);
#pragma unroll
      for (int wave = 0; wave < Config::kWaves; ++wave) {
        Promotion::template run_wave<typename Config::Operands>(sum[wave], step, wave, turns, [&] {
          if (wave == Config::kWaves - 1) release<Config>(smem.empty(s), lane);
        });
        w.m0 = work.m0 + row0 + 64 * wave, w.n0 = work.n0 + rank * 128, w.m_end = work.m_end;
        w.wave = wave;
        epilogue_wave<kEpilogue, Config::kSlots>(sum[wave], p.epilogue, &out_map, w);
      }
    } else if constexpr (kEpilogue == EpilogueKind::sums) {
      // NOTE: there is one block, and the loop ends here, or the compiler would think that warps
      // which part behind the steps part in them, and have nothing in uniform registers.
      take(sum[0]);
      turns.end();
      return;
    } else {
      w.m0 = work.m0 + row0, w.n0 = work.n0 + rank * 128, w.m_end = work.m_end;
#pragma unroll
      for (int wave = 0; wave < Config::kWaves; ++wave, w.m0 += 64) {
        w.wave = wave;
        w.direct = p.epilogue.direct, w.by_element = p.epilogue.by_element;
        if constexpr (Schedule::kDynamic) {
          // The end of a group: what lies behind it belongs to the next one, and only warps that
          // store rows themselves leave it out.
          if (w.m0 + 64 > w.m_end && (!Config::kByWarps || p.epilogue.accumulate))
            w.direct = w.by_element = true;
        }
        epilogue_wave<kEpilogue, Config::kSlots, Config::kByWarps>(sum[wave], p.epilogue, &out_map,
                                                                   w);
      }
    }
    w.phase ^= 1;
    schedule.await(smem.ready(ring.stage), ring.phase);
  }
  turns.end();
  if (thread == 0) tile::tma_store_wait_all();
}

template <class Config, EpilogueKind kEpilogue, class Params>
__global__ void __launch_bounds__(Config::kStartThreads, 1)
    gemm_kernel(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap lhs_map,
                const __grid_constant__ CUtensorMap lhs_end,
                const __grid_constant__ CUtensorMap rhs_map,
                const __grid_constant__ CUtensorMap rhs_end,
                const __grid_constant__ CUtensorMap out_map,
                const __grid_constant__ CUtensorMap side_map) {
  extern __shared__ __align__(1024) char raw[];
  const Smem<Config> smem(raw);
  const CodeMaps maps{lhs_map, lhs_end, rhs_map, rhs_end};
  // The 128-byte swizzle counts from there.
  if (tile::smem_addr(raw) % 1024 != 0) __trap();
  const int rank = Config::kCluster == 1 ? 0 : static_cast<int>(tile::cluster_rank());
  if (threadIdx.x == 0) {
    tile::tma_prefetch(&lhs_map), tile::tma_prefetch(&lhs_end);
    tile::tma_prefetch(&rhs_map), tile::tma_prefetch(&rhs_end);
    if (!p.epilogue.direct) tile::tma_prefetch(&out_map);
    if (p.epilogue.side != SideTensor::none) tile::tma_prefetch(&side_map);
    for (int s = 0; s < Config::kStages; ++s) {
      tile::mbar_init(smem.full(s), 1);
      tile::mbar_init(smem.empty(s), kArrivals * Config::kMath * Config::kCluster);
      tile::mbar_init(smem.ready(s), Config::kReady);
    }
    for (int i = 0; i < Config::kMath; ++i)
      tile::mbar_init(smem.arrived(i), 1), tile::mbar_init(smem.staged(i), kArrivals);
    tile::mbar_init_fence();
  }
  if constexpr (kEpilogue == EpilogueKind::backward) {
    make_constants(smem.constants(), p.epilogue);
  }
  if constexpr (Config::kCluster == 1) {
    __syncthreads();
  } else {
    tile::cluster_sync();
  }
  tile::let_dependents_start();
  const int ahead = threadIdx.x < 32 ? produce_rhs<Config>(p, maps, smem, rank) : 0;
  // NOTE: nothing that another kernel writes is read, and nothing written, before this.
  tile::await_predecessors();
  if (threadIdx.x < 128) {
    tile::registers_down<Config::kMath == 3 ? 32 : 40>();
    const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
    if (warp == 0) {
      produce<Config>(p, maps, smem, rank, ahead);
    } else if (warp < 1 + Config::kLhsTiles) {
      if constexpr (Config::Promotion::kPrepares) {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        prepare<Config>(p, smem, warp - 1, lane, [&](const WorkTile& work, int left) {
          if (warp == 1 && lane == 0)
            fetch_out<Config>(p.epilogue, out_map, work.m0, work.n0 + rank * 128, left,
                              work.k_steps);
        });
      }
    } else if (warp == 3) {
      if constexpr (kEpilogue != EpilogueKind::plain && kEpilogue != EpilogueKind::add) {
        using Schedule = ScheduleOf<Config, Params>;
        if (p.epilogue.side != SideTensor::none && tile::elect_one())
          run_epilogue_warp<Config, Schedule, kEpilogue == EpilogueKind::backward>(
              p, out_map, side_map, smem, rank);
        __syncwarp();
      } else {
        ScheduleOf<Config, Params>::run_idle_warp(p);
      }
    }
  } else {
    tile::registers_up<Config::kMathRegisters>();
    consume<Config, kEpilogue>(p, out_map, smem, rank,
                               __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0) - 1);
  }
  // NOTE: a CTA must not leave while its neighbour still sends data or arrivals to it.
  if constexpr (Config::kCluster != 1) tile::cluster_sync();
}

}  // namespace te_mx::sm90
