// The two directions of the quantizer of both at random: codes of a thread's rows and columns, two
// columns at a time, and the entries of their blocks.
#pragma once

#include "mxtile/sm90/shared.cuh"
#include "quantize/random_codes.cuh"

namespace te_mx::sm90 {

using Bf16 = __nv_bfloat16;

// NOTE: numbers and random words wait in shared memory, not in registers. So columns are a loop
// whose code an SM keeps, and three CTAs fit on it.
struct RandomSmem {
  Tile tile;
  alignas(8) uint2 tables[16];                // of fp4.cuh's u, and of NaN
  alignas(16) uint32_t row_by[4][128];        // what blocks of rows are multiplied by
  alignas(16) uint32_t turn[kTileWarps][32];  // sign bits that transforms turn, of each warp
  QuantizeSmem q;                             // its codes are the first half of x
  uint4 x[4][kQuantizeThreads];               // the second half
  uint4 words[8][kQuantizeThreads];           // where there are any
};
// For each half of a thread's columns four vectors, x of two rows in each, and later its codes.
inline constexpr int kStep = 16 * kQuantizeThreads;  // from vector to vector
inline constexpr int kHalf = 4 * kStep;
inline constexpr int kWords = 2 * kHalf;  // to random words
static_assert(sizeof(QuantizeSmem::codes) == kHalf && sizeof(RandomSmem::x) == kHalf);
__device__ __forceinline__ uint32_t slot_of(const RandomSmem& s) {
  return tile::smem_addr(&s.q.codes[0][0]) + 16 * threadIdx.x;
}

__device__ __forceinline__ uint32_t part(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}
// Half i of eight.
__device__ __forceinline__ uint32_t half_of(const uint4& v, int i) {
  return __byte_perm(part(v, i / 2), 0, i % 2 == 0 ? 0x4410 : 0x4432);
}

// Eight words of two vectors of shared memory.
__device__ __forceinline__ void load_eight(uint32_t (&to)[8], uint32_t from, int step = 16) {
  const uint4 a = tile::ld_shared_u32x4(from), b = tile::ld_shared_u32x4(from + step);
  to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w;
  to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}

// Draws the random words of a thread's elements; those of a pair of columns lie in two vectors.
__device__ __forceinline__ void park_words(uint32_t slot, uint32_t row, int64_t col, uint2 key) {
#pragma unroll
  for (int r = 0; r < 8; r += 4) {
    uint4 made[4];
    draw(made, row + r, col, key);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      tile::st_shared_u32x4(
          slot + kWords + kStep * (2 * j + r / 4),
          make_uint4(part(made[0], j), part(made[1], j), part(made[2], j), part(made[3], j)));
    }
  }
}
// Those of pair j of the half that a slot has.
__device__ __forceinline__ void load_words(uint32_t (&words)[8], uint32_t slot, int j) {
  load_eight(words, slot + kWords + kStep * 2 * j, kStep);
}

// Which of a thread's eight codes words are not all zeros, or those of the lanes kBit and 2 kBit
// apart.
template <int kBit>
__device__ __forceinline__ uint32_t nonzero_blocks(const uint32_t (&codes)[8]) {
  uint32_t found = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) found |= ((codes[i] & 0x77777777u) != 0 ? 1u : 0u) << i;
  found |= __shfl_xor_sync(~0u, found, kBit);
  return found | __shfl_xor_sync(~0u, found, 2 * kBit);
}

// The rows of a thread: what their blocks are multiplied by, and codes that come together column by
// column.
template <bool kRandom>
struct RowCodes {
  uint32_t at_by;  // what the thread's rows are multiplied by, fp32 numbers or bf16 ones twice
  // Of the warp: some factor times kToSteps is one that fp32 does not hold; some block is NaN, some
  // is one that the scales do not reach and not of zeros.
  bool far, nan, low;
  uint32_t even[8];

