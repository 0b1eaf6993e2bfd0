// K in parts inside of a cluster: its CTAs share out the K of a block, and send each other their
// sums (gemm_exchange.cuh): one launch, no workspace. The bits are those of gemm_split_launch.cuh.
#pragma once

#include "gemm/gemm_exchange.cuh"
#include "te_mx/sm90_choice.h"

namespace te_mx::sm90 {

// ------------------------------------------------------------------------------- operands in tiles
struct ClusterParams : GemmParams {
  static constexpr ScheduleKind kSchedule = ScheduleKind::cluster;
  PartsOfK k;
  FinishParams finish;
};

template <class Operands>
using ClusterConfig = GemmConfig<BlockShape<128, 6, 1, 0>, Operands, PowerOfTwoScales>;

template <class Config>
__global__ void __launch_bounds__(Config::kStartThreads, 1)
    gemm_cluster_kernel(const __grid_constant__ ClusterParams p,
                        const __grid_constant__ CUtensorMap lhs_map,
                        const __grid_constant__ CUtensorMap lhs_end,
                        const __grid_constant__ CUtensorMap rhs_map,
                        const __grid_constant__ CUtensorMap rhs_end) {
  extern __shared__ __align__(1024) char raw[];
  const Smem<Config> smem(raw);
  const CodeMaps maps{lhs_map, lhs_end, rhs_map, rhs_end};
  // The 128-byte swizzle counts from there.
  if (tile::smem_addr(raw) % 1024 != 0) __trap();
  if (threadIdx.x == 0) {
    tile::tma_prefetch(&lhs_map), tile::tma_prefetch(&lhs_end);
    tile::tma_prefetch(&rhs_map), tile::tma_prefetch(&rhs_end);
    for (int s = 0; s < Config::kStages; ++s) {
      tile::mbar_init(smem.full(s), 1);
      tile::mbar_init(smem.empty(s), kArrivals * Config::kMath);
      tile::mbar_init(smem.ready(s), Config::kReady);
    }
    tile::mbar_init_fence();
  }
  if (threadIdx.x == 32) init_exchange(smem.exchange(), p.k.parts);
  __syncthreads();
  tile::cluster_arrive_relaxed();
  tile::let_dependents_start();
  const int ahead = threadIdx.x < 32 ? produce_rhs<Config>(p, maps, smem, 0) : 0;
  // NOTE: nothing that another kernel writes is read, and nothing written, before this.
  tile::await_predecessors();
  if (threadIdx.x < 128) {
    tile::registers_down<40>();
    const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (warp == 0) {
      produce<Config>(p, maps, smem, 0, ahead);
      make_room(smem, p.k, lane);
    } else {
      if (warp == 1) prepare<Config>(p, smem, 0, lane, [](const WorkTile&, int) {});
      if (warp == 2) plan_units(smem, p, lane);
      await_cluster();
    }
    leave_cluster();
  } else {
    tile::registers_up<Config::kMathRegisters>();
    consume_sums<2, kMostClusterParts>(
        p, lhs_map, smem, __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0) - 1);
    leave_cluster();
  }
}

}  // namespace te_mx::sm90
