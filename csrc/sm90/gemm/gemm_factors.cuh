// Policies of the main loop for operands with one fp32 factor for 1 x 128 or 128 x 128 codes
// (te_mx/sm90_layout.h): a promotion for every 128 of K, by the product of two factors.
//
//   TileFactors  rhs in blocks of 128 x 128: a thread's two rows have one product each
//   RowFactors   rhs in blocks of 1 x 128: every column has a factor of its own
//
// Factors of tiles are multiplied with each other, which is exact but for rounding unless the
// product overflows or is subnormal. Factors of columns are applied first, and then those of rows,
// so that only factors of columns may take a sum out of the range of fp32 before its end. Steps in
// which this may happen are promoted carefully.
#pragma once

#include "gemm/gemm_step.cuh"
#include "te_mx/sm90_layout.h"

namespace te_mx::sm90 {

// Starts the products of one wave in this warpgroup's turn, calls `under` while they run, and
// returns when they are done.
template <class Operands, class Turns, class Under>
__device__ __forceinline__ void multiply_wave(float (&acc)[64], uint32_t lhs, uint32_t rhs,
                                              const Turns& turns, const Under& under) {
  constexpr int kPending = Turns::kTaken ? Turns::kLeft : 0;
  turns.wait();
  tile::wgmma_pin(acc);
  tile::wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < 4; ++kk) {
    tile::wgmma_64x128x32<Operands::kLhs, Operands::kRhs>(acc, lhs + 2 * kk, rhs + 2 * kk, kk != 0);
    if (kk < 3 && kk == 3 - kPending) tile::wgmma_commit();
  }
  tile::wgmma_commit();
  __syncwarp();
  if (kPending == 4) turns.pass();
  under();
  if (kPending > 0 && kPending < 4) {
    tile::wgmma_wait<1>();
    turns.pass();
  }
  finish_products<0>(acc);
  if (kPending == 0) turns.pass();
}

// Two factors as two of about the same size: a sum times the first leaves the range of fp32 only
// where the whole product does. Powers of two go from one to the other, so nothing is rounded.
struct CarefulFactors {
  float first, second;
  __device__ __forceinline__ CarefulFactors(float a, float b) {
    const int apart = exponent(a) - exponent(b);
    const int half = max(-126, min(126, apart / 2));
    first = a * power_of_two(-half), second = b * power_of_two(half);
  }
  static __device__ __forceinline__ int exponent(float v) {
    return static_cast<int>(__float_as_uint(v) >> 23 & 0xFFu);
  }
  static __device__ __forceinline__ float power_of_two(int e) {
    return __uint_as_float(static_cast<uint32_t>(e + 127) << 23);
  }
  __device__ __forceinline__ float add(float sum, float v) const {
    return fmaf(v * first, second, sum);
  }
};

__device__ __forceinline__ bool is_normal(float v) {
  return __float_as_uint(v) - 0x00800000u < 0x7F000000u;  // and positive
}

template <int kWaves>
struct FactorStep : StepPlaces {
  uint32_t rows[2 * kWaves];  // factors of this thread's rows
  uint32_t rest;              // that of the rhs tile

  template <class Ahead>
  __device__ __forceinline__ void take(const Ahead& ahead) {
#pragma unroll
    for (int i = 0; i < 2 * kWaves; ++i) rows[i] = ahead.rows[i];
    rest = ahead.rest;
  }
  __device__ __forceinline__ float row(int i) const { return __uint_as_float(rows[i]); }
};

// What a warpgroup reads of a stage before its step.
template <int kWaves>
struct FactorsAhead {
  uint32_t rows[2 * kWaves], rest;
  __device__ __forceinline__ void read(uint32_t, uint32_t words, uint32_t rhs_at) {
    rest = tile::ld_shared_u32(rhs_at);
#pragma unroll
    for (int i = 0; i < 2 * kWaves; ++i)
      rows[i] = tile::ld_shared_u32(words + 4 * (8 * (i % 2) + 64 * (i / 2)));
  }
};

// What both policies have in common: lhs in blocks of 1 x 128.
template <int kPendingAtTurn_>
struct LhsFactors {
  static constexpr int64_t kLhsTileWords = 128;
  static constexpr int kLhsTileBytes = 4 * 128;
  static constexpr int kPendingAtTurn = kPendingAtTurn_;
  static constexpr bool kWarpsStore = false, kOwnZeros = false;
  using WavesApart = void;  // for a kernel that sends each wave of a block when it is done

  static __device__ __forceinline__ const uint32_t* lhs_scales(const uint32_t* all, int tile) {
    return all + static_cast<int64_t>(tile) * kLhsTileWords;
  }
};

