// Policies of the main loop for operands with one fp32 factor for 1 x 128 or 128 x 128 codes
// (te_mx/sm90_layout.h): a promotion for every 128 of K, by the product of two factors.
//
//   TileFactors  rhs in blocks of 128 x 128: a thread's two rows have one product each
//   RowFactors   rhs in blocks of 1 x 128: every column has a factor of its own
//
// A product of two factors is a number of fp32 unless it overflows or is subnormal. Steps in which
// one may be are promoted carefully: they apply one factor after the other.
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
struct FactorStep {
  uint32_t lhs, rhs;              // descriptors
  uint32_t lhs_words, rhs_words;  // shared addresses of the factors
  uint32_t columns;               // what was prepared
  int lane;
  uint32_t rows[2 * kWaves];  // factors of this thread's rows
  uint32_t rest;              // that of the rhs tile, or what was decided

  template <class Ahead>
  __device__ __forceinline__ void take(const Ahead& ahead) {
#pragma unroll
    for (int i = 0; i < 2 * kWaves; ++i) rows[i] = ahead.rows[i];
    rest = ahead.rest;
  }
  __device__ __forceinline__ float row(int i) const { return __uint_as_float(rows[i]); }
};

// What a warpgroup reads of a stage before its step; kPrepared: whether that was prepared.
template <int kWaves, bool kPrepared>
struct FactorsAhead {
  uint32_t rows[2 * kWaves], rest;
  __device__ __forceinline__ void read(uint32_t decided_at, uint32_t words, uint32_t rhs_at) {
    rest = tile::ld_shared_u32(kPrepared ? decided_at : rhs_at);
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
  template <int kWaves>
  using Step = FactorStep<kWaves>;

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
  using Ahead = FactorsAhead<kWaves, false>;

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
        const CarefulFactors row0(step.row(2 * wave), col), row8(step.row(2 * wave + 1), col);
#pragma unroll
        for (int i = 0; i < 64; ++i)
          sum[wave][i] = (i % 4 < 2 ? row0 : row8).add(sum[wave][i], acc[i]);
      }
    }
  }
};

// ------------------------------------------------------------------------------ rhs in 1 x 128
// What is prepared: factors of the columns, two halves of four for every eight, the even ones
// first, as ldmatrix gives them to the threads that have these columns (load_columns); and whether
// the step is promoted carefully. NOTE: powers of two would fit bf16, half as much to read. They
// are no faster so: to unpack them takes as long.
// Four elements of two neighbouring columns. NOTE: in this order the compiler reads a factor of
// both rows once.
__device__ __forceinline__ void promote_four(float* to, const float* acc, float f0, float f8,
                                             uint32_t even_bits, uint32_t odd_bits) {
  const float even = __uint_as_float(even_bits), odd = __uint_as_float(odd_bits);
  to[0] = fmaf(acc[0], f0 * even, to[0]);
  to[2] = fmaf(acc[2], f8 * even, to[2]);
  to[3] = fmaf(acc[3], f8 * odd, to[3]);
  to[1] = fmaf(acc[1], f0 * odd, to[1]);
}

// `left` has the factors of the left half of the columns.
__device__ __forceinline__ void promote_rows(float (&sum)[64], const float (&acc)[64], float f0,
                                             float f8, const uint32_t (&left)[16], uint32_t columns,
                                             int lane) {
  uint32_t right[16];  // in registers of what has been used
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    promote_four(sum + 4 * j, acc + 4 * j, f0, f8, left[2 * j], left[2 * j + 1]);
    if (j >= 4) continue;
    uint32_t four[4];
    tile::ldmatrix_x4(four, columns + 256 + 16 * (4 * j + lane / 8));
#pragma unroll
    for (int i = 0; i < 4; ++i) right[4 * j + i] = four[i];
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    promote_four(sum + 32 + 4 * j, acc + 32 + 4 * j, f0, f8, right[2 * j], right[2 * j + 1]);
  }
}

__device__ __forceinline__ void promote_carefully(float (&sum)[64], const float (&acc)[64],
                                                  float f0, float f8, uint32_t columns, int lane) {
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const uint32_t at = columns + 32 * j + 4 * (lane % 4);
    const float even = __uint_as_float(tile::ld_shared_u32(at)),
                odd = __uint_as_float(tile::ld_shared_u32(at + 16));
    float* const to = sum + 4 * j;
    to[0] = CarefulFactors(f0, even).add(to[0], acc[4 * j + 0]);
    to[1] = CarefulFactors(f0, odd).add(to[1], acc[4 * j + 1]);
    to[2] = CarefulFactors(f8, even).add(to[2], acc[4 * j + 2]);
    to[3] = CarefulFactors(f8, odd).add(to[3], acc[4 * j + 3]);
  }
}

template <int kPendingAtTurn_>
struct RowFactors : LhsFactors<kPendingAtTurn_> {
  static constexpr int64_t kRhsTileWords = 128;
  static constexpr int kRhsTileBytes = 4 * 128;
  static constexpr bool kPrepares = true;
  static constexpr int kPreparedBytes = 4 * 128;
  template <int kWaves>
  using Ahead = FactorsAhead<kWaves, true>;

