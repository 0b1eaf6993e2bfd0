// One step of the main loop, 128 of K, for a math warpgroup: products on the tensor cores, then
// promotion. The classes of the two tiles decide how: see Mode.
#pragma once

#include "gemm/gemm_promote.cuh"
#include "mxtile/sm90/barrier.cuh"
#include "mxtile/sm90/wgmma.cuh"

namespace te_mx::sm90 {

namespace tile = mxtile::sm90;

enum class Mode : uint32_t {
  // One promotion a step, after four products of 32 as a chain. Factors of
  // nothing but the step (rhs class 0, lhs 0), in a uniform register. NOTE: the FFMAs of promotions
  // keep the tensor cores from the register file. With two operands in it instead of three, a
  // product takes 3 to 6 % less time.
  one = 0,
  tile = 1,     // the row, times that of the rhs tile (rhs class 0, lhs 0 or 1)
  columns = 2,  // the column, with that of the lhs tile inside (rhs 1, lhs 0)
  both = 3,     // the row and the column (rhs 1, lhs 1)
  // The same, but a promotion for every 32 (lhs or rhs class 2)
  block_tile = 4,
  block_columns = 5,
  block_both = 6,
  far = 7,  // a careful promotion for every 32, from scale words
};

// What is decided about a step: the mode, in the lowest bits, and the factor of Mode::one, a power
// of two that does not need them.
inline constexpr uint32_t kModeBits = 7;

// What a warpgroup reads of a stage before its step.
template <int kWaves>
struct ScalesAhead {
  uint32_t decided, rows[2 * kWaves];

  // From the shared addresses of what was decided, and of the word of this thread's first row.
  __device__ __forceinline__ void read(uint32_t decided_at, uint32_t words, uint32_t) {
    decided = tile::ld_shared_u32(decided_at);
#pragma unroll
    for (int i = 0; i < 2 * kWaves; ++i)
      rows[i] = tile::ld_shared_u32(words + 4 * (8 * (i % 2) + 64 * (i / 2)));
  }
};

// Shared address of the word of this thread's first row, in a tile of words of which this
// warpgroup's first is `inside`. NOTE: keep() has it worked out again, which costs less than a
// register.
__device__ __forceinline__ uint32_t word_of_row(uint32_t words, int inside) {
  const uint32_t self = tile::keep(threadIdx.x) % 128;
  return words + 4 * (inside + self / 32 * 16 + self % 32 / 4);
}

// What a warpgroup knows of any step.
struct StepPlaces {
  uint32_t lhs, rhs;              // descriptors
  uint32_t lhs_words, rhs_words;  // shared addresses of the scale tiles
  uint32_t columns, decided_at;   // and of what was prepared: the columns' factors; the rest
  int inside;                     // of the warpgroup's first row in its scale tile
  int lane;
};

// Columns: bf16 [4][128].
template <int kWaves>
struct Step : StepPlaces {
  uint32_t rows[2 * kWaves];  // words of this thread's rows
  Mode mode;
  float factor;  // of Mode::one

  __device__ __forceinline__ void take(const ScalesAhead<kWaves>& ahead) {
    mode = static_cast<Mode>(ahead.decided & kModeBits);
    factor = __uint_as_float(ahead.decided & ~kModeBits);
#pragma unroll
    for (int i = 0; i < 2 * kWaves; ++i) rows[i] = ahead.rows[i];
  }
};

// Math warpgroups that take turns at the tensor cores: without, they run in lock-step, and promote
// at the same time. A turn is over when at most kPending of its four products are unfinished, so
// that the next one's start while the last ones run.
inline constexpr int kNoTurns = -1;
template <int kMath, int kPending>
struct Turns {
  static constexpr bool kTaken = kPending != kNoTurns && kMath > 1;
  static constexpr int kFirstBarrier = 4;  // behind those of the epilogue
  static_assert(kPending >= kNoTurns && kPending <= 4);
  static constexpr int kLeft = kPending;
  int math;