// ---------------------------------------------------------------------------- rhs in 128 x 128
template <int kPendingAtTurn_>
struct TileFactors : LhsFactors<kPendingAtTurn_> {
  // Four neighbours of a tile's factor arrive with it: what the copy engine can carry.
  static constexpr int64_t kRhsTileWords = 1;
  static constexpr int kRhsTileBytes = 16;
  static constexpr bool kPrepares = false;
  static constexpr int kPreparedBytes = 0;
  template <int kWaves>
  using Step = FactorStep<kWaves>;
  template <int kWaves>
  using Ahead = FactorsAhead<kWaves>;

  static __device__ __forceinline__ const uint32_t* rhs_scales(const uint32_t* all, int tile) {
    return all + (tile & ~3);
  }
  static __device__ __forceinline__ int rhs_inside(int n_tile) { return n_tile % 4 * 4; }
  static int64_t rhs_tiles(int64_t rows) { return block_tiles(rows); }

  template <class Operands, int kWaves, class Turns, class Release, class Fetch>
  static __device__ __forceinline__ void run(float (&sum)[kWaves][64],
                                             const FactorStep<kWaves>& step, const Turns& turns,
                                             const Release& release, const Fetch& fetch) {
    float acc[64];
    const float col = __uint_as_float(step.rest);
#pragma unroll
    for (int wave = 0; wave < kWaves; ++wave) {
      const float f0 = step.row(2 * wave) * col, f8 = step.row(2 * wave + 1) * col;
      multiply_wave<Operands>(acc, step.lhs + wave * kWaveStep, step.rhs, turns, [&] {
        if (wave == kWaves - 1) fetch();
      });
      if (wave == kWaves - 1) release();
      if (__builtin_expect(__all_sync(~0u, is_normal(f0) && is_normal(f8)), true)) {
        promote_tile<0>(sum[wave], acc, f0, f8);
      } else {
        // NOTE: a row keeps its bits beside one that needs this.
        CarefulFactors row0(step.row(2 * wave), col), row8(step.row(2 * wave + 1), col);
        if (is_normal(f0)) row0.first = 1.0f, row0.second = f0;
        if (is_normal(f8)) row8.first = 1.0f, row8.second = f8;
#pragma unroll
        for (int i = 0; i < 64; ++i)
          sum[wave][i] = (i % 4 < 2 ? row0 : row8).add(sum[wave][i], acc[i]);
      }
    }
  }
};

// ------------------------------------------------------------------------------ rhs in 1 x 128
// What is prepared: factors of the columns, two halves of four for every eight, the even ones
// first, as ldmatrix gives them to the threads that have these columns; and whether the step is
// promoted carefully. NOTE: powers of two would fit bf16, half as much to read. They are no faster
// so: to unpack them takes as long.
inline constexpr int kColumnReads = 8;  // of 16 columns, four registers

__device__ __forceinline__ void read_columns(uint32_t* to, uint32_t from, int read) {
  uint32_t four[4];
  tile::ldmatrix_x4(four, from + 64 * read);
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = four[i];
}

// `acc` times the factors of columns, which are those of reads kFirst .. kEnd - 1. NOTE: a product
// of both factors would read three registers for every FFMA where this one has its factor kept, and
// registers are what promotions and the tensor cores share.
template <int kFirst, int kEnd>
__device__ __forceinline__ void scale_columns(float (&acc)[64], const uint32_t* cols) {
#pragma unroll
  for (int j = 2 * kFirst; j < 2 * kEnd; ++j) {
    const uint32_t* const two = cols + 2 * j - 4 * kFirst;
    const float even = __uint_as_float(two[0]), odd = __uint_as_float(two[1]);
    acc[4 * j] *= even, acc[4 * j + 2] *= even, acc[4 * j + 1] *= odd, acc[4 * j + 3] *= odd;
  }
}

// The same elements, to the sums; those of one row and then those of the other, or as they come.
// NOTE: of two FFMAs behind each other with one factor the second need not read it. ptxas makes use
// of that or not as the rest of the loop is: only times tell (docs/notes/hopper.md).
template <int kFirst, int kEnd, bool kByRows>
__device__ __forceinline__ void add_rows(float (&sum)[64], const float (&acc)[64], float f0,
                                         float f8) {
#pragma unroll
  for (int turn = 0; turn < (kByRows ? 2 : 1); ++turn) {
#pragma unroll
    for (int i = 8 * kFirst; i < 8 * kEnd; ++i) {
      const bool second = i % 4 >= 2;
      if (!kByRows || second == (turn == 1)) sum[i] = fmaf(acc[i], second ? f8 : f0, sum[i]);
    }
  }
}

