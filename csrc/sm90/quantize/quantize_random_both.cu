// Both directions of a bf16 matrix, or of groups of its rows, to MXFP4 from one read, rounded
// stochastically or to nearest even, the columns after a Hadamard transform or without one.
//
//   read; random words of all elements; scales of the rows, whose blocks lie in four lanes
//   two columns at a time: codes of the rows, four bits each; transformed in fp32, scales of the
//   columns, codes
//   classes; plain codes as they are, codes of E4M3 by tables, as the tile's scales want them
//
// A thread has 8 x 8 elements, as in the quantizer, and draws once for both directions.
#include "mxtile/sm90/shared.cuh"
#include "quantize/random_codes.cuh"

namespace te_mx::sm90 {

namespace {

using Bf16 = __nv_bfloat16;
constexpr tile::Fp8 kFmt = tile::Fp8::e2m1;
constexpr uint32_t kNanTable = 15;

// NOTE: numbers and random words wait in shared memory, not in registers. So columns are a loop
// whose code an SM keeps, and three CTAs fit on it.
struct RandomSmem {
  alignas(8) uint2 tables[16];                // of fp4.cuh's u, and of NaN
  alignas(16) uint32_t row_by[4][128];        // what blocks of rows are multiplied by
  alignas(16) uint32_t turn[kTileWarps][32];  // sign bits that transforms turn, of each warp
  QuantizeSmem q;                             // its codes are the first half of x
  uint4 x[4][kQuantizeThreads];               // the second half
  uint4 words[8][kQuantizeThreads];           // where there are any
};
// For each half of a thread's columns four vectors, x of two rows in each, and later its codes.
constexpr int kStep = 16 * kQuantizeThreads;  // from vector to vector
constexpr int kHalf = 4 * kStep;
constexpr int kWords = 2 * kHalf;  // to random words
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
    const BlockPair pair = block_pair<Bf16, kFmt>(most, a);
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
  __device__ __forceinline__ void add(uint32_t (&four)[8], const uint32_t (&x)[8], float (&v)[2][8],
                                      int j, const uint32_t (&words)[8], bool clamps) {
    uint32_t by[8];
    load_eight(by, at_by);
    if (far) {
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
    if (clamps) {
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
  __device__ __forceinline__ void operator()(float (&v)[2][8]) const {
    if (size == 0) return;
    const auto transform = [&](float (&v)[8]) {
      butterfly<8>(v, size, place);
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = __fmul_rn(v[i], transform_factor(size));
    };
    if (all_whole) {
      transform(v[0]), transform(v[1]);
      return;
    }
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
};

// The largest of four lanes that have the same columns.
__device__ __forceinline__ uint32_t larger_of_band(uint32_t v) {
  v = __vmaxu2(v, __shfl_xor_sync(~0u, v, 8));
  return __vmaxu2(v, __shfl_xor_sync(~0u, v, 16));
}

constexpr uint32_t kNotFinite = 511, kFp4Emax = 2;

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
      return (block_entry<float, kFmt>(__uint_as_float(bits), a.rule) & 0xFF) + kFp4Emax;
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
  __device__ __forceinline__ uint32_t codes_of(const float (&v)[8], float factor, int c,
                                               const uint32_t (&words)[8]) const {
    uint32_t w[8];
    if constexpr (kRandom) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t bits = __float_as_uint(__fmul_rz(v[i], factor));
        w[i] = signed_step_by_chance(bits, words[i], c);
      }
      if (clamps) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
          w[i] = min(w[i] & 0x7FFFFFFFu, 0x01FFFFFFu) | (w[i] & 0x80000000u);
      }
      return nibbles_of_steps(w);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) w[i] = step_nearest(__fmul_rn(v[i], factor));
      if (clamps) {
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
    first = codes_of(v[0], by[0], 0, words), second = codes_of(v[1], by[1], 1, words);
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

// Which tables the codes of eight blocks in rows from r on of an operand take, two in a word.
__device__ __forceinline__ uint4 tables_of(const TileScales& s, const Shifts& shifts, int b, int r,
                                           bool nan) {
  const uint4 entries = *reinterpret_cast<const uint4*>(&s.blocks[b][r]);
  const uint4 targets = shifts.of_cols(r);
  const auto table = [&](uint32_t entry, uint32_t target) {
    uint32_t e = entry & 0x00FF00FFu;
    const uint32_t nans = nan ? __vcmpgeu2(e, 0x00FF00FFu) : 0;
    e &= ~nans;
    uint32_t u = tile::kFp4Headroom * 0x10001u;  // the code itself
    if (shifts.any) {
      u = __vminu2(target + (tile::kFp4Headroom - 1) * 0x10001u - e, tile::kFp4Spread * 0x10001u);
    }
    return u | (nans & kNanTable * 0x10001u);
  };
  return {table(entries.x, targets.x), table(entries.y, targets.y), table(entries.z, targets.z),
          table(entries.w, targets.w)};
}

// Writes so many bytes of a word.
template <class Word>
__device__ __forceinline__ void write_bytes(uint8_t* to, Word w, int count) {
  const uint64_t bytes = [&] {
    if constexpr (sizeof(Word) == 8) return w.x | static_cast<uint64_t>(w.y) << 32;
    if constexpr (sizeof(Word) == 4) return static_cast<uint64_t>(w);
  }();
#pragma unroll 1
  for (int j = 0; j < static_cast<int>(sizeof(Word)) && j < count; ++j)
    to[j] = static_cast<uint8_t>(bytes >> (8 * j));
}

// Writes plain codes, of(k) of row k of a thread, where they lie as x does, two a byte or one.
template <class Of>
__device__ __forceinline__ void write_plain(const CodesOut& out, const Tile& t, const Place& at,
                                            const Of& of) {
  const int half = out.nibbles ? 1 : 0;  // as a shift: of eight codes
  uint8_t* to = out.codes + (t.r0 + at.r) * out.ld + ((t.c0() + at.c) >> half);
  const int width = (t.last_col ? out.last_width : 128 >> half) - (at.c >> half);
  const int rows = width > 0 ? t.rows - at.r : 0;
  if (out.vectors) {
#pragma unroll
    for (int k = 0; k < 8; ++k, to += out.ld) {
      if (k < rows) *reinterpret_cast<decltype(of(k))*>(to) = of(k);
    }
  } else {
#pragma unroll
    for (int k = 0; k < 8; ++k, to += out.ld) {
      if (k < rows) write_bytes(to, of(k), width);
    }
  }
}

// Writes the plain codes of columns, transposed, two a byte: staged as words of eight rows, 16-byte
// chunks of 32 rows xored with (col / 8) % 8.
__device__ __forceinline__ void write_col_words(const uint8_t (&codes)[128][128],
                                                const CodesOut& out, const Tile& t) {
  const int chunk = threadIdx.x % 4;
  const int width = (t.last_row ? out.last_width : 64) - 16 * chunk;
#pragma unroll
  for (int c = threadIdx.x / 4; c < 128; c += 64) {
    if (c >= t.cols || width <= 0) break;
    const uint4 w = *reinterpret_cast<const uint4*>(&codes[c][16 * (chunk ^ c / 8 % 8)]);
    uint8_t* const to = out.codes + (t.c0() + c) * out.ld + t.k0() / 2 + 16 * chunk;
    if (out.vectors) {
      *reinterpret_cast<uint2*>(to) = make_uint2(w.x, w.y);
      if (width > 8) *reinterpret_cast<uint2*>(to + 8) = make_uint2(w.z, w.w);
    } else {
      write_bytes(to, make_uint2(w.x, w.y), width);
      write_bytes(to + 8, make_uint2(w.z, w.w), width - 8);
    }
  }
}

template <bool kRandom>
__global__ void __launch_bounds__(kQuantizeThreads, 3)
    both_kernel(const __grid_constant__ RandomParams all) {
  extern __shared__ __align__(16) uint8_t room[];
  RandomSmem& smem = *reinterpret_cast<RandomSmem*>(room);
  QuantizeSmem& s = smem.q;
  tile::let_dependents_start();
  tile::await_predecessors();
  const QuantizeParams& p = all.q;
  Tile t;
  if (!find_rows(t, p, all.groups)) return;
  const Place at;
  uint32_t all_x[8][4];
  load_patch<Bf16>(
      all_x, static_cast<const Bf16*>(p.a.x) + (t.r0 + at.r) * p.a.x_stride + t.c0() + at.c,
      p.a.x_stride, t.rows - at.r, t.cols - at.c, p.x_vectors, &s.codes[0][0] + 64 * threadIdx.x);
  if (threadIdx.x == 0) s.row.clear(), s.col.clear();
  if (threadIdx.x < 16) {
    const tile::Fp4Table table(threadIdx.x);
    smem.tables[threadIdx.x] = threadIdx.x == kNanTable ? make_uint2(0x7F7F7F7Fu, 0x7F7F7F7Fu)
                                                        : make_uint2(table.low, table.high);
  }
  if constexpr (kRandom) {
    park_words(slot_of(smem), all.first + static_cast<uint32_t>(t.r0 + at.r), t.c0() + at.c,
               key_of(all.seed));
  }
  const bool sums = p.a.col_sum != nullptr;
  if (sums) sum_cols<Bf16>(s.sums, all_x, at);

  const bool clamps = p.a.rule != ScaleRule::rceil;  // a scale may be too small
  RowCodes<kRandom> rows(smem, all_x, at, p.a);
  ColumnCodes<kRandom> cols(p.a, at, clamps);
  const Transform transform(smem, all, t, at);
  uint16_t* const entry = &s.col.blocks[at.band][at.c + at.lane_r];
  if (!p.x_vectors) __syncthreads();  // the slots of load_patch() lie elsewhere
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int k = 0; k < 8; k += 2) {
      tile::st_shared_u32x4(slot_of(smem) + kHalf * half + kStep * (k / 2),
                            make_uint4(all_x[k][2 * half], all_x[k][2 * half + 1],
                                       all_x[k + 1][2 * half], all_x[k + 1][2 * half + 1]));
    }
  }
  __syncwarp();
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    const uint32_t slot = slot_of(smem) + kHalf * half;
    uint32_t four[8], made[4];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float v[2][8];
      uint32_t x[8], words[8];
      // NOTE: both pairs are read twice, since registers do not hold one of them meanwhile.
#pragma unroll
      for (int k = 0; k < 8; k += 2) {
        const uint4 two = tile::ld_shared_u32x4(slot + kStep * (k / 2));
        x[k] = j == 0 ? two.x : two.y, x[k + 1] = j == 0 ? two.z : two.w;
      }
      load_columns(v, x, transform.at_turn);
      if constexpr (kRandom) load_words(words, slot, j);
      if (p.row.enabled) {
        rows.add(four, x, v, j, words, clamps);
        if (j == 1) {
          tile::st_shared_u32x4(slot + kStep, make_uint4(four[0], four[1], four[2], four[3]));
          tile::st_shared_u32x4(slot + 2 * kStep, make_uint4(four[4], four[5], four[6], four[7]));
        }
        if (rows.far) load_columns(v, x, transform.at_turn);
      }
      if (p.col.enabled) {
        transform(v);
        cols.add(made[2 * j], made[2 * j + 1], v, j, slot, entry + 4 * half, p.a);
      }
    }
    tile::st_shared_u32x4(slot, make_uint4(made[0], made[1], made[2], made[3]));
  }
  // NOTE: made anew; registers hold no places through the loop.
  const Place place(static_cast<int>(tile::keep(threadIdx.x)));
  uint32_t row_codes[8], col_codes[8];
  load_eight(col_codes, slot_of(smem), kHalf);
  bool nan = false;
  if (p.row.enabled) {
    rows.finish(row_codes, smem, place);
    nan = rows.nan;
  }
  if (p.col.enabled) nan |= cols.finish(s.col, col_codes, place);
  nan = __syncthreads_or(nan);
  const TileClasses classes = finish_scales<kFmt, true>(p, s, t, sums);

