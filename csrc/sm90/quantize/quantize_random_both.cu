// Both directions of a bf16 matrix, or of groups of its rows, to MXFP4 from one read, rounded
// stochastically or to nearest even, the columns after a Hadamard transform or without one.
//
//   read; random words of all elements
//   rows: scales of blocks, which lie in four lanes, and codes to registers, four bits each
//   columns, two at a time: transformed in fp32, scales, codes to registers
//   classes; codes of E4M3 by tables, as the tile's scales want them
//
// A thread has 8 x 8 elements, as in the quantizer, and draws once for both directions.
#include "quantize/random_codes.cuh"

namespace te_mx::sm90 {

namespace {

using Bf16 = __nv_bfloat16;
constexpr tile::Fp8 kFmt = tile::Fp8::e2m1;
constexpr uint32_t kNanTable = 15;

struct RandomSmem {
  QuantizeSmem q;
  alignas(8) uint2 tables[16];  // of tile_codes(): of fp4.cuh's u, and of NaN
};

// What a thread knows about rounding.
template <bool kRandom>
struct Rounding {
  bool clamps;  // a scale may be too small for the largest number
  uint4 words[kRandom ? 8 : 1];

  // Codes of eight numbers, scaled and times kToSteps; `at` gives one by its place, rounded down or
  // up, `random` the word that it draws from and whether from the upper half.
  template <class Down, class Up, class Random>
  __device__ __forceinline__ uint32_t magnitudes(const Down& down, const Up& up,
                                                 const Random& random) const {
    uint32_t w[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if constexpr (kRandom) {
        w[i] = step_by_chance(__float_as_uint(down(i)), random(i));
      } else {
        w[i] = step_nearest(__float_as_uint(down(i)), __float_as_uint(up(i)));
      }
    }
    if (clamps) {
#pragma unroll
      for (int i = 0; i < 8; ++i) w[i] = min(w[i], 0x07FFFFFFu);
    }
    return nibbles_of(w);
  }

  // What row k and column c of a thread's elements draw, from bit 8 on.
  __device__ __forceinline__ uint32_t drawn(int k, int c) const {
    const uint4& w = words[kRandom ? k : 0];
    const uint32_t word = c / 2 == 0 ? w.x : c / 2 == 1 ? w.y : c / 2 == 2 ? w.z : w.w;
    return __byte_perm(word, 0, c % 2 == 0 ? 0x4104 : 0x4324);
  }
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

// Codes of a thread's rows, and the entries of the blocks in rows folded_row() and the next one.
template <bool kRandom>
__device__ __forceinline__ BlockPair code_rows(uint32_t (&codes)[8], QuantizeSmem& s,
                                               const uint32_t (&x)[8][4], const Place& at,
                                               const QuantizeTask& a, const Rounding<kRandom>& by) {
  using In = Input<Bf16>;
  uint32_t m[4];
#pragma unroll
  for (int k = 0; k < 8; k += 2) {
    m[k / 2] = In::larger_halves(
        In::larger(In::larger(x[k][0], x[k][1]), In::larger(x[k][2], x[k][3])),
        In::larger(In::larger(x[k + 1][0], x[k + 1][1]), In::larger(x[k + 1][2], x[k + 1][3])));
  }
  const uint32_t most = fold<Bf16, 1>(m);
  BlockPair pair = block_pair<Bf16, kFmt>(most, a);
  *reinterpret_cast<uint32_t*>(&s.row_factors.of[at.row_block][at.folded_row()]) = pair.factors;
  __syncwarp();
  const uint4 factors = *reinterpret_cast<const uint4*>(&s.row_factors.of[at.row_block][at.r]);
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const uint32_t factor = half_of(factors, k) * 0x10001u;
    uint32_t scaled[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const __nv_bfloat162 r = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&x[k][j]),
                                       *reinterpret_cast<const __nv_bfloat162*>(&factor));
      scaled[j] = *reinterpret_cast<const uint32_t*>(&r);
    }
    // Exact but far below the smallest code.
    const auto steps = [&](int c) {
      return __fmul_rz(c % 2 == 0 ? low_bf16(scaled[c / 2]) : high_bf16(scaled[c / 2]), kToSteps);
    };
    codes[k] =
        with_signs(by.magnitudes(steps, steps, [&](int c) { return by.drawn(k, c); }),
                   __byte_perm(x[k][0], x[k][1], 0x7531), __byte_perm(x[k][2], x[k][3], 0x7531));
  }
  if (__any_sync(~0u, pair.nan)) {
#pragma unroll
    for (int k = 0; k < 8; ++k) codes[k] = half_of(factors, k) == 0x7FFFu ? 0 : codes[k];
  }
  // Numbers of a block that the scales do not reach may be rounded up.
  const uint32_t zeros = ~pair.entries & 0x01000100u;
  if (__any_sync(~0u, zeros != 0 && (most & 0x7FFF7FFFu) != 0)) {
    const uint32_t found = nonzero_blocks<1>(codes) >> (at.folded_row() - at.r);
    pair.entries |= (found & 1) * kCounts | (found >> 1 & 1) * (kCounts << 16);
  }
  return pair;
}

