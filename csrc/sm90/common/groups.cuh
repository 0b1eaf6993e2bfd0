// Where groups of rows lie (te_mx/sm90_layout.h), read from device memory.
#pragma once

#include <cstdint>

#include "te_mx/sm90.h"

namespace te_mx::sm90 {

struct GroupTable {
  const void* offs;
  bool offs64;
  int count, rows, capacity;

  // What offs says of group i, forced between 0 and rows.
  __device__ __forceinline__ int read(int i) const {
    const int64_t end = offs64 ? __ldg(static_cast<const long long*>(offs) + i)
                               : __ldg(static_cast<const int*>(offs) + i);
    return static_cast<int>(max(int64_t{0}, min(end, static_cast<int64_t>(rows))));
  }

  // False for a group without rows. NOTE: where ends fall, true for one of these, too.
  __device__ __forceinline__ bool may_have_rows(int i) const {
    const int start = capacity != 0 ? i * capacity : i == 0 ? 0 : read(i - 1);
    return read(i) > start;
  }
};

inline GroupTable group_table(const Groups& g) {
  return {g.ends, !g.ends_int32, static_cast<int>(g.count), static_cast<int>(g.rows),
          static_cast<int>(g.capacity)};
}

inline bool valid(const Groups& g) {
  constexpr int64_t kMost = INT32_MAX - 256;
  return g.ends != nullptr && g.starts == nullptr && g.count > 0 && g.rows > 0 && g.capacity >= 0 &&
         g.rows <= kMost && group_tiles(g.rows, g.count) * kTile <= kMost &&
         g.capacity * g.count <= g.rows;
}

struct GroupRows {
  int group, start, end;
  __device__ __forceinline__ int size() const { return end - start; }
  __device__ __forceinline__ int first_tile() const { return start / 128 + group; }
  __device__ __forceinline__ int tiles() const { return (size() + 127) / 128; }
};

// The groups one after another, for one thread or for all of a warp alike.
class GroupCursor {
 public:
  GroupRows at{-1, 0, 0};

  // False behind the last one.
  __device__ __forceinline__ bool next(const GroupTable& table) {
    if (++at.group >= table.count) return false;
    const int end = table.read(at.group);
    if (table.capacity == 0) {
      at.start = at.end, at.end = max(at.start, end);
    } else {
      at.start = at.group * table.capacity;
      at.end = min(max(end, at.start), at.start + table.capacity);
    }
    return true;
  }
};

// Groups first ... first + 31, one a lane; `before` is the end of group first - 1, and becomes that
// of the last one. The whole warp calls it. Lanes without a group get an empty one.
template <class Table>
__device__ __forceinline__ GroupRows groups_of_lanes(const Table& table, int first, int& before) {
  const int lane = threadIdx.x % 32, i = first + lane;
  const int end = i < table.count ? table.read(i) : 0;
  if (table.capacity != 0) {
    const int start = i < table.count ? i * table.capacity : table.rows;
    return {i, start, min(max(end, start), start + table.capacity)};
  }
  int most = max(end, before);
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, most, step);
    if (lane >= step) most = max(most, other);
  }
  const int left = __shfl_up_sync(~0u, most, 1);
  const GroupRows mine{i, lane == 0 ? before : left, most};
  before = __shfl_sync(~0u, most, 31);
  return mine;
}

__device__ __forceinline__ GroupRows from_lane(const GroupRows& mine, int lane) {
  return {__shfl_sync(~0u, mine.group, lane), __shfl_sync(~0u, mine.start, lane),
          __shfl_sync(~0u, mine.end, lane)};
}

// The group that has a tile; false when none has it. The whole warp calls it.
__device__ __forceinline__ bool find_tile(const GroupTable& table, int tile, GroupRows& found) {
  int before = 0;
  for (int first = 0; first < table.count; first += 32) {
    const GroupRows mine = groups_of_lanes(table, first, before);
    const int from = mine.first_tile();
    const uint32_t has =
        __ballot_sync(~0u, mine.group < table.count && tile >= from && tile < from + mine.tiles());
    if (has != 0) {
      found = from_lane(mine, __ffs(has) - 1);
      return true;
    }
  }
  return false;
}

// Group i. The whole warp calls it.
__device__ __forceinline__ GroupRows find_group(const GroupTable& table, int i) {
  int before = 0;
  for (int first = 0;; first += 32) {
    const GroupRows mine = groups_of_lanes(table, first, before);
    if (i < first + 32) return from_lane(mine, i - first);
  }
}

}  // namespace te_mx::sm90
