// K in parts inside of a cluster: its CTAs share out the K of a block, and their sums stay in
// shared memory. Then every CTA adds the parts of some rows up, in their order, and has the
// epilogue of those rows: one launch, no workspace. The bits are those of gemm_split_launch.cuh.
#pragma once

#include "gemm/gemm_finish.cuh"
#include "gemm/gemm_kernel.cuh"
#include "mxtile/sm90/cluster.cuh"
#include "te_mx/sm90_choice.h"

namespace te_mx::sm90 {

inline constexpr int kFinishBarrier = 10;  // of those who finish

// Rows of the block that the cluster has sums of, for kMath math warpgroups. `staging` is where the
// sums lie in each CTA, `room` what nobody needs any more.
template <int kMath, class Params>
__device__ __forceinline__ void finish_sums(const Params& p, char* staging, char* room) {
  static_assert(kMath * 128 == 32 * kFinishRows);
  Scheduler<Params> schedule(p);
  typename Scheduler<Params>::Place at;
  if (!schedule.take(at)) return;
  const int thread = static_cast<int>(threadIdx.x) - 128;
  FinishSums& rows = *reinterpret_cast<FinishSums*>(room);
  const uint32_t base = tile::smem_addr(staging);
  const auto sums = [&](int part, int row, int col) {
    const uint32_t from = base + sums_offset(row - at.m0(), (col - at.n0()) / 4);
    if (p.k.parts > 1) return tile::ld_cluster_f32x4(from, part);
    const uint4 v = tile::ld_shared_u32x4(from);
    return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z),
                       __uint_as_float(v.w));
  };
  const int own = static_cast<int>(tile::cluster_rank());
  static_assert(kMostCodesParts <= kAtOnce);
  if (p.finish.plain) {
    finish_plain(p.finish, at.m0() + own * kFinishRows + thread / 32, kFinishRows * p.k.parts,
                 min(at.m0() + 128, p.finish.m), at.n0() + thread % 32 * 4, sums);
    return;
  }
#pragma unroll 1
  for (int i = own; i < 128 / kFinishRows; i += p.k.parts) {
    if (at.m0() + i * kFinishRows >= p.finish.m) break;
    finish_block(p.finish, rows, at.m0() / kFinishRows + i, at.n0(), thread, sums,
                 [] { tile::named_barrier(kFinishBarrier, 256); });
  }
}

// ------------------------------------------------------------------------------- operands in tiles
struct ClusterParams : GemmParams {
  static constexpr ScheduleKind kSchedule = ScheduleKind::cluster;
  PartsOfK k;
  FinishParams finish;
};

template <class Operands>
struct ClusterConfig : GemmConfig<BlockShape<128, 6, 1, 0>, Operands, PowerOfTwoScales> {
  static constexpr bool kKeepsSums = true;
};

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
  __syncthreads();
  tile::let_dependents_start();
  const int ahead = threadIdx.x < 32 ? produce_rhs<Config>(p, maps, smem, 0) : 0;
  // NOTE: nothing that another kernel writes is read, and nothing written, before this.
  tile::await_predecessors();
  // All wait for the sums of the cluster, and for those who still read them: a CTA must not leave
  // before. NOTE: the latter relaxed, as in gemm_codes_kernel.cuh.
  const auto meet = [&] {
    __syncwarp();
    tile::cluster_sync();
  };
  const auto leave = [&] {
    __syncwarp();
    tile::cluster_arrive_relaxed(), tile::cluster_wait();
  };
  if (threadIdx.x < 128) {
    tile::registers_down<40>();
    const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
    if (warp == 0) {
      produce<Config>(p, maps, smem, 0, ahead);
    } else if (warp == 1) {
      prepare<Config>(p, smem, 0, static_cast<int>(threadIdx.x) % 32, [](const WorkTile&, int) {});
    }
    meet(), leave();
  } else {
    tile::registers_up<Config::kMathRegisters>();
    consume<Config, EpilogueKind::sums>(
        p, lhs_map, smem, 0, __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0) - 1);
    meet();
    finish_sums<Config::kMath>(p, smem.staging(0), smem.rhs(0));
    leave();
  }
}

}  // namespace te_mx::sm90
