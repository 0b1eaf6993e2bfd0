// The two directions of the quantizer of both at random: codes of a thread's rows, and of the
// columns that it has after an exchange, and the entries of their blocks.
#pragma once

#include "mxtile/sm90/shared.cuh"
#include "mxtile/sm90/turned.cuh"
#include "quantize/random_codes.cuh"

namespace te_mx::sm90 {

using Bf16 = __nv_bfloat16;

// NOTE: numbers and random words wait in shared memory, not in registers: three CTAs fit on an SM.
inline constexpr int kBeforeQuantizeSmem = 48 + 128 + 2048 + 256;
struct RandomSmem {
  Tile tile;
  alignas(8) uint2 tables[16];          // of fp4.cuh's u, and of NaN
  alignas(16) uint32_t row_by[4][128];  // what blocks of rows are multiplied by
  uint8_t* to[kTileWarps][4];           // where outputs of RandomParams::whole begin
  // Codes begin at a multiple of 128.
  alignas(16) uint8_t unused[128 - (kBeforeQuantizeSmem + offsetof(QuantizeSmem, codes)) % 128];
  QuantizeSmem q;                    // its codes are the first half of x
  uint4 x[4][kQuantizeThreads];      // the second half
  uint4 words[8][kQuantizeThreads];  // where there are any
};
// The lanes of a warp exchange what they have. Its 32 rows of x lie in rows of 128 bytes, a lane's
// eight columns in 16 of them, which are xored with 64 in odd rows: so ldmatrix reads from two rows
// of four lanes at once. Random words lie alike, a half for a number.
inline constexpr int kWarpRoom = 8 * 32 * 16, kWords = kTileWarps * kWarpRoom;
static_assert(sizeof(QuantizeSmem::codes) + sizeof(RandomSmem::x) == kWords);
static_assert(offsetof(RandomSmem, q.codes) % 128 == 0);
struct Slots {
  uint32_t warp, lane;
  __device__ __forceinline__ explicit Slots(const RandomSmem& s, uint32_t thread)
      : warp(tile::smem_addr(&s.q.codes[0][0]) + kWarpRoom * (thread / 32)), lane(thread % 32) {}
  // Even rows k of this lane's eight; odd ones lie at to_even() ^ 64.
  __device__ __forceinline__ uint32_t to_even() const {
    return warp + 16 * (lane % 8) + 1024 * (lane / 8);
  }
  static __device__ __forceinline__ uint32_t row(uint32_t to_even, int k) {
    return (k % 2 == 0 ? to_even : to_even ^ 64) + 128 * k;
  }
  // What the lane gives to ldmatrix for the first eight rows of a column of each lane, of the
  // columns that the lanes lane % 4 of all rows have, as their number lane / 4; its second column
  // is four lanes on: at from() ^ 64. Eight rows further are 1024 bytes.
  __device__ __forceinline__ uint32_t from() const {
    return warp + 256 * (lane / 8) + 128 * (lane % 2) + 16 * (lane % 8 / 2) + 64 * (lane % 2);
  }
  // Column c of the lane's two, of the warp's 64.
  __device__ __forceinline__ int column(int c) const {
    return static_cast<int>(8 * (lane % 4) + lane / 4) + 32 * c;
  }
  // Codes of eight rows come back as words, those of the eight columns of a lane: of column c rows
  // 8 g at codes_to(c) + 256 g.
  __device__ __forceinline__ uint32_t codes_to(int c) const {
    const uint32_t chunk = lane % 4, j = lane / 4;
    return (warp + 16 * chunk + 4 * (j % 4) + 128 * (j / 4) + 64 * (j / 4)) ^ (c == 0 ? 0 : 64);
  }
  // Words of columns 0 to 3; those of 4 to 7 lie at (codes_from() ^ 64) + 128.
  __device__ __forceinline__ uint32_t codes_from() const {
    return warp + 256 * (lane / 8) + 16 * (lane % 8);
  }
};
__device__ __forceinline__ uint32_t part(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}
// Half i of eight.
__device__ __forceinline__ uint32_t half_of(const uint4& v, int i) {
  return __byte_perm(part(v, i / 2), 0, i % 2 == 0 ? 0x4410 : 0x4432);
}

// Eight words of two vectors of shared memory.
__device__ __forceinline__ void load_eight(uint32_t (&to)[8], uint32_t first, uint32_t second) {
  const uint4 a = tile::ld_shared_u32x4(first), b = tile::ld_shared_u32x4(second);
  to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w;
  to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
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

// Steps to nearest even (random_codes.cuh) of two bf16 numbers in each of two words, for sums where
// 2 is the step of the smallest codes: codes in the lower halves of bytes 0 and 2. factor: a power
// of two, twice.
struct NearestBf16 {
  uint32_t factor, exponents;  // what those of numbers grow by to become those of the power of two

  __device__ __forceinline__ explicit NearestBf16(uint32_t two) {
    exponents = __byte_perm(two - 0x3F00, 0, 0x1010);
    const __nv_bfloat162 by =
        __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&two), __float2bfloat162_rn(0x1p-5f));
    factor = *reinterpret_cast<const uint32_t*>(&by);
  }
  __device__ __forceinline__ uint32_t steps(uint32_t x) const {
    const auto bf16 = [](uint32_t bits) { return *reinterpret_cast<const __nv_bfloat162*>(&bits); };
    const uint32_t magic = __viaddmax_s16x2(x & 0x7F807F80u, exponents, 0x40004000u);
    const __nv_bfloat162 v = __hfma2(bf16(x), bf16(factor), bf16(magic | (x & 0x80008000u)));
    const uint32_t sum = *reinterpret_cast<const uint32_t*>(&v);
    return sum + (sum >> 6);
  }
};