  __device__ __forceinline__ RowCodes(RandomSmem& s, const uint32_t (&x)[8][4], const Place& at,
                                      const QuantizeTask& a)
      : at_by(tile::smem_addr(&s.row_by[at.row_block][at.r])) {
    using In = Input<Bf16>;
    uint32_t m[4];
#pragma unroll
    for (int k = 0; k < 8; k += 2) {
      m[k / 2] = In::larger_halves(
          In::larger(In::larger(x[k][0], x[k][1]), In::larger(x[k][2], x[k][3])),
          In::larger(In::larger(x[k + 1][0], x[k + 1][1]), In::larger(x[k + 1][2], x[k + 1][3])));
    }
    const uint32_t most = fold<Bf16, 1>(m);
    const BlockPair pair = block_pair<Bf16, tile::Fp8::e2m1>(most, a);
    s.q.row.add_blocks(at.folded_row(), at.row_block, pair.entries);
    s.q.row.add_range(pair.entries);
    nan = __any_sync(~0u, pair.nan);
    low = __any_sync(~0u, (~pair.entries & 0x01000100u) != 0 && (most & 0x7FFF7FFFu) != 0);
    far = kRandom && __any_sync(~0u, __vcmpgtu2(0x34003400u, pair.factors) != 0);
    const auto by = [&](uint32_t factor) -> uint32_t {
      if constexpr (kRandom) {
        return __float_as_uint(__fmul_rn(__uint_as_float(factor << 16), far ? 1.0f : kToSteps));
      } else {
        const uint32_t two = factor * 0x10001u;
        const __nv_bfloat162 f = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&two),
                                         __float2bfloat162_rn(kToNearestBf16));
        return *reinterpret_cast<const uint32_t*>(&f);
      }
    };
    tile::st_shared_u32x2(tile::smem_addr(&s.row_by[at.row_block][at.folded_row()]),
                          by(pair.factors & 0xFFFF), by(pair.factors >> 16));
  }

  // Adds column pair j of two, v with any signs; after the second one, four[k] has nibbles and, in
  // bits 23 and 31, the signs of the first and the third.
  template <bool kUsual>
  __device__ __forceinline__ void add(uint32_t (&four)[8], const uint32_t (&x)[8], float (&v)[2][8],
                                      int j, const uint32_t (&words)[8], bool clamps) {
    uint32_t by[8];
    load_eight(by, at_by);
    if (!kUsual && far) {
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        v[0][k] *= __uint_as_float(by[k]), v[1][k] *= __uint_as_float(by[k]);
        by[k] = __float_as_uint(kToSteps);
      }
    }
    // Of the first pair two codes in bytes 0 and 1, signs in bytes 2 and 3.
    const auto add_row = [&]<bool kClamps>(int k) {
      if constexpr (kRandom) {
        uint32_t w[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float steps = __fmul_rz(v[c][k], __uint_as_float(by[k]));
          w[c] = step_by_chance(__float_as_uint(steps), words[k], c);
          if (kClamps) w[c] = min(w[c], 0x07FFFFFFu);
        }
        if (j == 0) {
          even[k] = __byte_perm(__byte_perm(w[0], w[1], 0x73), x[k], 0x7510);
          return;
        }
        four[k] = tile::permute_bytes(even[k], w[1], 0xFF71) * 16 +
                  tile::permute_bytes(even[k], w[0], 0xFF70);
      } else {
        uint32_t w = steps_nearest(x[k], *reinterpret_cast<const __nv_bfloat162*>(&by[k]));
        if (kClamps) w = __vminu2(w & 0x000F000Fu, 0x00070007u);
        if (j == 0) {
          even[k] = __byte_perm(__byte_perm(w, 0, 0x20), x[k], 0x7510);
          return;
        }
        const uint32_t bytes = __byte_perm(even[k], w, 0x6410) & 0x07070707u;
        four[k] = tile::permute_bytes(bytes + (bytes >> 4), 0, 0x4420);
      }
      four[k] |= __byte_perm(even[k], x[k], 0x5273) & 0x80808080u;
    };
    if (!kUsual && clamps) {
#pragma unroll
      for (int k = 0; k < 8; ++k) add_row.template operator()<true>(k);
    } else {
#pragma unroll
      for (int k = 0; k < 8; ++k) add_row.template operator()<false>(k);
    }
  }

  // The codes of all, of what add() made of each half.
  __device__ __forceinline__ void finish(uint32_t (&codes)[8], RandomSmem& smem, const Place& at) {
    QuantizeSmem& s = smem.q;
    uint32_t first[8], second[8];
    load_eight(first, slot_of(smem) + kStep, kStep);
    load_eight(second, slot_of(smem) + kHalf + kStep, kStep);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      codes[k] = __byte_perm(first[k], second[k], 0x5410) |
                 (__byte_perm(first[k], second[k], 0x7632) >> 4 & 0x08080808u);
    }
    if (nan) {
      uint32_t by[8];
      load_eight(by, at_by);
#pragma unroll
      for (int k = 0; k < 8; ++k) codes[k] = isnan(__uint_as_float(by[k])) ? 0 : codes[k];
    }
    if (low) {  // its numbers may be rounded up
      const uint32_t found = nonzero_blocks<1>(codes) >> (at.folded_row() - at.r);
      const uint32_t entries =
          *reinterpret_cast<const uint32_t*>(&s.row.blocks[at.row_block][at.folded_row()]) |
          (found & 1) * kCounts | (found >> 1 & 1) * (kCounts << 16);
      s.row.add_blocks(at.folded_row(), at.row_block, entries);
      s.row.add_range(entries);
    }
  }
};

