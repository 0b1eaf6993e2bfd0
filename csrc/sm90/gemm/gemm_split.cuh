// The GEMM with K cut into parts, for problems with too few blocks to fill the chip. Every part of
// every block is a block of its own, whose sums go to global memory in fp32, [parts, rows, pitch];
// a second kernel (split_finish.cu) adds the parts up in order and applies the epilogue.
#pragma once

#include "common/shares.cuh"
#include "gemm/gemm_kernel.cuh"

namespace te_mx::sm90 {

// `epilogue` describes the sums of all parts as one matrix.
struct SplitParams : GemmParams {
  int parts;
  Shares steps;  // of each of them
  int m, rows;   // rows of D, and of the sums of one part: whole waves
};

// Part by part, so that what runs at one time reads the same K.
template <class Config>
class SplitScheduler {
 public:
  static constexpr bool kDynamic = false;
  static_assert(Config::kCluster == 1 && Config::kLhsTiles == 1);
  __device__ __forceinline__ explicit SplitScheduler(const SplitParams& p)
      : p_(p), index_(blockIdx.x) {}
  __device__ __forceinline__ SplitScheduler(const SplitParams& p, const Smem<Config>&)
      : SplitScheduler(p) {}

  // For the producer: false behind the last block.
  __device__ __forceinline__ bool next(TileSources& from, const Smem<Config>&,
                                       const Ring<Config::kStages>&, int) {
    Place at;
    if (!take(at)) return false;
    from.m_row = at.block.m * Config::kM, from.n_row = at.block.n * 128, from.k0 = at.first * 128;
    from.lhs_tile = from.m_row / 128 + at.first * p_.lhs_tiles;
    from.rhs_tile = at.block.n + at.first * p_.rhs_tiles;
    from.second = 1;
    from.k_steps = at.end - at.first;
    return true;
  }
  __device__ __forceinline__ void finish(const Smem<Config>&, const Ring<Config::kStages>&) {}

  // For the others.
  __device__ __forceinline__ void await(uint64_t*, uint32_t) {}
  __device__ __forceinline__ bool next(WorkTile& work, const Smem<Config>&) {
    Place at;
    if (!take(at)) return false;
    const int before = at.part * p_.rows;
    work.m0 = before + at.block.m * Config::kM, work.m_end = before + p_.m;
    work.n0 = at.block.n * 128;
    work.k_steps = at.end - at.first;
    work.inside = Config::kM == 64 ? (at.block.m & 1) * 64 : 0;
    work.group = 0;
    return true;
  }

 private:
  struct Place {
    Block block;
    int part, first, end;  // its steps of K
  };

  __device__ __forceinline__ bool take(Place& at) {
    const int blocks = p_.m_blocks * p_.n_blocks;
    at.part = index_ / blocks;
    if (at.part >= p_.parts) return false;
    at.block = block_at(p_, p_.m_blocks, index_ - at.part * blocks);
    at.first = p_.steps.begin(at.part), at.end = p_.steps.begin(at.part + 1);
    index_ += gridDim.x;
    return true;
  }

  const SplitParams& p_;
  int index_;
};

template <>
struct Schedulers<SplitParams> {
  template <class Config>
  using Producer = SplitScheduler<Config>;
  template <class Config>
  using Follower = SplitScheduler<Config>;
  static __device__ __forceinline__ void run_idle_warp(const SplitParams&) {}
};

}  // namespace te_mx::sm90