// The same bits wherever scale_columns() loses nothing.
__device__ __forceinline__ void promote_carefully(float (&sum)[64], const float (&acc)[64],
                                                  float f0, float f8, uint32_t columns, int lane) {
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const uint32_t at = columns + 32 * j + 4 * (lane % 4);
    const float even = __uint_as_float(tile::ld_shared_u32(at)),
                odd = __uint_as_float(tile::ld_shared_u32(at + 16));
    float* const to = sum + 4 * j;
    to[0] = CarefulFactors(even, f0).add(to[0], acc[4 * j + 0]);
    to[1] = CarefulFactors(odd, f0).add(to[1], acc[4 * j + 1]);
    to[2] = CarefulFactors(even, f8).add(to[2], acc[4 * j + 2]);
    to[3] = CarefulFactors(odd, f8).add(to[3], acc[4 * j + 3]);
  }
}

// What a warpgroup of two waves reads before its step: its first wave's rows, and whether it is a
// careful one. NOTE: everything else is read while products run. One wave reads all of it then; of
// two, that takes 3 % longer, and to read both waves' rows ahead spills.
template <int kWaves>
struct RowFactorsAhead {
  uint32_t rows[2], careful;
  __device__ __forceinline__ void read(uint32_t decided_at, uint32_t words, uint32_t) {
    if (kWaves == 1) return;
    rows[0] = tile::ld_shared_u32(words), rows[1] = tile::ld_shared_u32(words + 4 * 8);
    careful = tile::ld_shared_u32(decided_at);
  }
};

template <int kWaves>
struct RowFactorStep : StepPlaces {
  RowFactorsAhead<kWaves> ahead;
  __device__ __forceinline__ void take(const RowFactorsAhead<kWaves>& from) { ahead = from; }
  // For the products of this wave to run beside.
  __device__ __forceinline__ void read(RowFactorsAhead<1>& to, int wave) const {
    if (kWaves == 1) to.careful = tile::ld_shared_u32(decided_at);
    if (kWaves == 1 || wave != 0) {
      const uint32_t words = word_of_row(lhs_words, inside) + 4 * 64 * wave;
      to.rows[0] = tile::ld_shared_u32(words), to.rows[1] = tile::ld_shared_u32(words + 4 * 8);
    }
  }
};

template <int kPendingAtTurn_, bool kByRows = false>
struct RowFactors : LhsFactors<kPendingAtTurn_> {
  static constexpr int64_t kRhsTileWords = 128;
  static constexpr int kRhsTileBytes = 4 * 128;
  static constexpr bool kPrepares = true;
  static constexpr int kPreparedBytes = 4 * 128;
  static constexpr bool kWarpsStore = true;
  using WavesApart = RowFactors<kPendingAtTurn_, true>;
  template <int kWaves>
  using Step = RowFactorStep<kWaves>;
  template <int kWaves>
  using Ahead = RowFactorsAhead<kWaves>;

  static __device__ __forceinline__ const uint32_t* rhs_scales(const uint32_t* all, int tile) {
    return all + static_cast<int64_t>(tile) * kRhsTileWords;
  }
  static __device__ __forceinline__ constexpr int rhs_inside(int) { return 0; }
  static int64_t rhs_tiles(int64_t rows) { return packed_tiles(rows); }

  // Of a factor of a column: a sum of 128 products of e5m2 is a multiple of 2^-32 below 2^39, so it
  // stays normal and finite between these.
  static constexpr uint32_t kLeastExponent = 127 - 94, kMostExponent = 127 + 87;

  static __device__ __forceinline__ void prepare(uint32_t, uint32_t rhs_words, uint32_t columns,
                                                 uint32_t decided_at, int lane) {
    const uint4 cols = tile::ld_shared_u32x4(rhs_words + 16 * lane);
    // NOTE: with its sign, a negative factor has an exponent above all of them.
    const uint32_t high = max(max(cols.x, cols.y), max(cols.z, cols.w)) >> 23,
                   low = min(min(cols.x, cols.y), min(cols.z, cols.w)) >> 23;
    const bool careful = __any_sync(~0u, high > kMostExponent || low < kLeastExponent);
    const uint32_t to = columns + 32 * (lane / 2) + 8 * (lane % 2);
    tile::st_shared_u32x2(to, cols.x, cols.z);
    tile::st_shared_u32x2(to + 16, cols.y, cols.w);
    if (lane == 0) tile::st_shared_u32(decided_at, careful ? 1u : 0u);
  }

  template <class Operands, int kWaves, class Turns, class Release, class Fetch>
  static __device__ __forceinline__ void run(float (&sum)[kWaves][64],
                                             const RowFactorStep<kWaves>& step, const Turns& turns,
                                             const Release& release, const Fetch& fetch) {
    static_assert(kWaves <= 2);
    const uint32_t columns = step.columns + 16 * (step.lane / 8);
    if constexpr (kWaves == 1) {
      run_one<Operands>(sum[0], step, columns, turns, release, fetch);
    } else {
      run_two<Operands>(sum, step, columns, turns, release, fetch);
    }
  }