  __device__ __forceinline__ void wait() const {
    if constexpr (kTaken) tile::named_barrier(kFirstBarrier + math, 256);
  }
  __device__ __forceinline__ void pass() const {
    if constexpr (kTaken)
      tile::named_arrive(kFirstBarrier + (math == kMath - 1 ? 0 : math + 1), 256);
  }
  // The last one gives the first turn, and the first one takes what is left.
  __device__ __forceinline__ void begin() const {
    if (math == kMath - 1) pass();
  }
  __device__ __forceinline__ void end() const {
    if (math == 0) wait();
  }
};

inline constexpr uint32_t kWaveStep = 64 * 128 / 16;  // from wave to wave, or half to half

// Starts products of all 128 of K into the accumulators of one wave. NOTE: nothing that waits for
// shared memory may get between the four, which __syncwarp() sees to.
template <class Operands>
__device__ __forceinline__ void start_products(float (&acc)[64], uint32_t lhs, uint32_t rhs) {
  tile::wgmma_pin(acc);
  tile::wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < 4; ++kk)
    tile::wgmma_64x128x32<Operands::kLhs, Operands::kRhs>(acc, lhs + 2 * kk, rhs + 2 * kk, kk != 0);
  tile::wgmma_commit();
  __syncwarp();
}

// 32 of K, 64 columns.
template <class Operands>
__device__ __forceinline__ void start_product(float (&acc)[32], uint32_t lhs, uint32_t rhs) {
  tile::wgmma_pin(acc);
  tile::wgmma_fence();
  tile::wgmma_64x64x32<Operands::kLhs, Operands::kRhs>(acc, lhs, rhs, 0);
  tile::wgmma_commit();
  __syncwarp();
}

// Until at most kPending products of this warpgroup are unfinished.
template <int kPending, int kCount>
__device__ __forceinline__ void finish_products(float (&acc)[kCount]) {
  tile::wgmma_wait<kPending>();
  tile::wgmma_pin(acc);
}

// This thread's factors of kWords * 8 columns, the first of which lie at `from`.
template <int kWords>
__device__ __forceinline__ void load_columns(uint32_t (&cols)[kWords], uint32_t from, int lane) {
#pragma unroll
  for (int i = 0; i < kWords; i += 4) {
    uint32_t four[4];
    tile::ldmatrix_x4(four, from + 16 * (i + lane / 8));
    cols[i] = four[0], cols[i + 1] = four[1], cols[i + 2] = four[2], cols[i + 3] = four[3];
  }
}

template <class Operands, int kWaves, class Release, class Ahead>
__device__ __forceinline__ void step_tile(float (&sum)[kWaves][64], const Step<kWaves>& step,
                                          const Release& release, const Ahead& ahead) {
  float acc[64];
  const float col = shared_scale(tile::ld_shared_u32(step.rhs_words));
#pragma unroll
  for (int wave = 0; wave < kWaves; ++wave) {
    const float f0 = __uint_as_float(step.rows[2 * wave]) * col;
    const float f8 = __uint_as_float(step.rows[2 * wave + 1]) * col;
    start_products<Operands>(acc, step.lhs + wave * kWaveStep, step.rhs);
    if (wave == kWaves - 1) ahead();
    finish_products<0>(acc);
    if (wave == kWaves - 1) release();
    promote_tile<0>(sum[wave], acc, f0, f8);
  }
}

template <class Operands, int kWaves, class Release, class Ahead>
__device__ __forceinline__ void step_one(float (&sum)[kWaves][64], const Step<kWaves>& step,
                                         const Release& release, const Ahead& ahead) {
  float acc[64];
#pragma unroll
  for (int wave = 0; wave < kWaves; ++wave) {
    start_products<Operands>(acc, step.lhs + wave * kWaveStep, step.rhs);
    if (wave == kWaves - 1) ahead();
    finish_products<0>(acc);
    if (wave == kWaves - 1) release();
    promote_tile<0>(sum[wave], acc, step.factor, step.factor);
  }
}