// Two numbers of bf16 a word, or what they are after the transform.
__device__ __forceinline__ void load_columns(float (&v)[2][8], const uint32_t (&x)[8][4], int j) {
#pragma unroll
  for (int i = 0; i < 8; ++i) v[0][i] = low_bf16(x[i][j]), v[1][i] = high_bf16(x[i][j]);
}

struct Transform {
  int size, place;
  uint32_t signs;  // of the thread's rows, from bit 0 and from bit 16 on
  bool whole, all_whole;

  __device__ __forceinline__ Transform(const RandomParams& p, const Tile& t, const Place& at)
      : size(p.size), place(at.lane_r), signs((p.signs >> (8 * at.lane_r) & 0xFF) * 0x10001u) {
    whole = (at.r & ~(size - 1)) + size <= t.rows;
    all_whole = __all_sync(~0u, whole);
  }

  __device__ __forceinline__ void operator()(float (&v)[2][8], const uint32_t (&x)[8][4],
                                             int j) const {
    if (size == 0) return load_columns(v, x, j);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t word = x[i][j] ^ (signs << (15 - i) & 0x80008000u);
      v[0][i] = low_bf16(word), v[1][i] = high_bf16(word);
    }
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

// Codes of a thread's columns, and the entries of the blocks in two of them: 2 lane_r and the next.
template <bool kRandom>
__device__ __forceinline__ BlockPair code_columns(uint32_t (&codes)[8], const uint32_t (&x)[8][4],
                                                  const Place& at, const QuantizeTask& a,
                                                  const Rounding<kRandom>& by,
                                                  const Transform& transform) {
  // The carry of bf16, and behind it nothing or all ones.
  const uint32_t carry = a.rule == ScaleRule::rceil  ? 0x3FFFFFu
                         : a.rule == ScaleRule::even ? 0x200000u
                                                     : 0;
  uint32_t mine = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    float v[2][8];
    transform(v, x, j);
    float most[2] = {v[0][0], v[1][0]};
#pragma unroll
    for (int i = 1; i < 8; ++i) {
      most[0] = tile::max_magnitude(most[0], v[0][i]);
      most[1] = tile::max_magnitude(most[1], v[1][i]);
    }
    const uint32_t both = exponents_of(most[0], most[1], carry, a);
    mine = at.lane_r == j ? both : mine;
    const bool far = __any_sync(~0u, ((both + 0x00700070u) & 0x03000300u) != 0);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const uint32_t e = c == 0 ? both & 0xFFFF : both >> 16;
      uint32_t field = 254 + kFp4Emax - e;
      const uint32_t signs[2] = {
          __byte_perm(__byte_perm(__float_as_uint(v[c][0]), __float_as_uint(v[c][1]), 0x73),
                      __byte_perm(__float_as_uint(v[c][2]), __float_as_uint(v[c][3]), 0x73),
                      0x5410),
          __byte_perm(__byte_perm(__float_as_uint(v[c][4]), __float_as_uint(v[c][5]), 0x73),
                      __byte_perm(__float_as_uint(v[c][6]), __float_as_uint(v[c][7]), 0x73),
                      0x5410)};
      // A factor that fp32 does not hold.
      if (far && e > 140) {
        field += 100;
#pragma unroll
        for (int i = 0; i < 8; ++i) v[c][i] = __fmul_rz(v[c][i], 0x1p-100f);
      }
      const float factor = __fmul_rn(__uint_as_float(field << 23), kToSteps);
      const uint32_t n = by.magnitudes([&](int i) { return __fmul_rz(v[c][i], factor); },
                                       [&](int i) { return __fmul_ru(fabsf(v[c][i]), factor); },
                                       [&](int i) { return by.drawn(i, 2 * j + c); });
      codes[2 * j + c] = with_signs(n, signs[0], signs[1]);
      if (far && e == kNotFinite) codes[2 * j + c] = 0;
    }
  }
  BlockPair pair{mine - kFp4Emax * 0x10001u, 0, false};
  const uint32_t nans = __vcmpgeu2(mine, kNotFinite * 0x10001u);
  pair.nan = nans != 0;
  pair.entries = ((pair.entries | kCounts * 0x10001u) & ~nans) | (0x00FF00FFu & nans);
  const uint32_t e = pair.entries & 0x00FF00FFu;
  if (__any_sync(~0u, (e & 0xFFFF) == 0 || e >> 16 == 0)) {
    const uint32_t found = nonzero_blocks<8>(codes) >> (2 * at.lane_r);
    pair.entries = e | (found & 1) * kCounts | (found >> 1 & 1) * (kCounts << 16);
  }
  return pair;
}

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
  bool vectors, nibbles;

  __device__ __forceinline__ PlainRows(const CodesOut& out, const Tile& t, const Place& at)
      : ld(out.ld), vectors(out.vectors), nibbles(out.nibbles) {
    const int half = nibbles ? 2 : 1;
    to = out.codes + (t.r0 + at.r) * ld + (t.c0() + at.c) / half;
    width = (t.last_col ? out.last_width : 128 / half) - at.c / half;
    rows = width > 0 ? t.rows - at.r : 0;
  }
  // Of codes of E4M3.
  __device__ __forceinline__ void write(int k, uint2 w) {
    if (k < rows) {
      w = {tile::fp4_of_fp8x4(w.x), tile::fp4_of_fp8x4(w.y)};
      if (nibbles) {
        write_bytes(to, tile::pack_nibbles(w.x, w.y), width, vectors);
      } else {
        write_bytes(to, w, width, vectors);
      }
    }
    to += ld;
  }
};

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
  const bool sums = p.a.col_sum != nullptr;
  if (sums) sum_cols<Bf16>(s.sums, x, at);

  Rounding<kRandom> by;
  by.clamps = p.a.rule != ScaleRule::rceil;
  if constexpr (kRandom) {
    draw(by.words, all.first + static_cast<uint32_t>(t.r0 + at.r), t.c0() + at.c, key_of(all.seed));
  }
  uint32_t row_codes[8], col_codes[8];
  bool nan = false;
  if (p.row.enabled) {
    const BlockPair pair = code_rows(row_codes, s, x, at, p.a, by);
    s.row.add_blocks(at.folded_row(), at.row_block, pair.entries);
    s.row.add_range(pair.entries);
    nan = pair.nan;
  }
  if (p.col.enabled) {
    const Transform transform(all, t, at);
    const BlockPair pair = code_columns(col_codes, x, at, p.a, by, transform);
    s.col.add_blocks(at.c + 2 * at.lane_r, at.band, pair.entries);
    s.col.add_range(pair.entries);
    nan |= pair.nan;
  }
  nan = __syncthreads_or(nan);
  const TileClasses classes = finish_scales<kFmt, true>(p, s, t, sums);

  if (p.row.enabled) {
    const Shifts shifts(s.row, classes.row_exponent, p.row.packed, classes.row);
    const uint4 tables = tables_of(s.row, shifts, at.row_block, at.r, nan);
    const auto code = [&](int k) {
      return tile_codes(row_codes[k], smem.tables[half_of(tables, k)]);
    };
    if (p.row.packed) {
      RowWriter out(p.row, t, at);
#pragma unroll
      for (int k = 0; k < 8; ++k) out.write(k, code(k));
    } else {
      PlainRows out(p.row, t, at);
#pragma unroll
      for (int k = 0; k < 8; ++k) out.write(k, code(k));
    }
  }
  if (!p.col.enabled) return;
  const Shifts shifts(s.col, classes.col_exponent, p.col.packed, classes.col);
  const uint4 tables = tables_of(s.col, shifts, at.band, at.c, nan);
  uint2 cols[8];
