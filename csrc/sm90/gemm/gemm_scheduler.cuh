// Which blocks of D, and which steps of K of each, a CTA of the GEMM computes: one type, which each
// role of a CTA walks for itself. What it does follows from the parameters of the kernel.
#pragma once

#include "common/shares.cuh"
#include "gemm/gemm_config.cuh"
#include "mxtile/sm90/cluster.cuh"

namespace te_mx::sm90 {

// The schedule of a kernel with these parameters.
template <class Config, class Params>
using ScheduleOf = Scheduler<Params, Config::kM, Config::kCluster>;

// The kinds but `groups`: clusters take blocks of a fixed grid in turn.
template <class Params, int kM, int kCluster>
class Scheduler {
  static constexpr ScheduleKind kKind = Params::kSchedule;
  static_assert(kKind == ScheduleKind::whole || (kCluster == 1 && kM <= 128));

 public:
  static constexpr bool kDynamic = false;  // whether the producer tells the others
  struct Place {
    Block block;
    int part, first, end;  // steps of K
    __device__ __forceinline__ int m0() const { return block.m * kM; }
    __device__ __forceinline__ int n0() const { return block.n * kCluster * 128; }
  };

  __device__ __forceinline__ explicit Scheduler(const Params& p)
      : p_(p), index_(blockIdx.x / kCluster) {
    if constexpr (kKind == ScheduleKind::cluster) {
      index_ = static_cast<int>(tile::cluster_index());
      const int part = static_cast<int>(tile::cluster_rank());
      first_ = p.k.steps.begin(part), end_ = p.k.steps.begin(part + 1);
    }
  }
  template <class Smem>
  __device__ __forceinline__ Scheduler(const Params& p, const Smem&) : Scheduler(p) {}

  // The next block; false behind the last one.
  __device__ __forceinline__ bool take(Place& at) {
    const int blocks = p_.m_blocks * p_.n_blocks;
    int index = index_;
    if constexpr (kKind == ScheduleKind::split) {
      at.part = index_ / blocks;
      if (at.part >= p_.k.parts) return false;
      index -= at.part * blocks;
    } else {
      if (index >= blocks) return false;
    }
    at.block = block_at(p_, p_.m_blocks, index);
    if constexpr (kKind == ScheduleKind::whole) {
      at.first = 0, at.end = p_.k_steps;
    } else if constexpr (kKind == ScheduleKind::cluster) {
      at.first = first_, at.end = end_;
    } else {
      at.first = p_.k.steps.begin(at.part), at.end = p_.k.steps.begin(at.part + 1);
    }
    if constexpr (kKind == ScheduleKind::cluster) {
      index_ += static_cast<int>(tile::cluster_count());
    } else {
      index_ += gridDim.x / kCluster;
    }
    return true;
  }

  // For the producer.
  template <class Smem, class Ring>
  __device__ __forceinline__ bool next(TileSources& from, const Smem&, const Ring&, int rank) {
    Place at;
    if (!take(at)) return false;
    const int m0 = at.m0(), n_tile = at.block.n * kCluster + rank, lhs_tile = m0 / 128;
    from.m_row = m0, from.n_row = n_tile * 128, from.k0 = at.first * 128;
    from.lhs_tile = lhs_tile + at.first * p_.lhs_tiles;
    // NOTE: the last block of an odd number of tiles has no tile for rank 1; the packing pads to an
    // even number.
    from.rhs_tile = n_tile + at.first * p_.rhs_tiles;
    // NOTE: 192 rows may end in a tile that does not exist; nothing of it is stored.
    from.second = lhs_tile + 1 < p_.lhs_tiles ? 1 : 0;
    from.k_steps = at.end - at.first;
    return true;
  }
  template <class Smem, class Ring>
  __device__ __forceinline__ void finish(const Smem&, const Ring&) {}

  // For the others, who await the first stage of a block where they need it to know the block.
  __device__ __forceinline__ void await(uint64_t*, uint32_t) {}
  template <class Smem>
  __device__ __forceinline__ bool next(WorkTile& work, const Smem&) {
    Place at;
    if (!take(at)) return false;
    if constexpr (kKind == ScheduleKind::split) {
      const int before = at.part * p_.rows;
      work.m0 = before + at.m0(), work.m_end = before + p_.m;
    } else {
      work.m0 = at.m0(), work.m_end = p_.epilogue.m;
    }
    work.n0 = at.n0();
    work.k_steps = at.end - at.first, work.group = 0;
    work.inside = kM % 128 == 64 ? (at.block.m & 1) * 64 : 0;
    return true;
  }

  // What an idle warp does meanwhile.
  static __device__ __forceinline__ void run_idle_warp(const Params&) {}

 private:
  const Params& p_;
  int index_, first_ = 0, end_ = 0;
};

}  // namespace te_mx::sm90