template <Mode kMode, class Operands, int kWaves, class Release, class Ahead>
__device__ __forceinline__ void step_columns(float (&sum)[kWaves][64], const Step<kWaves>& step,
                                             const Release& release, const Ahead& ahead) {
  float acc[64];
  start_products<Operands>(acc, step.lhs, step.rhs);
  uint32_t cols[16];
  load_columns(cols, step.columns, step.lane);
#pragma unroll
  for (int wave = 0; wave < kWaves; ++wave) {
    if (wave != 0) start_products<Operands>(acc, step.lhs + wave * kWaveStep, step.rhs);
    finish_products<0>(acc);
    if (wave == kWaves - 1) release();
    if constexpr (kMode == Mode::columns) {
      promote_columns<0>(sum[wave], acc, cols);
    } else {
      promote_both<0>(sum[wave], acc, __uint_as_float(step.rows[2 * wave]),
                      __uint_as_float(step.rows[2 * wave + 1]), cols);
    }
  }
  ahead();
}

// Promotes 32 of K of one wave, half of its columns, in two parts. `ahead` has the factors of the
// first part, and afterwards those at `next`: they are on their way during the second part.
template <Mode kMode, int kHalf, int kWaves>
__device__ __forceinline__ void promote_block(float (&sum)[64], const float (&acc)[32],
                                              uint32_t (&ahead)[4], const Step<kWaves>& step,
                                              uint32_t from, uint32_t next, float f0, float f8) {
  constexpr int kFirst = 32 * kHalf;
  if constexpr (kMode == Mode::block_tile) {
    promote_tile<kFirst>(sum, acc, f0, f8);
  } else {
    float first[16], second[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) first[i] = acc[i], second[i] = acc[16 + i];
    uint32_t cols[4];
    load_columns(cols, from + 64, step.lane);
    if constexpr (kMode == Mode::block_columns) {
      promote_columns<kFirst>(sum, first, ahead);
      load_columns(ahead, next, step.lane);
      promote_columns<kFirst + 16>(sum, second, cols);
    } else {
      promote_both<kFirst>(sum, first, f0, f8, ahead);
      load_columns(ahead, next, step.lane);
      promote_both<kFirst + 16>(sum, second, f0, f8, cols);
    }
  }
}

// The blocks of a step when each has scales of its own. Half of the columns is promoted while the
// tensor cores work on the other half.
template <Mode kMode, class Operands, int kWaves, class Release, class Ahead>
__device__ __forceinline__ void step_blocks(float (&sum)[kWaves][64], const Step<kWaves>& step,
                                            const Release& release, const Ahead& ahead) {
  float left[32], right[32];
  const uint32_t lhs_class = tile::ld_shared_u32(step.lhs_words + 512);
  const float col =
      kMode == Mode::block_tile ? shared_scale(tile::ld_shared_u32(step.rhs_words)) : 1.0f;
  uint32_t ahead4[4];
#pragma unroll
  for (int wave = 0; wave < kWaves; ++wave) {
    const uint32_t lhs = step.lhs + wave * kWaveStep, rhs = step.rhs;
    start_product<Operands>(left, lhs, rhs);
    if (wave == 0) load_columns(ahead4, step.columns, step.lane);
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
      const WordReader reader(lhs_class, kk);
      const uint32_t from = step.columns + 256 * kk;
      start_product<Operands>(right, lhs + 2 * kk, rhs + 2 * kk + kWaveStep);
      // NOTE: keep() lets the compiler read scales here and not, all at once, earlier.
      const float f0 = reader.scale(tile::keep(step.rows[2 * wave])) * col;
      const float f8 = reader.scale(tile::keep(step.rows[2 * wave + 1])) * col;
      finish_products<1>(left);
      promote_block<kMode, 0>(sum[wave], left, ahead4, step, from, from + 128, f0, f8);
      if (kk < 3) {
        start_product<Operands>(left, lhs + 2 * kk + 2, rhs + 2 * kk + 2);
        finish_products<1>(right);
      } else {
        finish_products<0>(right);
      }
      promote_block<kMode, 1>(sum[wave], right, ahead4, step, from + 128,
                              kk < 3 ? from + 256 : step.columns, f0, f8);
    }
  }
  // NOTE: not before the last columns have been read.
  release();
  ahead();
}

