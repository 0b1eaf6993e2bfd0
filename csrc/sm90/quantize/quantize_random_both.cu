// Both directions of a bf16 matrix, or of groups of its rows, to MXFP4 from one read, rounded
// stochastically or to nearest even, the columns after a Hadamard transform or without one.
//
//   read; random words of all elements
//   rows: scales of blocks, which lie in four lanes, and codes to registers, four bits each
//   columns, two at a time: transformed in fp32, scales, codes to registers
//   classes; codes of E4M3 by tables, as the tile's scales want them
//
// A thread has 8 x 8 elements, as in the quantizer, and draws once for both directions.
#include "mxtile/sm90/shared.cuh"
#include "quantize/random_codes.cuh"

namespace te_mx::sm90 {

namespace {

using Bf16 = __nv_bfloat16;
constexpr tile::Fp8 kFmt = tile::Fp8::e2m1;
constexpr uint32_t kNanTable = 15;

struct RandomSmem {
  QuantizeSmem q;
  alignas(16) uint32_t row_by[4][128];        // what blocks of rows are multiplied by
  alignas(16) uint32_t turn[kTileWarps][32];  // sign bits that transforms turn, of each warp
  alignas(8) uint2 tables[16];                // of tile_codes(): of fp4.cuh's u, and of NaN
};

// The random words of a thread's elements, those of the second four columns in shared memory.
struct Draws {
  uint2 words[8];   // of row k, of two pairs of columns
  uint32_t parked;  // four vectors of this thread, kStep bytes apart
  static constexpr int kStep = 16 * kQuantizeThreads;

  __device__ __forceinline__ Draws(QuantizeSmem& s, uint32_t row, int64_t col, uint2 key)
      : parked(tile::smem_addr(&s.codes[0][0]) + 16 * threadIdx.x) {
#pragma unroll
    for (int r = 0; r < 8; r += 4) {
      uint4 made[4];
      draw(made, row + r, col, key);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        words[r + k] = make_uint2(made[k].x, made[k].y);
        if (k % 2 == 0) continue;
        tile::st_shared_u32x4(parked + kStep * ((r + k) / 2),
                              make_uint4(made[k - 1].z, made[k - 1].w, made[k].z, made[k].w));
      }
    }
  }
  __device__ __forceinline__ void second_half() {
#pragma unroll
    for (int k = 0; k < 8; k += 2) {
      const uint4 two = tile::ld_shared_u32x4(parked + kStep * (k / 2));
      words[k] = make_uint2(two.x, two.y), words[k + 1] = make_uint2(two.z, two.w);
    }
  }
  // Of columns 2 j and 2 j + 1, each from bit 8 on.
  __device__ __forceinline__ void of(uint32_t (&drawn)[2][8], int j) const {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const uint32_t word = j % 2 == 0 ? words[k].x : words[k].y;
      drawn[0][k] = __byte_perm(word, 0, 0x4104), drawn[1][k] = __byte_perm(word, 0, 0x4324);
    }
  }
};
struct NoDraws {
  template <class... Any>
  __device__ __forceinline__ NoDraws(Any&&...) {}
  __device__ __forceinline__ void second_half() {}
  __device__ __forceinline__ void of(uint32_t (&)[2][8], int) const {}
};