// Two columns of bf16 numbers, with signs turned.
__device__ __forceinline__ void load_columns(float (&v)[2][8], const uint32_t (&x)[8],
                                             uint32_t at_turn) {
  uint32_t turn[8];
  load_eight(turn, at_turn);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    v[0][i] = __uint_as_float(x[i] * 0x10000u + turn[i]);
    v[1][i] = __uint_as_float((x[i] & 0xFFFF0000u) ^ turn[i]);
  }
}

struct Transform {
  int size, place;
  uint32_t at_turn;  // the sign bits of the thread's rows
  bool whole, all_whole;

  __device__ __forceinline__ Transform(RandomSmem& s, const RandomParams& p, const Tile& t,
                                       const Place& at)
      : size(p.size), place(at.lane_r) {
    const auto is_whole = [&](int r) { return (r & ~(size - 1)) + size <= t.rows; };
    const int lane = threadIdx.x % 32;
    const bool turns = size != 0 && is_whole(32 * at.band + lane);
    s.turn[threadIdx.x / 32][lane] = turns ? p.signs << (31 - lane) & 0x80000000u : 0;
    at_turn = tile::smem_addr(&s.turn[threadIdx.x / 32][8 * place]);
    whole = is_whole(at.r);
    all_whole = __all_sync(~0u, whole);
  }

  // Of two columns whose signs were turned.
  template <int kSize>  // the transform's where all is whole, or -1
  __device__ __forceinline__ void run(float (&v)[2][8]) const {
    const int size = kSize >= 0 ? kSize : this->size;
    if (size == 0) return;
    const auto transform = [&](float (&v)[8]) {
      butterfly<8>(v, size, place);
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = __fmul_rn(v[i], transform_factor(size));
    };
    if constexpr (kSize >= 0) {
      transform(v[0]), transform(v[1]);
    } else {
#pragma unroll 1
      for (int c = 0; c < 2; ++c) {
        float out[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) out[i] = c == 0 ? v[0][i] : v[1][i];
        transform(out);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (whole && c == 0) v[0][i] = out[i];
          if (whole && c == 1) v[1][i] = out[i];
        }
      }
    }
  }
};

// The largest of four lanes that have the same columns.
__device__ __forceinline__ uint32_t larger_of_band(uint32_t v) {
  v = __vmaxu2(v, __shfl_xor_sync(~0u, v, 8));
  return __vmaxu2(v, __shfl_xor_sync(~0u, v, 16));
}

inline constexpr uint32_t kNotFinite = 511, kFp4Emax = 2;

// e + kFp4Emax of two blocks from the largest magnitudes that each lane has, or kNotFinite.
__device__ __forceinline__ uint32_t exponents_of(float m0, float m1, uint32_t carry,
                                                 const QuantizeTask& a) {
  const auto one = [&](float m) -> uint32_t {
    const uint32_t bits = __float_as_uint(m) & 0x7FFFFFFFu;
    return bits >= 0x7F800000u ? kNotFinite : (bits + carry) >> 23;
  };
  uint32_t both = larger_of_band(one(m0) | one(m1) << 16);
  // Where quotients are subnormal, as the quantizer computes them.
  if (__any_sync(~0u, (both & 0xFFFF) < 4 || both >> 16 < 4)) {
    const auto exact = [&](float m, uint32_t from) -> uint32_t {
      uint32_t bits = __float_as_uint(m) & 0x7FFFFFFFu;
      bits = max(bits, __shfl_xor_sync(~0u, bits, 8));
      bits = max(bits, __shfl_xor_sync(~0u, bits, 16));
      if (from == kNotFinite) return from;
      return (block_entry<float, tile::Fp8::e2m1>(__uint_as_float(bits), a.rule) & 0xFF) + kFp4Emax;
    };
    both = exact(m0, both & 0xFFFF) | exact(m1, both >> 16) << 16;
  }
  return __vmaxu2(both, kFp4Emax * 0x10001u);
}

// The columns of a thread, two at a time.
template <bool kRandom>
struct ColumnCodes {
  // What is added so that a rule carries into the exponent: the carry of bf16, and behind it
  // nothing or all ones.
  uint32_t carry;
  bool clamps;
  bool odd;     // of two columns this lane has the scale of the second
  bool writes;  // and leaves it at `entry`

  __device__ __forceinline__ ColumnCodes(const QuantizeTask& a, const Place& at, bool clamps)
      : carry(a.rule == ScaleRule::rceil  ? 0x3FFFFFu
              : a.rule == ScaleRule::even ? 0x200000u
                                          : 0),
        clamps(clamps),
        odd(at.lane_r % 2 != 0),
        writes(at.lane_r < 2) {}

