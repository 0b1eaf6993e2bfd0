// Which rows of x meet which matrix of weights: blocks of at most `most` rows as they lie, or of
// groups of rows, one matrix each, and then those of the rows behind all groups.
#pragma once

#include <cstdint>

#include "common/groups.cuh"

namespace te_mx::sm90 {

struct DecodeBlock {
  int first = 0;
  int count = 0;
  int group = 0;  // its matrix of weights; -1: rows of no group, of which out is 0
};

struct DecodeRows : DecodeBlock {
  int m = 0;            // of x
  int most = 0;         // of a block
  GroupTable groups{};  // count 0: one matrix

  // Whether the block is known before the kernels that this one follows have finished: its weights
  // are asked for at once.
  __device__ __forceinline__ bool early() const { return groups.count == 0; }

  // By whole warps, before the rest. False: there is no such block.
  __device__ __forceinline__ bool begin(int block) {
    if (early()) return take(block * most, m);
    const int lane = threadIdx.x % 32;
    int before = 0;  // where the next group begins
    // NOTE: each step needs the one before it, but no load does.
    constexpr int kAhead = 4;
    for (int first_group = 0; first_group < groups.count; first_group += 32 * kAhead) {
      int ends[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const int i = first_group + 32 * j + lane;
        ends[j] = i < groups.count ? end_of(i) : 0;
      }
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const GroupRows mine = groups_of_lanes(Loaded{groups.count, groups.rows, 0, ends[j]},
                                               first_group + 32 * j, before);
        const int own = (mine.size() + most - 1) / most;
        int all = own;  // blocks up to this group
#pragma unroll
        for (int i = 1; i < 32; i *= 2) {
          const int other = __shfl_up_sync(~0u, all, i);
          if (lane >= i) all += other;
        }
        const uint32_t found = __ballot_sync(~0u, all > block && all - own <= block);
        if (found != 0) {
          const int from = __ffs(found) - 1;
          const GroupRows at = from_lane(mine, from);
          group = at.group;
          const int inside = block - __shfl_sync(~0u, all - own, from);
          return take(at.start + inside * most, at.end);
        }
        block -= __shfl_sync(~0u, all, 31);
      }
    }
    group = -1;
    return take(before + block * most, m);
  }

 private:
  // A GroupTable of ends that lanes have.
  struct Loaded {
    int count, rows, capacity, end;
    __device__ __forceinline__ int read(int) const { return end; }
  };

  // NOTE: a kernel that started early may have what was there before in L1.
  __device__ __forceinline__ int end_of(int i) const {
    const int64_t end = groups.offs64 ? __ldcg(static_cast<const long long*>(groups.offs) + i)
                                      : __ldcg(static_cast<const int*>(groups.offs) + i);
    return static_cast<int>(max(int64_t{0}, min(end, static_cast<int64_t>(groups.rows))));
  }

  __device__ __forceinline__ bool take(int from, int end) {
    first = from, count = min(end - from, most);
    return count > 0;
  }
};

}  // namespace te_mx::sm90