__device__ __forceinline__ uint32_t part(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}
// Half i of eight.
__device__ __forceinline__ uint32_t half_of(const uint4& v, int i) {
  return __byte_perm(part(v, i / 2), 0, i % 2 == 0 ? 0x4410 : 0x4432);
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

// Eight words of shared memory. NOTE: never kept in registers from column to column.
__device__ __forceinline__ void load_eight(uint32_t (&to)[8], uint32_t from) {
  const uint4 a = tile::ld_shared_u32x4(from), b = tile::ld_shared_u32x4(from + 16);
  to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w;
  to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}

// The rows of a thread: what their blocks are multiplied by, and codes that come together column by
// column.
template <bool kRandom>
struct RowCodes {
  uint32_t at_by;  // what the thread's rows are multiplied by, fp32 numbers or bf16 ones twice
  // Of the warp: some factor times kToSteps is one that fp32 does not hold; some block is NaN, some
  // is one that the scales do not reach and not of zeros.
  bool far, nan, low;
  uint32_t even[8], half[8];

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
        return __float_as_uint(
            __fmul_rn(__uint_as_float(factor << 16), far ? kToSteps * 0x1p100f : kToSteps));
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

  // Adds columns 2 j and 2 j + 1, v with any signs.
  __device__ __forceinline__ void add(const uint32_t (&x)[8][4], float (&v)[2][8], int j,
                                      const uint32_t (&drawn)[2][8], bool clamps) {
    uint32_t by[8];
    load_eight(by, at_by);
    if (far) {
#pragma unroll
      for (int k = 0; k < 8; ++k) v[0][k] *= 0x1p-100f, v[1][k] *= 0x1p-100f;
    }
    uint32_t w[8][kRandom ? 2 : 1];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if constexpr (kRandom) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float steps = __fmul_rz(v[c][k], __uint_as_float(by[k]));
          w[k][c] = step_by_chance(__float_as_uint(steps), drawn[c][k]);
        }
      } else {
        w[k][0] = steps_nearest(x[k][j], *reinterpret_cast<const __nv_bfloat162*>(&by[k]));
      }
    }
    if (clamps) {
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        if constexpr (kRandom) {
          w[k][0] = min(w[k][0], 0x07FFFFFFu), w[k][1] = min(w[k][1], 0x07FFFFFFu);
        } else {
          w[k][0] = __vminu2(w[k][0] & 0x000F000Fu, 0x00070007u);
        }
      }
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (j % 2 == 0) {
        even[k] = kRandom ? two_bytes<3>(w[k][0], w[k][kRandom]) : w[k][0];
        continue;
      }
      // Four nibbles, the signs of odd columns in bit 3 of theirs, of even ones in bits 23 and 31.
      uint32_t four;
      if constexpr (kRandom) {
        four = __byte_perm(even[k], w[k][1], 0x2271) * 16 + __byte_perm(even[k], w[k][0], 0x2270);
      } else {
        const uint32_t bytes = __byte_perm(even[k], w[k][0], 0x6420) & 0x07070707u;
        four = tile::permute_bytes(bytes + (bytes >> 4), 0, 0x4420);
      }
      four |= __byte_perm(x[k][j - 1], x[k][j], 0x5173) & 0x80808080u;
      if (j == 1) {
        half[k] = four;
      } else {
        half[k] = __byte_perm(half[k], four, 0x5410) |
                  (__byte_perm(half[k], four, 0x7632) >> 4 & 0x08080808u);
      }
    }
  }

  // The codes of all.
  __device__ __forceinline__ void finish(uint32_t (&codes)[8], QuantizeSmem& s, const Place& at) {
#pragma unroll
    for (int k = 0; k < 8; ++k) codes[k] = half[k];
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
__device__ __forceinline__ void load_columns(float (&v)[2][8], const uint32_t (&x)[8][4], int j,
                                             uint32_t at_turn) {
  uint32_t turn[8];
  load_eight(turn, at_turn);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    v[0][i] = __uint_as_float(x[i][j] * 0x10000u + turn[i]);
    v[1][i] = __uint_as_float((x[i][j] & 0xFFFF0000u) ^ turn[i]);
  }
}

struct Transform {
  int size, place;
  uint32_t at_turn;  // the sign bits of the thread's rows
  bool whole, all_whole;

  __device__ __forceinline__ Transform(RandomSmem& s, const RandomParams& p, const Tile& t,
                                       const Place& at)
      : size(p.size), place(at.lane_r) {
    uint32_t (&turn)[32] = s.turn[threadIdx.x / 32];
    const int lane = threadIdx.x % 32;
    turn[lane] = size == 0 ? 0 : p.signs << (31 - lane) & 0x80000000u;
    at_turn = tile::smem_addr(turn + 8 * place);
    whole = (at.r & ~(size - 1)) + size <= t.rows;
    all_whole = __all_sync(~0u, whole);
  }

  // Of two columns whose signs were turned.
  __device__ __forceinline__ void operator()(float (&v)[2][8], const uint32_t (&x)[8][4],
                                             int j) const {
    if (size == 0) return;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      butterfly<8>(v[c], size, place);
#pragma unroll
      for (int i = 0; i < 8; ++i) v[c][i] = __fmul_rn(v[c][i], transform_factor(size));
    }
    if (all_whole) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (!whole) v[0][i] = low_bf16(x[i][j]), v[1][i] = high_bf16(x[i][j]);
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
  bool odd;  // of two columns this lane has the scale of the second

  __device__ __forceinline__ ColumnCodes(const QuantizeTask& a, const Place& at, bool clamps)
      : carry(a.rule == ScaleRule::rceil  ? 0x3FFFFFu
              : a.rule == ScaleRule::even ? 0x200000u
                                          : 0),
        clamps(clamps),
        odd(at.lane_r % 2 != 0) {}