#pragma unroll
  for (int c = 0; c < 8; ++c) cols[c] = tile_codes(col_codes[c], smem.tables[half_of(tables, c)]);
  if (p.a.col_lies_as_x) {
    const auto turn = [&](int c, uint32_t uint2::* half) {
      tile::transpose_bytes(cols[c].*half, cols[c + 1].*half, cols[c + 2].*half, cols[c + 3].*half);
    };
    turn(0, &uint2::x), turn(4, &uint2::x), turn(0, &uint2::y), turn(4, &uint2::y);
    PlainRows out(p.col, t, at);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      out.write(
          k, k < 4 ? make_uint2(cols[k].x, cols[k + 4].x) : make_uint2(cols[k - 4].y, cols[k].y));
    }
    return;
  }
  uint8_t* const to = &s.codes[at.c][16 * (at.r / 16 ^ at.c / 8 % 8) + at.r % 16];
#pragma unroll
  for (int c = 0; c < 8; ++c) *reinterpret_cast<uint2*>(to + 128 * c) = cols[c];
  __syncthreads();
  if (p.col.packed) {
    write_cols<false>(s.codes, p.col, t);
  } else if (p.col.nibbles) {
    write_col_nibbles(s.codes, p.col, t);
  } else {
    write_cols<true>(s.codes, p.col, t);
  }
}

}  // namespace

Status quantize_both_randomly(const RandomParams& p, cudaStream_t stream) {
  cudaLaunchAttribute early = early_start();
  cudaLaunchConfig_t config{};
  config.gridDim = tile_grid(p.q, p.q.col_tiles);
  config.blockDim = dim3(kQuantizeThreads);
  config.stream = stream;
  config.attrs = &early, config.numAttrs = 1;
  const auto kernel = p.seed != nullptr ? both_kernel<true> : both_kernel<false>;
  return started(cudaLaunchKernelEx(&config, kernel, p));
}

}  // namespace te_mx::sm90