  // Codes of column c of two, scaled.
  template <bool kUsual>
  __device__ __forceinline__ uint32_t codes_of(const float (&v)[8], float factor, int c,
                                               const uint32_t (&words)[8]) const {
    uint32_t w[8];
    if constexpr (kRandom) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t bits = __float_as_uint(__fmul_rz(v[i], factor));
        w[i] = signed_step_by_chance(bits, words[i], c);
      }
      if (!kUsual && clamps) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
          w[i] = min(w[i] & 0x7FFFFFFFu, 0x01FFFFFFu) | (w[i] & 0x80000000u);
      }
      return nibbles_of_steps(w);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) w[i] = step_nearest(__fmul_rn(v[i], factor));
      if (!kUsual && clamps) {
#pragma unroll
        for (int i = 0; i < 8; ++i) w[i] = min(w[i] & 0xFu, 7u);
      }
      return nibbles_of(w, v);
    }
  }

  // What the numbers of a block are multiplied by.
  static __device__ __forceinline__ float factor_of(uint32_t e) {
    if constexpr (kRandom) return __fmul_rn(__uint_as_float((254 + kFp4Emax - e) << 23), kToSteps);
    return __uint_as_float((254 + kFp4Emax - 21 - e) << 23);
  }

  template <bool kUsual>
  __device__ __forceinline__ void add(uint32_t& first, uint32_t& second, float (&v)[2][8], int j,
                                      uint32_t slot, uint16_t* entry, const QuantizeTask& a) {
    float most[2] = {v[0][0], v[1][0]};
#pragma unroll
    for (int i = 1; i < 8; ++i) {
      most[0] = tile::max_magnitude(most[0], v[0][i]);
      most[1] = tile::max_magnitude(most[1], v[1][i]);
    }
    float m = tile::max_magnitude(odd ? most[1] : most[0],
                                  __shfl_xor_sync(~0u, odd ? most[0] : most[1], 8));
    m = tile::max_magnitude(m, __shfl_xor_sync(~0u, m, 16));
    uint32_t e = ((__float_as_uint(m) & 0x7FFFFFFFu) + carry) >> 23;
    float mine_by = factor_of(e), other_by = __shfl_xor_sync(~0u, mine_by, 8);
    float by[2] = {odd ? other_by : mine_by, odd ? mine_by : other_by};
    if (__any_sync(~0u, e - 4 > 136)) {
      const uint32_t both = exponents_of(most[0], most[1], carry, a);
      e = odd ? both >> 16 : both & 0xFFFF;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const uint32_t own = c == 0 ? both & 0xFFFF : both >> 16;
        // A factor that fp32 does not hold: the scale first.
        const bool nan = own == kNotFinite, far = own > 140;
        const float scale = nan ? 0.0f : __uint_as_float((254 + kFp4Emax - own) << 23);
        by[c] = far ? (kRandom ? kToSteps : kToNearest) : factor_of(own);
#pragma unroll
        for (int i = 0; i < 8; ++i)
          v[c][i] = nan ? 0.0f : far ? __fmul_rz(v[c][i], scale) : v[c][i];
      }
    }
    uint32_t words[8];
    if constexpr (kRandom) load_words(words, slot, j);
    first = codes_of<kUsual>(v[0], by[0], 0, words);
    second = codes_of<kUsual>(v[1], by[1], 1, words);
    if (writes) entry[2 * j] = static_cast<uint16_t>(e);
  }

  // Makes entries of what add() left; whether one is of NaN.
  __device__ __forceinline__ bool finish(TileScales& scales, const uint32_t (&codes)[8],
                                         const Place& at) const {
    __syncwarp();
    const int c = at.c + 2 * at.lane_r;
    const uint32_t e2 = *reinterpret_cast<const uint32_t*>(&scales.blocks[at.band][c]);
    const uint32_t nans = __vcmpgeu2(e2, kNotFinite * 0x10001u);
    uint32_t entries = ((e2 - kFp4Emax * 0x10001u) | kCounts * 0x10001u) & ~nans;
    entries |= 0x00FF00FFu & nans;
    const uint32_t e = entries & 0x00FF00FFu;
    if (__any_sync(~0u, (e & 0xFFFF) == 0 || e >> 16 == 0)) {
      const uint32_t found = nonzero_blocks<8>(codes) >> (2 * at.lane_r);
      entries = e | (found & 1) * kCounts | (found >> 1 & 1) * (kCounts << 16);
    }
    scales.add_blocks(c, at.band, entries);
    scales.add_range(entries);
    return nans != 0;
  }
};

}  // namespace te_mx::sm90