  // Codes of column c of two, scaled.
  __device__ __forceinline__ uint32_t codes_of(const float (&v)[8], float factor,
                                               const uint32_t (&drawn)[8]) const {
    uint32_t w[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if constexpr (kRandom) {
        w[i] = step_by_chance(__float_as_uint(__fmul_rz(v[i], factor)), drawn[i]);
      } else {
        w[i] = step_nearest(__fmul_rn(v[i], factor));
      }
    }
    if (clamps) {
#pragma unroll
      for (int i = 0; i < 8; ++i) w[i] = kRandom ? min(w[i], 0x07FFFFFFu) : min(w[i] & 0xFu, 7u);
    }
    return nibbles_of<kRandom ? 3 : 0>(w, v);
  }

  // What the numbers of a block are multiplied by.
  static __device__ __forceinline__ float factor_of(uint32_t e) {
    if constexpr (kRandom) return __fmul_rn(__uint_as_float((254 + kFp4Emax - e) << 23), kToSteps);
    return __uint_as_float((254 + kFp4Emax - 21 - e) << 23);
  }

  __device__ __forceinline__ void add(uint32_t& first, uint32_t& second, float (&v)[2][8], int j,
                                      const uint32_t (&drawn)[2][8], TileScales& scales,
                                      const Place& at, const QuantizeTask& a) {
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
        // A factor that fp32 does not hold.
        const bool nan = own == kNotFinite, far = own > 140;
        by[c] = factor_of(nan ? 127 : far ? own - 100 : own);
#pragma unroll
        for (int i = 0; i < 8; ++i)
          v[c][i] = nan ? 0.0f : far ? __fmul_rz(v[c][i], 0x1p-100f) : v[c][i];
      }
    }
    first = codes_of(v[0], by[0], drawn[0]), second = codes_of(v[1], by[1], drawn[1]);
    if (at.lane_r < 2) scales.blocks[at.band][at.c + 2 * j + at.lane_r] = static_cast<uint16_t>(e);
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

// Writes four bytes or eight of a row of `width` that are left.
template <class Word>
__device__ __forceinline__ void write_bytes(uint8_t* to, Word w, int width, bool vectors) {
  constexpr int kBytes = sizeof(Word);
  if (vectors) {
    *reinterpret_cast<Word*>(to) = w;
    return;
  }
  const uint8_t* const from = reinterpret_cast<const uint8_t*>(&w);
#pragma unroll
  for (int j = 0; j < kBytes; ++j) {
    if (j < width) to[j] = from[j];
  }
}

// Writes plain codes of rows where they lie as x does, two a byte or one.
struct PlainRows {
  uint8_t* to;
  int64_t ld;
  int rows, width;
  bool vectors;

  __device__ __forceinline__ PlainRows(const CodesOut& out, const Tile& t, const Place& at)
      : ld(out.ld), vectors(out.vectors) {
    const int half = out.nibbles ? 1 : 0;  // as a shift: of eight codes
    to = out.codes + (t.r0 + at.r) * ld + ((t.c0() + at.c) >> half);
    width = (t.last_col ? out.last_width : 128 >> half) - (at.c >> half);
    rows = width > 0 ? t.rows - at.r : 0;
  }
  template <class Word>
  __device__ __forceinline__ void write(int k, Word w) {
    if (k < rows) write_bytes(to, w, width, vectors);
    to += ld;
  }
};

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
    write_bytes(to, make_uint2(w.x, w.y), width, out.vectors);
    if (width > 8) write_bytes(to + 8, make_uint2(w.z, w.w), width - 8, out.vectors);
  }
}