// The rows of a thread: what their blocks are multiplied by, and codes.
template <bool kRandom>
struct RowCodes {
  uint32_t at_by;  // what the thread's rows are multiplied by, fp32 numbers or bf16 ones twice
  // Of the warp: some factor times kToSteps is one that fp32 does not hold; some block is NaN, some
  // is one that the scales do not reach and not of zeros.
  bool far, nan, low;
  uint32_t entries;  // of the blocks in rows at.folded_row() and behind it

  __device__ __forceinline__ RowCodes(RandomSmem& s, const uint32_t (&x)[8][4], const Place& at,
                                      const QuantizeTask& a, bool packed)
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
    entries = pair.entries;
    s.q.row.add_blocks(at.folded_row(), at.row_block, entries);
    if (packed) s.q.row.add_range(entries);
    nan = __any_sync(~0u, pair.nan);
    low = __any_sync(~0u, (~pair.entries & 0x01000100u) != 0 && (most & 0x7FFF7FFFu) != 0);
    far = kRandom && __any_sync(~0u, __vcmpgtu2(0x34003400u, pair.factors) != 0);
    const auto by = [&](uint32_t factor) -> uint32_t {
      if constexpr (kRandom) {
        return __float_as_uint(__fmul_rn(__uint_as_float(factor << 16), far ? 1.0f : kToSteps));
      } else {
        return factor * 0x10001u;
      }
    };
    tile::st_shared_u32x2(tile::smem_addr(&s.row_by[at.row_block][at.folded_row()]),
                          by(pair.factors & 0xFFFF), by(pair.factors >> 16));
  }

  // Writes plain scales of a whole tile that begin at `to`, those of a warp's 64 columns at a time.
  __device__ __forceinline__ void write_scales(uint8_t* to, uint32_t ld, const Place& at) const {
    const bool second = (at.lane_c & 4) != 0;  // of the blocks, whose lane writes the second row
    const uint32_t other = __shfl_xor_sync(~0u, entries, 4);
    const uint32_t both =
        second ? __byte_perm(other, entries, 0x62) : __byte_perm(entries, other, 0x40);
    const uint32_t row = at.folded_row() + (second ? 1 : 0);
    *reinterpret_cast<uint16_t*>(to + (row * ld + 2 * at.half)) = static_cast<uint16_t>(both);
  }

  // What is rare, of a row: its numbers as large as the largest code at most, and by a factor that
  // is far, exact in bf16 where they are not far below the smallest code.
  __device__ __forceinline__ void prepare(uint32_t (&x)[4], uint32_t& by, uint32_t entry,
                                          bool clamps) const {
    const uint32_t six = min(((entry & 0xFF) + 2) << 7 | 0x40, 0x7F7Fu);
    const float factor = __uint_as_float(by);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (clamps) x[j] = tile::clamp_magnitude_bf16x2(x[j], six * 0x10001u);
      if (far) {
        x[j] = __byte_perm(__float_as_uint(low_bf16(x[j]) * factor),
                           __float_as_uint(high_bf16(x[j]) * factor), 0x7632);
      }
    }
    if (far) by = __float_as_uint(kToSteps);
  }

  // Codes of eight numbers of one row.
  __device__ __forceinline__ uint32_t codes_of(const uint32_t (&x)[4], const uint4& words,
                                               uint32_t by) const {
    if constexpr (kRandom) {
      uint32_t w[8];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float v[2] = {low_bf16(x[j]), high_bf16(x[j])};
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const uint32_t bits = __float_as_uint(__fmul_rz(v[c], __uint_as_float(by)));
          w[2 * j + c] = step_by_chance(bits, part(words, j), c);
        }
      }
      return nibbles_of_steps(w);
    } else {
      const NearestBf16 nearest(by);
      uint32_t bytes[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t w[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) w[j] = nearest.steps(x[2 * i + j]);
        const uint32_t codes = __byte_perm(w[0], w[1], 0x6420) & 0x07070707u;
        const uint32_t signs = __byte_perm(x[2 * i], x[2 * i + 1], 0x7531) >> 4 & 0x08080808u;
        bytes[i] = codes | signs;
      }
      return __byte_perm(bytes[0] + (bytes[0] >> 4), bytes[1] + (bytes[1] >> 4), 0x6420);
    }
  }

  // What the codes of NaN are, and entries of blocks that were rounded up from nothing.
  __device__ __forceinline__ void finish(uint32_t (&codes)[8], RandomSmem& smem, const Place& at) {
    QuantizeSmem& s = smem.q;
    if (nan) {
      uint32_t by[8];
      load_eight(by, at_by, at_by + 16);
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

// Sums and differences of `count` of a column's numbers.
template <int kFirst, int kFrom, int kTo>
__device__ __forceinline__ void add_up(float (&v)[32], int count) {
#pragma unroll
  for (int h = kFrom; h < kTo; h *= 2) {
#pragma unroll
    for (int i = kFirst; i < kFirst + count; ++i) {
      if (i & h) continue;
      const float a = v[i], b = v[i + h];
      v[i] = __fadd_rn(a, b), v[i + h] = __fsub_rn(a, b);
    }
  }
}
// To nearest even, of numbers 2^-14 times as large as codes say: the sum with a power of two, and a
// half, cuts a number off at a step, half its binade or 2^-15. As E5M2 the numbers of codes are
// these codes with their signs in bit 7 and a zero behind them, since its subnormal numbers begin
// there.
inline constexpr float kToRounded = 0x1p-14f;
__device__ __forceinline__ float round_nearest(float v) {
  const uint32_t bits = __float_as_uint(v) & 0x7F800000u;
  const float magic = __uint_as_float(max(bits + 0x0B400000u, (127u - 14 + 22) << 23 | 0x400000u));
  return __fsub_rn(__fadd_rn(v, magic), magic);
}

// Eight codes as plain rows have them, the first in the lowest bits, of numbers 2^-14 times as
// large, and others with their signs.
__device__ __forceinline__ uint32_t nibbles_of_rounded(const float (&rounded)[8],
                                                       const float (&v)[8]) {
  const auto four = [](const float (&of)[8], int i) {
    return tile::fp8x4<tile::Fp8::e5m2>(of[i], of[i + 2], of[i + 4], of[i + 6]);
  };
  const uint32_t even = four(rounded, 0) >> 1, odd = four(rounded, 1) << 3;
  const uint32_t signs = (four(v, 0) >> 4 & 0x08080808u) | (four(v, 1) & 0x80808080u);
  return (((even & 0x0F0F0F0Fu) | (odd & 0xF0F0F0F0u)) & 0x77777777u) | signs;
}

inline constexpr uint32_t kNotFinite = 511, kFp4Emax = 2;

// The columns of a thread, one at a time: all 32 rows of a block.
template <bool kRandom>
struct ColumnCodes {
  int rows;  // of the block

  __device__ __forceinline__ ColumnCodes(const Tile& t, const Place& at)
      : rows(t.rows - 32 * at.band) {}

  // What the numbers of a block are multiplied by.
  static __device__ __forceinline__ float factor_of(uint32_t e) {
    if constexpr (kRandom) return __fmul_rn(__uint_as_float((254 + kFp4Emax - e) << 23), kToSteps);
    return __uint_as_float((254 + kFp4Emax - 14 - e) << 23);
  }

  // Numbers of column c of the thread's two, with the signs that the transform gives them.
  static __device__ __forceinline__ void load(float (&v)[32], uint32_t from,
                                              const RandomParams& p) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t x[4];
      tile::ldmatrix_x4_turned(x, from + 1024 * i);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int r = 8 * i + 2 * j;
        v[r] = __uint_as_float((x[j] << 16) + p.turns[r]);
        v[r + 1] = __uint_as_float((x[j] & p.upper) ^ p.turns[r + 1]);
      }
    }
  }
  __device__ __forceinline__ void codes_of_all(uint32_t (&codes)[4], const float (&v)[32], float by,
                                               uint32_t from) const {
#pragma unroll
    for (int g = 0; g < 4; ++g) {
      float eight[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) eight[i] = v[8 * g + i];
      uint32_t words[4] = {};
      if constexpr (kRandom) tile::ldmatrix_x4_turned(words, from + kWords + 1024 * g);
      codes[g] = codes_of(eight, by, words);
    }
  }

  // Whether run_usual() may be tried: whole blocks of a transform of 32, and no scale that is too
  // small for a number.
  static __device__ __forceinline__ bool usual(const Tile& t, const RandomParams& p) {
    return p.size == 32 && t.rows == 128 && p.q.a.rule == ScaleRule::rceil;
  }
  // run() without questions, or kNotFinite where some lane of the warp has a block that needs them.
  __device__ __forceinline__ uint32_t run_usual(uint32_t (&codes)[4], float (&v)[32],
                                                uint32_t from) const {
    add_up<0, 1, 16>(v, 16);
    add_up<16, 1, 16>(v, 16);
    const float factor = transform_factor(32);
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i)
      largest = max(largest, __float_as_uint(__fadd_rn(fabsf(v[i]), fabsf(v[i + 16]))));
    const uint32_t bits = __float_as_uint(__fmul_rn(__uint_as_float(largest), factor));
    const uint32_t e = (bits + 0x3FFFFFu) >> 23;
    if (__any_sync(~0u, e - 28 > 112)) return kNotFinite;
    add_up<0, 16, 32>(v, 32);
    float by = factor_of(e);
    if constexpr (kRandom) {  // steps at random are cut off after it
#pragma unroll
      for (int i = 0; i < 32; ++i) v[i] = __fmul_rn(v[i], factor);
    } else {
      by *= factor;
    }
    codes_of_all(codes, v, by, from);
    return e;
  }

  // Codes of a column of the thread's two, and e + kFp4Emax of its block, or kNotFinite.
  __device__ __forceinline__ uint32_t run(uint32_t (&codes)[4], float (&v)[32], uint32_t from,
                                          const RandomParams& p) const {
    // Whether the first and the second 16 rows are transformed, and all 32 as one.
    // NOTE: found here, not before a loop, as usual blocks have no use for it.
    const uint32_t size = tile::keep(static_cast<uint32_t>(p.size));
    const bool one = size == 32 && rows >= 32, first = one || (size == 16 && rows >= 16),
               second = one || (size == 16 && rows >= 32);
    // What is added so that a rule carries into the exponent: the carry of bf16, and behind it
    // nothing or all ones.
    const ScaleRule rule = p.q.a.rule;
    const uint32_t carry = rule == ScaleRule::rceil  ? 0x3FFFFFu
                           : rule == ScaleRule::even ? 0x200000u
                                                     : 0;
    // NOTE: or numbers without signs would be kept beside them.
#pragma unroll
    for (int i = 0; i < 32; ++i) v[i] = __uint_as_float(tile::keep(__float_as_uint(v[i])));
    if (size != 0 && !(first && second)) {  // chunks that are not whole stay
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        if (i < 16 ? !first : !second) v[i] = __uint_as_float(__float_as_uint(v[i]) ^ p.turns[i]);
      }
    }
    const auto multiply = [&v](float by, int count) {
#pragma unroll
      for (int i = 0; i < count; ++i) v[i] = __fmul_rn(v[i], by);
    };
    if (first) add_up<0, 1, 16>(v, 16);
    if (second) add_up<16, 1, 16>(v, 16);
    float factor = first ? transform_factor(static_cast<int>(size)) : 1.0f;  // what they still lack
    if (first != second) multiply(factor, 16), factor = 1.0f;
    float most;
    if (one) {
      // NOTE: the larger of two numbers' sum and difference is the sum of their magnitudes.
      uint32_t largest = 0;
#pragma unroll
      for (int i = 0; i < 16; ++i)
        largest = max(largest, __float_as_uint(__fadd_rn(fabsf(v[i]), fabsf(v[i + 16]))));
      most = __uint_as_float(largest);
      add_up<0, 16, 32>(v, 32);
    } else {
      most = v[0];
#pragma unroll
      for (int i = 1; i < 32; ++i) most = tile::max_magnitude(most, v[i]);
    }
    const uint32_t bits = __float_as_uint(__fmul_rn(most, factor)) & 0x7FFFFFFFu;
    uint32_t e = (bits + carry) >> 23;
    // NOTE: a factor in two is as good as one, where nothing near half the smallest code is
    // subnormal; but steps at random are cut off after it.
    const bool unusual = rule != ScaleRule::rceil || __any_sync(~0u, e - 28 > 112);
    if (kRandom ? first : unusual) multiply(factor, 32), factor = 1.0f;
    float by = __fmul_rn(factor_of(e), factor);
    if (unusual) {
      if (bits >= 0x7F800000u) {
        e = kNotFinite;
      } else if (e < 4) {  // where quotients are subnormal, as the quantizer computes them
        e = max(
            (block_entry<float, tile::Fp8::e2m1>(__uint_as_float(bits), rule) & 0xFF) + kFp4Emax,
            kFp4Emax);
      }
      // A factor that fp32 does not hold: the scale first.
      const bool nan = e == kNotFinite, far = e > 140;
      const float scale = nan ? 0.0f : __uint_as_float((254 + kFp4Emax - e) << 23);
      by = far ? (kRandom ? kToSteps : kToRounded) : factor_of(e);
#pragma unroll
      for (int i = 0; i < 32; ++i) v[i] = nan ? 0.0f : far ? __fmul_rz(v[i], scale) : v[i];
    }
    if (rule != ScaleRule::rceil) {
      // As large as the largest code; the scale first where it is far.
      const uint32_t scale = max((e - kFp4Emax) << 23, 0x00400000u);
      const float limit = 6.0f * (e > 140 ? 1.0f : __uint_as_float(scale));
#pragma unroll
      for (int i = 0; i < 32; ++i) v[i] = tile::clamp_magnitude(v[i], limit);
    }
    codes_of_all(codes, v, by, from);
    return e;
  }

  // Codes of eight numbers.
  __device__ __forceinline__ uint32_t codes_of(const float (&v)[8], float factor,
                                               const uint32_t (&words)[4]) const {
    if constexpr (kRandom) {
      uint32_t w[8];
#pragma unroll
      for (int i = 0; i < 8; ++i)
        w[i] = step_by_chance(__float_as_uint(__fmul_rz(v[i], factor)), words[i / 2], i % 2);
      return nibbles_of_steps(w);
    } else {
      float scaled[8], rounded[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        scaled[i] = __fmul_rn(v[i], factor);
        rounded[i] = round_nearest(scaled[i]);
      }
      return nibbles_of_rounded(rounded, scaled);
    }
  }

  // Plain scales of what run() found, those of the second column 32 behind.
  static __device__ __forceinline__ void write_scales(uint8_t* to, const uint32_t (&e2)[2]) {
    to[0] = static_cast<uint8_t>(e2[0] == kNotFinite ? 0xFF : e2[0] - kFp4Emax);
    to[32] = static_cast<uint8_t>(e2[1] == kNotFinite ? 0xFF : e2[1] - kFp4Emax);
  }
  // Makes entries of what run() found of columns c and c + 32; whether one is of NaN.
  static __device__ __forceinline__ bool finish(TileScales& scales, const uint32_t (&found)[2],
                                                const uint32_t (&e2)[2], int c, int band,
                                                bool packed) {
    const uint32_t both = e2[0] | e2[1] << 16;
    const uint32_t nans = __vcmpgeu2(both, kNotFinite * 0x10001u);
    uint32_t entries = ((both - kFp4Emax * 0x10001u) | kCounts * 0x10001u) & ~nans;
    entries |= 0x00FF00FFu & nans;
    const uint32_t e = entries & 0x00FF00FFu;
    if (__any_sync(~0u, (e & 0xFFFF) == 0 || e >> 16 == 0))
      entries = e | (found[0] != 0 ? kCounts : 0) | (found[1] != 0 ? kCounts << 16 : 0);
    scales.blocks[band][c] = static_cast<uint16_t>(entries);
    scales.blocks[band][c + 32] = static_cast<uint16_t>(entries >> 16);
    if (packed) scales.add_range(entries);
    return nans != 0;
  }
};

}  // namespace te_mx::sm90