  if (p.row.packed) {
    const Shifts shifts(s.row, classes.row_exponent, true, classes.row);
    const uint4 tables = tables_of(s.row, shifts, place.row_block, place.r, nan);
    RowWriter out(p.row, t, place);
#pragma unroll
    for (int k = 0; k < 8; ++k)
      out.write(k, tile::Fp4Table(smem.tables[half_of(tables, k)]).eight(row_codes[k]));
  } else if (p.row.enabled) {
    write_plain(p.row, t, place, [&](int k) { return row_codes[k]; });
  }
  if (!p.col.enabled) return;
  if (p.a.col_lies_as_x) {
    // Bytes of two rows each, as rows of eight columns.
    const auto turn = [&](int c) {
      tile::transpose_bytes(col_codes[c], col_codes[c + 1], col_codes[c + 2], col_codes[c + 3]);
    };
    turn(0), turn(4);
    write_plain(p.col, t, place, [&](int k) {
      const uint32_t left = col_codes[k / 2] >> (4 * (k % 2)) & 0x0F0F0F0Fu;
      const uint32_t right = col_codes[k / 2 + 4] >> (4 * (k % 2)) & 0x0F0F0F0Fu;
      return make_uint2(left, right);
    });
    return;
  }
  const int swizzle = place.c / 8 % 8;
  if (p.col.packed) {
    const Shifts shifts(s.col, classes.col_exponent, true, classes.col);
    const uint4 tables = tables_of(s.col, shifts, place.band, place.c, nan);
    uint8_t* const to = &s.codes[place.c][16 * (place.r / 16 ^ swizzle) + place.r % 16];
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      *reinterpret_cast<uint2*>(to + 128 * c) =
          tile::Fp4Table(smem.tables[half_of(tables, c)]).eight(col_codes[c]);
    }
    __syncthreads();
    write_cols<false>(s.codes, p.col, t);
  } else {
    uint8_t* const to = &s.codes[place.c][16 * (place.band ^ swizzle) + 4 * place.lane_r];
#pragma unroll
    for (int c = 0; c < 8; ++c) *reinterpret_cast<uint32_t*>(to + 128 * c) = col_codes[c];
    __syncthreads();
    write_col_words(s.codes, p.col, t);
  }
}

}  // namespace

Status quantize_both_randomly(const RandomParams& p, cudaStream_t stream) {
  const bool random = p.seed != nullptr;
  const auto kernel = random ? both_kernel<true> : both_kernel<false>;
  constexpr int kBytes = sizeof(RandomSmem), kDrawn = sizeof(RandomSmem::words);
  const int smem = random ? kBytes : kBytes - kDrawn;
  const Status status =
      started(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
  if (status != Status::ok) return status;
  return launch_early(kernel, {tile_grid(p.q, p.q.col_tiles), kQuantizeThreads, stream, smem}, p);
}

}  // namespace te_mx::sm90