  // One wave of a block's last step, as if there were no other.
  template <class Operands, int kWaves, class Turns, class Release>
  static __device__ __forceinline__ void run_wave(float (&sum)[64],
                                                  const RowFactorStep<kWaves>& step, int wave,
                                                  const Turns& turns, const Release& release) {
    RowFactorStep<1> one;
    static_cast<StepPlaces&>(one) = step;
    one.lhs += wave * kWaveStep, one.inside += wave * 64;
    const uint32_t columns = step.columns + 16 * (step.lane / 8);
    run_one<Operands>(sum, one, columns, turns, release, [] {});
  }

 private:
  template <class Operands, class Turns, class Release, class Fetch>
  static __device__ __forceinline__ void run_one(float (&sum)[64], const RowFactorStep<1>& step,
                                                 uint32_t columns, const Turns& turns,
                                                 const Release& release, const Fetch& fetch) {
    float acc[64];
    uint32_t left[16], right[16];  // the right half in registers of what has been used
    RowFactorsAhead<1> now;
    multiply_wave<Operands>(acc, step.lhs, step.rhs, turns, [&] {
      step.read(now, 0);
#pragma unroll
      for (int i = 0; i < 4; ++i) read_columns(left + 4 * i, columns, i);
    });
    const float f0 = __uint_as_float(now.rows[0]), f8 = __uint_as_float(now.rows[1]);
    if (__builtin_expect(now.careful == 0, true)) {
      scale_columns<0, 1>(acc, left), read_columns(right, columns, 4);
      scale_columns<1, 2>(acc, left + 4), read_columns(right + 4, columns, 5);
      scale_columns<2, 3>(acc, left + 8), read_columns(right + 8, columns, 6);
      scale_columns<3, 4>(acc, left + 12), read_columns(right + 12, columns, 7);
      add_rows<0, 4, kByRows>(sum, acc, f0, f8);
      // NOTE: behind the promotion this would be what the next products wait for, and before it the
      // next stage may not be there.
      fetch();
      scale_columns<4, 8>(acc, right);
      add_rows<4, 8, kByRows>(sum, acc, f0, f8);
      release();
    } else {
      promote_carefully(sum, acc, f0, f8, step.columns, step.lane);
      release();
      fetch();
    }
  }

  // Two waves, for which most of the columns' factors are read once: shared memory has little time
  // left. The last ones do not fit beside the accumulators. They are read in each promotion, once
  // accumulators are used up.
  static constexpr int kKept = 7;  // of the reads
  template <class Operands, class Turns, class Release, class Fetch>
  static __device__ __forceinline__ void run_two(float (&sum)[2][64], const RowFactorStep<2>& step,
                                                 uint32_t columns, const Turns& turns,
                                                 const Release& release, const Fetch& fetch) {
    float acc[64];
    uint32_t kept[4 * kKept];
    const auto read_kept = [&] {
#pragma unroll
      for (int i = 0; i < kKept; ++i) read_columns(kept + 4 * i, columns, i);
    };
    RowFactorsAhead<1> now{{step.ahead.rows[0], step.ahead.rows[1]}, step.ahead.careful};
    const bool careful = now.careful != 0;
#pragma unroll
    for (int wave = 0; wave < 2; ++wave) {
      multiply_wave<Operands>(acc, step.lhs + wave * kWaveStep, step.rhs, turns, [&] {
        if (wave == 0) read_kept();
        step.read(now, wave);
        if (wave == 1) fetch();
      });
      const float f0 = __uint_as_float(now.rows[0]), f8 = __uint_as_float(now.rows[1]);
      if (__builtin_expect(!careful, true)) {
        uint32_t late[4];
        static_assert(kKept == kColumnReads - 1);
        read_columns(late, columns, kKept);
        scale_columns<0, 4>(acc, kept);
        add_rows<0, 4, kByRows>(sum[wave], acc, f0, f8);
        scale_columns<4, kKept>(acc, kept + 16);
        scale_columns<kKept, kColumnReads>(acc, late);
        if (wave == 1) release();
        add_rows<4, 8, kByRows>(sum[wave], acc, f0, f8);
      } else {
        promote_carefully(sum[wave], acc, f0, f8, step.columns, step.lane);
        // NOTE: again, so that nothing is kept during this.
        if (wave == 0) read_kept();
        if (wave == 1) release();
      }
    }
  }
};

}  // namespace te_mx::sm90