// Right for every exponent, and slow.
template <class Operands, int kWaves, class Release, class Ahead>
__device__ __forceinline__ void step_far(float (&sum)[kWaves][64], const Step<kWaves>& step,
                                         const Release& release, const Ahead& ahead) {
  float acc[32];
  const uint32_t lhs_class = tile::ld_shared_u32(step.lhs_words + 512);
  const uint32_t rhs_class = tile::ld_shared_u32(step.rhs_words + 512);
  const uint32_t cols = step.rhs_words + 8 * (step.lane % 4);
#pragma unroll 1
  for (int kk = 0; kk < 4; ++kk) {
    const WordReader lhs(lhs_class, kk), rhs(rhs_class, kk);
#pragma unroll
    for (int i = 0; i < 2 * kWaves; ++i) {
      const int wave = i / 2, half = i % 2;
      const uint32_t w0 = step.rows[2 * wave], w8 = step.rows[2 * wave + 1];
      start_product<Operands>(acc, step.lhs + wave * kWaveStep + 2 * kk,
                              step.rhs + half * kWaveStep + 2 * kk);
      finish_products<0>(acc);
      if (half == 0) {
        promote_far<0>(sum[wave], acc, w0, w8, cols, lhs, rhs);
      } else {
        promote_far<32>(sum[wave], acc, w0, w8, cols, lhs, rhs);
      }
    }
  }
  release();
  ahead();
}

// Calls `release` in every thread when the warpgroup needs the stage no more.
template <class Operands, int kWaves, class Release, class Ahead>
__device__ __forceinline__ void run_step(float (&sum)[kWaves][64], const Step<kWaves>& step,
                                         const Release& release, const Ahead& ahead) {
  if (step.mode == Mode::one) {
    step_one<Operands>(sum, step, release, ahead);
  } else if (step.mode == Mode::tile) {
    step_tile<Operands>(sum, step, release, ahead);
  } else if (step.mode == Mode::columns) {
    step_columns<Mode::columns, Operands>(sum, step, release, ahead);
  } else if (step.mode == Mode::both) {
    step_columns<Mode::both, Operands>(sum, step, release, ahead);
  } else if (step.mode == Mode::block_tile) {
    step_blocks<Mode::block_tile, Operands>(sum, step, release, ahead);
  } else if (step.mode == Mode::block_columns) {
    step_blocks<Mode::block_columns, Operands>(sum, step, release, ahead);
  } else if (step.mode == Mode::block_both) {
    step_blocks<Mode::block_both, Operands>(sum, step, release, ahead);
  } else {
    step_far<Operands>(sum, step, release, ahead);
  }
}

// What a warp of the producer does for every stage that arrives, one warp for each lhs tile: it
// writes the factors of the columns against that tile, [4][128], as bf16, and what is decided.
// Every power of two from 2^-133 on fits bf16; a smaller product of two scales makes the step a far
// one.
__device__ __forceinline__ void prepare_step(uint32_t lhs_words, uint32_t rhs_words,
                                             uint32_t columns, uint32_t decided_at, int lane) {
  // NOTE: all at once. Shared memory is busy, and a read takes hundreds of cycles.
  const uint32_t lhs_class = tile::ld_shared_u32(lhs_words + 512);
  const uint32_t rhs_class = tile::ld_shared_u32(rhs_words + 512);
  const float lhs_scale = __uint_as_float(tile::ld_shared_u32(lhs_words));
  const uint4 words = tile::ld_shared_u32x4(rhs_words + 16 * lane);
  const bool blocks = lhs_class == 2 || rhs_class == 2;
  Mode mode = blocks ? Mode::block_tile : Mode::tile;
  bool far = lhs_class == 3 || rhs_class == 3;
  uint32_t factor = 0;
  if (lhs_class == 0 && rhs_class == 0) {
    factor = __float_as_uint(lhs_scale * shared_scale(words.x));  // in lane 0, of the first row
    if ((factor & kModeBits) == 0) {
      mode = Mode::one;
    } else {
      factor = 0;
    }
  }
  if (rhs_class != 0 && !far) {
    const bool shared = lhs_class == 0;
    mode = shared ? (blocks ? Mode::block_columns : Mode::columns)
                  : (blocks ? Mode::block_both : Mode::both);
    const float row = shared ? lhs_scale : 1.0f;
    bool lost = false;
    const auto of_column = [&](uint32_t word, const WordReader& reader) {
      const float scale = reader.scale(word);
      const uint32_t bits = __float_as_uint(scale * row);
      lost |= (bits & 0xFFFFu) != 0 || (bits == 0 && scale != 0.0f);
      return bits;
    };
#pragma unroll 1
    for (int kk = 0; kk < (blocks ? 4 : 1); ++kk) {
      const WordReader reader(rhs_class, kk);
      const uint32_t a = of_column(words.x, reader), b = of_column(words.y, reader),
                     c = of_column(words.z, reader), d = of_column(words.w, reader);
      tile::st_shared_u32x2(columns + 256 * kk + 8 * lane, __byte_perm(a, b, 0x7632),
                            __byte_perm(c, d, 0x7632));
    }
    far = __any_sync(~0u, lost);
  }
  if (lane == 0)
    tile::st_shared_u32(decided_at, factor | static_cast<uint32_t>(far ? Mode::far : mode));
}