  static __device__ __forceinline__ const uint32_t* rhs_scales(const uint32_t* all, int tile) {
    return all + static_cast<int64_t>(tile) * kRhsTileWords;
  }
  static __device__ __forceinline__ constexpr int rhs_inside(int) { return 0; }
  static int64_t rhs_tiles(int64_t rows) { return packed_tiles(rows); }

  static __device__ __forceinline__ void prepare(uint32_t lhs_words, uint32_t rhs_words,
                                                 uint32_t columns, uint32_t decided_at, int lane) {
    const uint4 rows = tile::ld_shared_u32x4(lhs_words + 16 * lane);
    const uint4 cols = tile::ld_shared_u32x4(rhs_words + 16 * lane);
    // Exponents of the largest and the smallest product; a factor that is not normal, or is
    // negative, takes one of them out of range.
    const uint32_t high = __reduce_max_sync(~0u, max(max(rows.x, rows.y), max(rows.z, rows.w))),
                   low = __reduce_min_sync(~0u, min(min(rows.x, rows.y), min(rows.z, rows.w)));
    const uint32_t col_high = max(max(cols.x, cols.y), max(cols.z, cols.w)),
                   col_low = min(min(cols.x, cols.y), min(cols.z, cols.w));
    const bool careful = __any_sync(~0u, (high >> 23) + (col_high >> 23) + 1 > 254 + 127 ||
                                             (low >> 23) + (col_low >> 23) < 1 + 127 ||
                                             low >> 23 == 0 || col_low >> 23 == 0);
    const uint32_t to = columns + 32 * (lane / 2) + 8 * (lane % 2);
    tile::st_shared_u32x2(to, cols.x, cols.z);
    tile::st_shared_u32x2(to + 16, cols.y, cols.w);
    if (lane == 0) tile::st_shared_u32(decided_at, careful ? 1u : 0u);
  }

  template <class Operands, int kWaves, class Turns, class Release, class Fetch>
  static __device__ __forceinline__ void run(float (&sum)[kWaves][64],
                                             const FactorStep<kWaves>& step, const Turns& turns,
                                             const Release& release, const Fetch& fetch) {
    static_assert(kWaves <= 2);
    if constexpr (kWaves == 2) {
      run_two<Operands>(sum, step, turns, release, fetch);
    } else {
      float acc[64];
      uint32_t left[16];
      const float f0 = step.row(0), f8 = step.row(1);
      multiply_wave<Operands>(acc, step.lhs, step.rhs, turns,
                              [&] { load_columns(left, step.columns, step.lane); });
      if (__builtin_expect(step.rest == 0, true)) {
        promote_rows(sum[0], acc, f0, f8, left, step.columns, step.lane);
      } else {
        promote_carefully(sum[0], acc, f0, f8, step.columns, step.lane);
      }
      release();
      fetch();
    }
  }

 private:
  // Two waves, for which most of the columns' factors are read once: shared memory has little time
  // left. The last ones do not fit beside the accumulators. They are read in each promotion, once
  // accumulators are used up.
  static constexpr int kKept = 24;  // registers, four for 16 columns
  template <class Operands, class Turns, class Release, class Fetch>
  static __device__ __forceinline__ void run_two(float (&sum)[2][64], const FactorStep<2>& step,
                                                 const Turns& turns, const Release& release,
                                                 const Fetch& fetch) {
    float acc[64];
    uint32_t kept[kKept];
    const uint32_t columns = step.columns + 16 * (step.lane / 8);
    const auto read = [&](uint32_t* to, int first) {
      uint32_t four[4];
      tile::ldmatrix_x4(four, columns + 16 * first);
#pragma unroll
      for (int i = 0; i < 4; ++i) to[i] = four[i];
    };
    const auto read_kept = [&] {
#pragma unroll
      for (int i = 0; i < kKept; i += 4) read(kept + i, i);
    };
#pragma unroll
    for (int wave = 0; wave < 2; ++wave) {
      const float f0 = step.row(2 * wave), f8 = step.row(2 * wave + 1);
      multiply_wave<Operands>(acc, step.lhs + wave * kWaveStep, step.rhs, turns, [&] {
        if (wave == 0) read_kept();
      });
      if (__builtin_expect(step.rest == 0, true)) {
        uint32_t late[32 - kKept];
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          if (j == 2) read(late, kKept);
          if (j == 3) read(late + 4, kKept + 4);
          // NOTE: behind the promotion this would be what the next products wait for.
          if (j == 8 && wave == 1) fetch();
          const uint32_t* const two = 2 * j < kKept ? kept + 2 * j : late + 2 * j - kKept;
          promote_four(sum[wave] + 4 * j, acc + 4 * j, f0, f8, two[0], two[1]);
        }
        if (wave == 1) release();
      } else {
        promote_carefully(sum[wave], acc, f0, f8, step.columns, step.lane);
        // NOTE: again, so that nothing is kept during this.
        if (wave == 0) read_kept();
        if (wave == 1) release(), fetch();
      }
    }
  }
};

}  // namespace te_mx::sm90
