// K in parts inside of a cluster: its CTAs share out the K of a block, and their sums stay in
// shared memory. Then every CTA adds the parts of some rows up, in their order, and has the
// epilogue of those rows: one launch, no workspace. The bits are those of gemm_split.cuh.
#pragma once

#include "common/shares.cuh"
#include "gemm/gemm_finish.cuh"
#include "gemm/gemm_kernel.cuh"
#include "mxtile/sm90/cluster.cuh"
#include "te_mx/sm90_choice.h"

namespace te_mx::sm90 {

// K in parts, one a CTA of a cluster: part i is of the steps from steps[i] to steps[i + 1], as in
// gemm_split.cuh, so that sums have the same bits. NOTE: worked out on the host. No role of a CTA
// does anything before it knows its part, and the divisions that this takes are long chains of
// instructions: with them a kernel took 1 to 2 us more.
struct PartsOfK {
  int parts;
  int steps[kMostCodesParts + 1];
  __host__ void cut(int k_steps, int into) {
    static_assert(kMostClusterParts <= kMostCodesParts);
    const Shares shares = shares_of(k_steps, into);
    parts = into;
    for (int i = 0; i <= into; ++i) steps[i] = shares.begin(i);
  }
};

// Blocks of 128 x 128, of which a cluster computes one at a time. Params have PartsOfK.
template <class Params>
class ClusterScheduler {
 public:
  static constexpr bool kDynamic = false;
  struct Place {
    int m0, n0, first, end;  // steps of K
  };
  __device__ __forceinline__ explicit ClusterScheduler(const Params& p)
      : p_(p), index_(static_cast<int>(tile::cluster_index())) {
    const int part = static_cast<int>(tile::cluster_rank());
    first_ = p.steps[part], end_ = p.steps[part + 1];
  }
  template <class Smem>
  __device__ __forceinline__ ClusterScheduler(const Params& p, const Smem&) : ClusterScheduler(p) {}

  __device__ __forceinline__ bool take(Place& at) {
    if (index_ >= p_.m_blocks * p_.n_blocks) return false;
    const Block block = block_at(p_, p_.m_blocks, index_);
    at.m0 = block.m * 128, at.n0 = block.n * 128;
    at.first = first_, at.end = end_;
    index_ += static_cast<int>(tile::cluster_count());
    return true;
  }

  // For the producer of gemm_kernel.cuh.
  template <class Smem, class Ring>
  __device__ __forceinline__ bool next(TileSources& from, const Smem&, const Ring&, int) {
    Place at;
    if (!take(at)) return false;
    from.m_row = at.m0, from.n_row = at.n0, from.k0 = at.first * 128;
    from.lhs_tile = at.m0 / 128 + at.first * p_.lhs_tiles;
    from.rhs_tile = at.n0 / 128 + at.first * p_.rhs_tiles;
    from.second = 1;
    from.k_steps = at.end - at.first;
    return true;
  }
  template <class Smem, class Ring>
  __device__ __forceinline__ void finish(const Smem&, const Ring&) {}

  // For those who multiply.
  __device__ __forceinline__ void await(uint64_t*, uint32_t) {}
  template <class Smem>
  __device__ __forceinline__ bool next(WorkTile& work, const Smem&) {
    Place at;
    if (!take(at)) return false;
    work.m0 = at.m0, work.m_end = p_.epilogue.m, work.n0 = at.n0;
    work.k_steps = at.end - at.first;
    work.inside = 0, work.group = 0;
    return true;
  }

 private:
  const Params& p_;
  int index_, first_, end_;
};

inline constexpr int kFinishBarrier = 10;  // of those who finish

// Rows of the block that the cluster has sums of, for kMath math warpgroups. `staging` is where the
// sums lie in each CTA, `room` what nobody needs any more.
template <int kMath, class Params>
__device__ __forceinline__ void finish_sums(const Params& p, char* staging, char* room) {
  static_assert(kMath * 128 == 32 * kFinishRows);
  ClusterScheduler<Params> schedule(p);
  typename ClusterScheduler<Params>::Place at;
  if (!schedule.take(at)) return;
  const int thread = static_cast<int>(threadIdx.x) - 128;
  FinishSums& rows = *reinterpret_cast<FinishSums*>(room);
  const uint32_t base = tile::smem_addr(staging);
  const auto sums = [&](int part, int row, int col) {
    const uint32_t from = base + sums_offset(row - at.m0, (col - at.n0) / 4);
    if (p.parts > 1) return tile::ld_cluster_f32x4(from, part);
    const uint4 v = tile::ld_shared_u32x4(from);
    return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z),
                       __uint_as_float(v.w));
  };
  const int own = static_cast<int>(tile::cluster_rank());
  static_assert(kMostCodesParts <= kAtOnce);
  if (p.finish.plain) {
    finish_plain(p.finish, at.m0 + own * kFinishRows + thread / 32, kFinishRows * p.parts,
                 min(at.m0 + 128, p.finish.m), at.n0 + thread % 32 * 4, sums);
    return;
  }
#pragma unroll 1
  for (int i = own; i < 128 / kFinishRows; i += p.parts) {
    if (at.m0 + i * kFinishRows >= p.finish.m) break;
    finish_block(p.finish, rows, at.m0 / kFinishRows + i, at.n0, thread, sums,
                 [] { tile::named_barrier(kFinishBarrier, 256); });
  }
}

// ------------------------------------------------------------------------------- operands in tiles
struct ClusterParams : GemmParams, PartsOfK {
  FinishParams finish;
};

template <>
struct Schedulers<ClusterParams> {
  template <class Config>
  using Producer = ClusterScheduler<ClusterParams>;
  template <class Config>
  using Follower = ClusterScheduler<ClusterParams>;
  static __device__ __forceinline__ void run_idle_warp(const ClusterParams&) {}
};

template <class Operands>
struct ClusterConfig : GemmConfig<BlockShape<128, 6, 1, 0>, Operands, PowerOfTwoScales> {
  static constexpr bool kKeepsSums = true;
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    gemm_cluster_kernel(const __grid_constant__ ClusterParams p,
                        const __grid_constant__ CUtensorMap lhs_map,
                        const __grid_constant__ CUtensorMap rhs_map) {
  extern __shared__ __align__(1024) char raw[];
  const Smem<Config> smem(raw);
  // The 128-byte swizzle counts from there.
  if (tile::smem_addr(raw) % 1024 != 0) __trap();
  if (threadIdx.x == 0) {
    tile::tma_prefetch(&lhs_map);
    tile::tma_prefetch(&rhs_map);
    for (int s = 0; s < Config::kStages; ++s) {
      tile::mbar_init(smem.full(s), 1);
      tile::mbar_init(smem.empty(s), kArrivals * Config::kMath);
      tile::mbar_init(smem.ready(s), Config::kReady);
    }
    tile::mbar_init_fence();
  }
  __syncthreads();
  // NOTE: nothing that another kernel writes is read, and nothing written, before this.
  tile::let_dependents_start();
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
      produce<Config>(p, lhs_map, rhs_map, smem, 0);
    } else if (warp == 1) {
      prepare<Config>(p, smem, 0, static_cast<int>(threadIdx.x) % 32, [](const WorkTile&, int) {});
    }
    meet(), leave();
  } else {
    tile::registers_up<232>();
    consume<Config, EpilogueKind::sums>(
        p, lhs_map, smem, 0, __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0) - 1);
    meet();
    finish_sums<Config::kMath>(p, smem.staging(0), smem.rhs(0));
    leave();
  }
}

}  // namespace te_mx::sm90