// How products of a step become part of the sums: a policy of the main loop. This one knows the
// scales of packed operands (te_mx/sm90_layout.h), powers of two: one a tile, one a row, four a
// row.
//
// A policy says
//   kLhsTileWords, kRhsTileWords  scales of a tile of 128 x 128 of an operand in memory,
//   kLhsTileBytes, kRhsTileBytes  and what arrives of them with its codes
//   lhs_scales(..), rhs_scales(..), rhs_inside(..)
//                         where they lie: what is copied, and where the tile's own are inside it
//   rhs_tiles(..)         of rhs in one step of K; lhs has packed_tiles()
//   kPrepares, prepare(..)  whether a warp makes something of the scales of a stage, kPreparedBytes
//                         for each lhs tile, and what it decides, a word behind them
//   kPendingAtTurn        how math warpgroups take turns (Turns)
//   kWarpsStore           whether they store D without the copy engine
//   kOwnZeros             whether ptxas keeps the second wave's sums in the bank of registers that
//                         its products are not in if each begins by an instruction of its own
//   Ahead, Step, run<..>  what a math warpgroup reads before a step, knows of it, and does
//
// The one for scales of fp32 is in gemm_factors.cuh.
struct PowerOfTwoScales {
  // NOTE: of 64 bits, so that the producer's steps through memory are one instruction each.
  static constexpr int64_t kLhsTileWords = kScaleWords, kRhsTileWords = kScaleWords;
  static constexpr int kLhsTileBytes = static_cast<int>(kScaleWords * 4);
  static constexpr int kRhsTileBytes = kLhsTileBytes;
  static constexpr bool kPrepares = true;
  static constexpr int kPreparedBytes = 4 * 128 * 2;
  using WavesApart = void;  // the policy of a kernel whose waves are done one by one, if there is
  static constexpr int kPendingAtTurn = kNoTurns;
  static constexpr bool kWarpsStore = false, kOwnZeros = true;

  static __device__ __forceinline__ const uint32_t* lhs_scales(const uint32_t* all, int tile) {
    return all + static_cast<int64_t>(tile) * kLhsTileWords;
  }
  static __device__ __forceinline__ const uint32_t* rhs_scales(const uint32_t* all, int tile) {
    return lhs_scales(all, tile);
  }
  static __device__ __forceinline__ constexpr int rhs_inside(int) { return 0; }
  static int64_t rhs_tiles(int64_t rows) { return packed_tiles(rows); }

  template <int kWaves>
  using Ahead = ScalesAhead<kWaves>;
  template <int kWaves>
  using Step = sm90::Step<kWaves>;

  static __device__ __forceinline__ void prepare(uint32_t lhs_words, uint32_t rhs_words,
                                                 uint32_t columns, uint32_t decided_at, int lane) {
    prepare_step(lhs_words, rhs_words, columns, decided_at, lane);
  }

  template <class Operands, int kWaves, class Turns, class Release, class Fetch>
  static __device__ __forceinline__ void run(float (&sum)[kWaves][64], const Step<kWaves>& step,
                                             const Turns&, const Release& release,
                                             const Fetch& fetch) {
    run_step<Operands>(sum, step, release, fetch);
  }
};

}  // namespace te_mx::sm90
