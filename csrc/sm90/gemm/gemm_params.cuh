// What one GEMM launch knows, passed by value, and the order in which tiles are computed.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "te_mx/sm90.h"

namespace te_mx::sm90 {

// The [M, N] array beside D that goes through the copy engine: 16-bit, of rows of whole 16 bytes,
// as D is then.
enum class SideTensor : int { none = 0, aux = 1, gelu_in = 2 };

struct EpilogueParams {
  void* out;
  int64_t ldo;
  const void* bias;
  void* aux;
  const void* gelu_in;
  float* bias_grad;  // partial sums [ceil(M/64), N]
  DType out_dtype, bias_dtype, aux_dtype, gelu_in_dtype;
  Gelu gelu;
  SideTensor side;
  bool accumulate;
  bool bias_words;  // the bias may be copied by words of 4 bytes
  bool direct;      // out cannot be described by a tensor map: stores go element by element
  bool by_element;  // direct, or D is 16-bit and is added to what is there
  int m, n;
};

// Division of 0 .. 2^31 - 1 by a number that the host knows: on the device three instructions,
// where an ordinary one takes some 150 cycles.
struct Divider {
  uint32_t factor, shift;
  Divider() = default;
  __host__ explicit Divider(int64_t by) : shift(31) {
    while ((int64_t{1} << (shift - 31)) < by) ++shift;
    factor = static_cast<uint32_t>(((uint64_t{1} << shift) + by - 1) / by);
  }
  __device__ __forceinline__ int divide(int n) const {
    return static_cast<int>(static_cast<uint64_t>(static_cast<uint32_t>(n)) * factor >> shift);
  }
};

// How the blocks of D, and K, are shared out among CTAs (gemm_scheduler.cuh):
//   whole    a block at a time with all of its K
//   split    a block and a part of its K, part by part, so that what runs at one time reads the
//            same K; the sums of all parts are one tall matrix
//   cluster  the CTAs of a cluster have a part each
//   groups   as the ends of groups say, in device memory (gemm_grouped.cuh)
enum class ScheduleKind { whole, split, cluster, groups };
// Rows of a block, and CTAs that have neighbouring columns.
template <class Params, int kM = 128, int kCluster = 1>
class Scheduler;

struct GemmParams {
  static constexpr int kAllRows = 1 << 30;
  static constexpr ScheduleKind kSchedule = ScheduleKind::whole;
  const uint32_t* lhs_scales;
  const uint32_t* rhs_scales;
  int lhs_tiles, rhs_tiles;  // scale tiles of one step along K
  int k_steps;               // ceil(K / 128)
  int lhs_rows, rhs_rows;    // of codes, or kAllRows: boxes are asked for as a whole
  bool rhs_stands;           // nobody writes it: it is read while the kernels before still run
  int m_blocks, n_blocks;    // of what a cluster computes at once
  int group;                 // blocks along M that are walked together
  // By the blocks of a group, and by those of one column in it or in the last group.
  Divider per_group, per_column, per_last_column;
  EpilogueParams epilogue;

  __host__ void walk_in_groups_of(int rows) {
    group = rows;
    per_group = Divider(static_cast<int64_t>(rows) * n_blocks), per_column = Divider(rows);
    per_last_column = Divider(m_blocks % rows == 0 ? rows : m_blocks % rows);
  }
};

struct Block {
  int m, n;
};

// Groups of `group` block rows, walked column by column: what runs at one time is nearly square, so
// the operands of a wave stay in L2.
__device__ __forceinline__ Block block_at(const GemmParams& p, int m_blocks, int index) {
  const int group = p.per_group.divide(index), first = group * p.group;
  const int inside = index - group * (p.group * p.n_blocks);
  const bool whole = first + p.group <= m_blocks;
  const int rows = whole ? p.group : m_blocks - first;
  int column;
  if (whole || m_blocks == p.m_blocks) {
    column = (whole ? p.per_column : p.per_last_column).divide(inside);
  } else {
    column = inside / rows;
  }
  return {first + inside - column * rows, column};
}

// Threads of a math warpgroup that say that it is done with something, and of a warp that prepares
// stages. NOTE: compute-sanitizer does not see that __syncwarp orders what a warp reads and writes
// before the arrival of one lane.
#ifdef TE_MX_RACECHECK
inline constexpr int kArrivals = 128, kPrepared = 32;
#else
inline constexpr int kArrivals = 4, kPrepared = 1;
#endif

// What the producer must know of a block: where its operands lie in theirs.
struct TileSources {
  int m_row, n_row, k0;    // first elements of the codes
  int lhs_tile, rhs_tile;  // scale tiles of the first step
  int second;              // tiles from the first lhs tile to the second one
  int k_steps;
};

// What the math warpgroups must know of it.
struct WorkTile {
  int m0, m_end;  // its first row in D, and the row that it must end before
  int n0;         // first column of the cluster
  int k_steps;
  int inside;  // where m0 lies in its scale tile
  int group;   // whose bias is added
};

}  // namespace te_mx::sm90