template <bool kRandom>
__global__ void __launch_bounds__(kQuantizeThreads, 2)
    both_kernel(const __grid_constant__ RandomParams all) {
  __shared__ RandomSmem smem;
  QuantizeSmem& s = smem.q;
  tile::let_dependents_start();
  tile::await_predecessors();
  const QuantizeParams& p = all.q;
  Tile t;
  if (!find_rows(t, p, all.groups)) return;
  const Place at;
  uint32_t x[8][4];
  load_patch<Bf16>(
      x, static_cast<const Bf16*>(p.a.x) + (t.r0 + at.r) * p.a.x_stride + t.c0() + at.c,
      p.a.x_stride, t.rows - at.r, t.cols - at.c, p.x_vectors, &s.codes[0][0] + 64 * threadIdx.x);
  if (threadIdx.x == 0) s.row.clear(), s.col.clear();
  if (threadIdx.x < 16) {
    const tile::Fp4Table table(threadIdx.x);
    smem.tables[threadIdx.x] = threadIdx.x == kNanTable ? make_uint2(0x7F7F7F7Fu, 0x7F7F7F7Fu)
                                                        : make_uint2(table.low, table.high);
  }
  // The slots of load_patch() lie where draws are parked.
  if (kRandom && !p.x_vectors) __syncthreads();
  std::conditional_t<kRandom, Draws, NoDraws> draws(
      s, all.first + static_cast<uint32_t>(t.r0 + at.r), t.c0() + at.c,
      kRandom ? key_of(all.seed) : make_uint2(0, 0));
  const bool sums = p.a.col_sum != nullptr;
  if (sums) sum_cols<Bf16>(s.sums, x, at);

  const bool clamps = p.a.rule != ScaleRule::rceil;  // a scale may be too small
  uint32_t row_codes[8], col_codes[8];
  RowCodes<kRandom> rows(smem, x, at, p.a);
  ColumnCodes<kRandom> cols(p.a, at, clamps);
  const Transform transform(smem, all, t, at);
  __syncwarp();
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    float v[2][8];
    uint32_t drawn[2][8];
    load_columns(v, x, j, transform.at_turn);
    if (j == 2) draws.second_half();
    draws.of(drawn, j);
    if (p.row.enabled) {
      rows.add(x, v, j, drawn, clamps);
      if (rows.far) load_columns(v, x, j, transform.at_turn);
    }
    if (p.col.enabled) {
      transform(v, x, j);
      cols.add(col_codes[2 * j], col_codes[2 * j + 1], v, j, drawn, s.col, at, p.a);
    }
  }
  bool nan = false;
  if (p.row.enabled) {
    rows.finish(row_codes, s, at);
    nan = rows.nan;
  }
  if (p.col.enabled) {
    nan |= cols.finish(s.col, col_codes, at);
  }
  nan = __syncthreads_or(nan);
  const TileClasses classes = finish_scales<kFmt, true>(p, s, t, sums);

  if (p.row.packed) {
    const Shifts shifts(s.row, classes.row_exponent, true, classes.row);
    const uint4 tables = tables_of(s.row, shifts, at.row_block, at.r, nan);
    RowWriter out(p.row, t, at);
#pragma unroll
    for (int k = 0; k < 8; ++k)
      out.write(k, tile::Fp4Table(smem.tables[half_of(tables, k)]).eight(row_codes[k]));
  } else if (p.row.enabled) {
    PlainRows out(p.row, t, at);
#pragma unroll
    for (int k = 0; k < 8; ++k) out.write(k, row_codes[k]);
  }
  if (!p.col.enabled) return;
  if (p.a.col_lies_as_x) {
    // Bytes of two rows each, as rows of eight columns.
    const auto turn = [&](int c) {
      tile::transpose_bytes(col_codes[c], col_codes[c + 1], col_codes[c + 2], col_codes[c + 3]);
    };
    turn(0), turn(4);
    PlainRows out(p.col, t, at);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const uint32_t left = col_codes[k / 2] >> (4 * (k % 2)) & 0x0F0F0F0Fu;
      const uint32_t right = col_codes[k / 2 + 4] >> (4 * (k % 2)) & 0x0F0F0F0Fu;
      out.write(k, make_uint2(left, right));
    }
    return;
  }
  const int swizzle = at.c / 8 % 8;
  if (p.col.packed) {
    const Shifts shifts(s.col, classes.col_exponent, true, classes.col);
    const uint4 tables = tables_of(s.col, shifts, at.band, at.c, nan);
    uint8_t* const to = &s.codes[at.c][16 * (at.r / 16 ^ swizzle) + at.r % 16];
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      *reinterpret_cast<uint2*>(to + 128 * c) =
          tile::Fp4Table(smem.tables[half_of(tables, c)]).eight(col_codes[c]);
    }
    __syncthreads();
    write_cols<false>(s.codes, p.col, t);
  } else {
    uint8_t* const to = &s.codes[at.c][16 * (at.band ^ swizzle) + 4 * at.lane_r];
#pragma unroll
    for (int c = 0; c < 8; ++c) *reinterpret_cast<uint32_t*>(to + 128 * c) = col_codes[c];
    __syncthreads();
    write_col_words(s.codes, p.col, t);
  }
}

}  // namespace

Status quantize_both_randomly(const RandomParams& p, cudaStream_t stream) {
  const auto kernel = p.seed != nullptr ? both_kernel<true> : both_kernel<false>;
  return launch_early(kernel, {tile_grid(p.q, p.q.col_tiles), kQuantizeThreads, stream}, p);
}

}  // namespace te_mx::sm90
