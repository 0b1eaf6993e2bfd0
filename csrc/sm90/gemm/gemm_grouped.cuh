// The GEMM on groups: blocks of all groups in one persistent launch, with the ends of the groups
// read from device memory. Who owns which block depends on them, so the producer alone walks the
// groups, and leaves what it found in shared memory before it announces the first stage of a block.
//
// Both ways to group take the same blocks:
//   rows  group i has ceil(rows / kM) block rows; its tiles start at its first row
//   K     every group has the same blocks, and steps of its own along K; a group without any has no
//         blocks
//
// Meanwhile an idle warp writes the zeros: rows of no group, products of groups without rows.
#pragma once

#include "common/groups.cuh"
#include "gemm/gemm_kernel.cuh"

namespace te_mx::sm90 {

struct GroupedParams : GemmParams {
  static constexpr ScheduleKind kSchedule = ScheduleKind::groups;
  GroupTable groups;
  bool along_k;
  int rows, columns;  // of one D along K, of one rhs
  // Weights of 4 bits that stand still (gemm_standing.cuh): blocks of 64 rows of one of them, and
  // codes; rhs_scales are bytes.
  int blocks;
  const uint8_t* codes;
  bool placed;  // along K: D of group i begins at first_rows[i], not behind the one before
  int first_rows[kMostPlaces];

  __device__ __forceinline__ int first_row(int group) const {
    return placed ? first_rows[group] : group * rows;
  }
};

// Rows of D of no group become zero, and so do products of groups without rows; CTAs take turns.
// One warp calls it.
__device__ __forceinline__ void zero_the_rest(const GroupedParams& p) {
  const EpilogueParams& e = p.epilogue;
  if (e.accumulate) return;
  const int lane = threadIdx.x % 32, width = e.out_dtype == DType::f32 ? 4 : 2;
  const int bytes = e.n * width, vectors = e.direct ? 0 : bytes / 16;
  GroupCursor cursor;
  int done = 0;
  for (bool more = true; more;) {
    more = cursor.next(p.groups);
    const GroupRows& at = cursor.at;
    int from = done, to = more ? at.start : p.groups.rows;
    if (p.along_k) {
      from = to = 0;
      if (more && at.size() == 0) from = p.first_row(at.group), to = from + p.rows;
    }
    done = at.end;
#pragma unroll 1
    for (int row = from + static_cast<int>(blockIdx.x); row < to; row += gridDim.x) {
      char* const row_at = static_cast<char*>(e.out) + static_cast<int64_t>(row) * e.ldo * width;
#pragma unroll 1
      for (int i = lane; i < vectors; i += 32)
        reinterpret_cast<uint4*>(row_at)[i] = make_uint4(0, 0, 0, 0);
#pragma unroll 1
      for (int i = 16 * vectors + 2 * lane; i < bytes; i += 64)
        *reinterpret_cast<uint16_t*>(row_at + i) = 0;
    }
  }
}

// Walked by the producer, a warp; the others read what it left, and `await` before every `next`.
//
// NOTE: what is read from memory passes through a shuffle, so that the compiler knows it to be the
// same in all lanes. One `next` that waited at the head of the loop would keep it from seeing that
// all lanes do the same; the ring then takes registers that are not there.
template <int kM, int kCluster>
class Scheduler<GroupedParams, kM, kCluster> {
 public:
  static constexpr bool kDynamic = true;
  __device__ __forceinline__ explicit Scheduler(const GroupedParams& p)
      : p_(p), index_(static_cast<int>(blockIdx.x) / kCluster) {}
  template <class Smem>
  __device__ __forceinline__ Scheduler(const GroupedParams& p, const Smem&) : Scheduler(p) {}

  // The next block; false behind the last one.
  __device__ __forceinline__ bool take(TileSources& from, WorkTile& work, int rank) {
    GroupRows& at = cursor_.at;
    for (int blocks; index_ >= (blocks = m_blocks(at) * p_.n_blocks); index_ -= blocks) {
      if (!cursor_.next(p_.groups)) return false;
      at.start = __shfl_sync(~0u, at.start, 0), at.end = __shfl_sync(~0u, at.end, 0);
    }
    const Block block = block_at(p_, m_blocks(at), index_);
    index_ += static_cast<int>(gridDim.x) / kCluster;
    const int m0 = block.m * kM, n_tile = block.n * kCluster + rank;
    from.lhs_tile = m0 / 128, from.rhs_tile = n_tile;
    work.n0 = block.n * kCluster * 128, work.inside = m0 % 128, work.group = at.group;
    if (p_.along_k) {
      from.m_row = m0, from.n_row = n_tile * 128, from.k0 = at.first_tile() * 128;
      from.second = from.lhs_tile + 1 < p_.lhs_tiles ? 1 : 0;
      from.k_steps = at.tiles();
      from.lhs_tile += at.first_tile() * p_.lhs_tiles;
      from.rhs_tile += at.first_tile() * p_.rhs_tiles;
      const int first = p_.first_row(at.group);
      work.m0 = first + m0, work.m_end = first + p_.rows;
    } else {
      from.m_row = at.start + m0, from.n_row = at.group * p_.columns + n_tile * 128, from.k0 = 0;
      from.second = from.lhs_tile + 1 < at.tiles() ? 1 : 0;
      from.k_steps = p_.k_steps;
      from.lhs_tile += at.first_tile();
      from.rhs_tile += at.group * p_.k_steps * p_.rhs_tiles;
      work.m0 = from.m_row, work.m_end = at.end;
    }
    work.k_steps = from.k_steps;
    return true;
  }
  template <class Config>
  __device__ __forceinline__ bool next(TileSources& from, const Smem<Config>& smem,
                                       const Ring<Config::kStages>& ring, int rank) {
    WorkTile work;
    return next(from, work, smem, ring, rank);
  }
  template <class Config>
  __device__ __forceinline__ bool next(TileSources& from, WorkTile& work, const Smem<Config>& smem,
                                       const Ring<Config::kStages>& ring, int rank) {
    if (!take(from, work, rank)) return false;
    publish(smem, ring, work);
    return true;
  }

  // Says that no block follows, with a stage that brings nothing and needs no preparation.
  template <class Config>
  __device__ __forceinline__ void finish(const Smem<Config>& smem,
                                         const Ring<Config::kStages>& ring) {
    publish(smem, ring, WorkTile{});
    if (tile::elect_one()) {
      tile::mbar_arrive(smem.full(ring.stage));
#pragma unroll
      for (int i = 0; i < Config::kReady; ++i) tile::mbar_arrive(smem.ready(ring.stage));
    }
    __syncwarp();
  }

  // The first stage of the next block.
  __device__ __forceinline__ void await(uint64_t* stage, uint32_t phase) {
    tile::mbar_wait(stage, phase);
  }
  template <class Config>
  __device__ __forceinline__ bool next(WorkTile& work, const Smem<Config>& smem) {
    const uint32_t at = tile::smem_addr(smem.work(count_++));
    const auto word = [&](int i) { return static_cast<int>(tile::ld_shared_u32(at + 4 * i)); };
    work = {word(0), word(1), word(2), word(3), word(4), word(5)};
    return work.k_steps != 0;
  }

  static __device__ __forceinline__ void run_idle_warp(const GroupedParams& p) { zero_the_rest(p); }

 private:
  __device__ __forceinline__ int m_blocks(const GroupRows& at) const {
    const int size = at.size();
    return p_.along_k ? (size > 0 ? p_.m_blocks : 0) : (size + kM - 1) / kM;
  }

  // Says what the next block is. NOTE: once its first stage is free, everyone is at most kStages
  // blocks behind, and reads none that is overwritten.
  template <class Config>
  __device__ __forceinline__ void publish(const Smem<Config>& smem,
                                          const Ring<Config::kStages>& ring, const WorkTile& work) {
    tile::mbar_wait_asleep(smem.empty(ring.stage), ring.phase ^ 1);
    if (tile::elect_one()) *smem.work(count_) = work;
    __syncwarp();
    ++count_;
  }

  const GroupedParams& p_;
  GroupCursor cursor_;
  int index_;      // of the next block, from the first of the cursor's group on
  int count_ = 0;  // of blocks so far
};

}  // namespace te_mx::sm90
