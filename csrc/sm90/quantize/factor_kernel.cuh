// Quantizes x [rows, cols] to codes with one fp32 scale for 1 x 128 along both directions, or for
// 128 x 128, from one read: by tiles of 128 x 128, a thread with 8 x 8 elements
// (quantize_scan.cuh). Columns with powers of two may be aligned (factor_aligned.cuh).
//
//   read, largest magnitudes of each warp's part of the rows and of the columns
//   factors that elements are multiplied by, and scales, their inverses
//   codes of the rows, and of the columns through shared memory, transposed
//
// A block that is not finite has scale NaN, and all its codes are NaN.
#pragma once

#include "quantize/factor_aligned.cuh"

namespace te_mx::sm90 {

// The blocks that share a scale, and how the columns lie.
enum class FactorBlocks { rows, rows_aligned, squares };

// Where scales go: that of block row r and step k along K is scales[r * row_step + k * k_step].
struct FactorsOut {
  float* scales;
  int64_t row_step, k_step;
  bool pad;  // writes those of rows past the end, up to whole tiles and an even number of them
};

struct FactorParams : QuantizeParams {
  FactorsOut row_factors, col_factors;
  float epsilon;
  bool power_of_two;
  bool aligned;  // FactorBlocks::rows_aligned, for kernels that have both
};

template <class T>
struct FactorSmem {
  using Word = typename Input<T>::Word;
  float sums[4][128];  // of the columns over 32 rows
  ColumnsSeen seen;
  alignas(16) int4 place;  // of the tile, for who has no registers for it
  alignas(16) float row_factors[128];
  alignas(16) float col_factors[128];
  Word row_most[2][64];                 // of two neighbouring rows in 64 columns
  Word col_most[4][64];                 // of two neighbouring columns in 32 rows
  alignas(16) uint8_t codes[128][128];  // of the columns, as in QuantizeSmem
};

struct Factor {
  float factor, scale;
};

// What a block is multiplied by, and its inverse, from its largest magnitude.
template <tile::Fp8 kFmt>
__device__ __forceinline__ Factor factor_of_block(float amax, float epsilon, bool power_of_two) {
  constexpr float kMost = 0x1p126f;  // its inverse is the smallest normal number
  if (__float_as_uint(amax) >= 0x7F800000u) {
    const float nan = __uint_as_float(0x7FC00000u);
    return {nan, nan};
  }
  amax = fmaxf(amax, epsilon);
  float factor = __fdiv_rn(tile::kFp8Max<kFmt>, amax);
  if (power_of_two) factor = __uint_as_float(__float_as_uint(factor) & 0x7F800000u);
  // NOTE: one fp32 number below, the quotient could round up to more.
  if (amax < tile::kFp8Max<kFmt> * 0x1p-126f) factor = kMost;
  if (amax == 0.0f) factor = 1.0f;
  return {factor, __frcp_rn(factor)};
}

// Of two rows or columns that a word stands for.
template <class T>
__device__ __forceinline__ float magnitude_of(typename Input<T>::Word w, int which) {
  const float2 both = Input<T>::magnitudes(w);
  return which == 0 ? both.x : both.y;
}

// Scale i of the 128 of a tile, and where it is the last one of an odd number, that of the tile
// that pads it.
__device__ __forceinline__ void write_scale(const FactorsOut& out, float scale, int i, int tile,
                                            int k, int inside, bool last) {
  float* const to = out.scales + (128ll * tile + i) * out.row_step + k * out.k_step;
  if (i < inside || out.pad) *to = i < inside ? scale : 1.0f;
  if (out.pad && last && tile % 2 == 0) to[128 * out.row_step] = 1.0f;
}

// Whether a block with this largest magnitude has codes that are not 0.
template <tile::Fp8 kFmt>
__device__ __forceinline__ bool has_codes(float amax, float factor) {
  return (tile::fp8x2<kFmt>(amax * factor, 0.0f) & 0x7F) != 0;
}

// The entry of a block (tile_classes.cuh) whose scale is a power of two.
template <tile::Fp8 kFmt>
__device__ __forceinline__ uint32_t column_entry(float amax, const Factor& f) {
  const uint32_t e = __float_as_uint(f.scale) >> 23;
  return e | (e != 255 && has_codes<kFmt>(amax, f.factor) ? kCounts : 0);
}

template <class T, tile::Fp8 kFmt>
__device__ __forceinline__ uint2 codes_by_row(const float (&v)[8], float f) {
  return {tile::fp8x4<kFmt>(v[0] * f, v[1] * f, v[2] * f, v[3] * f),
          tile::fp8x4<kFmt>(v[4] * f, v[5] * f, v[6] * f, v[7] * f)};
}
template <class T, tile::Fp8 kFmt>
__device__ __forceinline__ uint2 codes_by_column(const float (&v)[8], const float (&f)[8]) {
  return {tile::fp8x4<kFmt>(v[0] * f[0], v[1] * f[1], v[2] * f[2], v[3] * f[3]),
          tile::fp8x4<kFmt>(v[4] * f[4], v[5] * f[5], v[6] * f[6], v[7] * f[7])};
}

template <class T>
__device__ __forceinline__ void values_of(float (&v)[8], const typename Input<T>::Word (&x)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float2 two = Input<T>::values(x[j]);
    v[2 * j] = two.x, v[2 * j + 1] = two.y;
  }
}

// Largest magnitudes of the warp's 32 rows in 64 columns, and of its columns in 32 rows.
template <class T>
__device__ __forceinline__ void scan_factors(FactorSmem<T>& s,
                                             const typename Input<T>::Word (&x)[8][4],
                                             const Place& at) {
  using In = Input<T>;
  typename In::Word rows[4], cols[4];
#pragma unroll
  for (int k = 0; k < 8; k += 2) {
    rows[k / 2] = In::larger_halves(
        In::larger(In::larger(x[k][0], x[k][1]), In::larger(x[k][2], x[k][3])),
        In::larger(In::larger(x[k + 1][0], x[k + 1][1]), In::larger(x[k + 1][2], x[k + 1][3])));
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    cols[j] = In::larger(x[0][j], x[1][j]);
#pragma unroll
    for (int k = 2; k < 8; ++k) cols[j] = In::larger(cols[j], x[k][j]);
  }
  const typename In::Word row = fold<T, 1>(rows);
  s.row_most[at.half][at.folded_row() / 2] = In::larger(row, In::shuffle_xor(row, 4));
  s.col_most[at.band][at.folded_col() / 2] = fold<T, 8>(cols);
}

// The scale of block r and step k, and behind the last one those that pad it.
__device__ __forceinline__ void write_square(const FactorsOut& out, float scale, int r, int k,
                                             bool last) {
  if (out.scales == nullptr) return;
  float* const to = out.scales + r * out.row_step + k * out.k_step;
  *to = scale;
  if (!out.pad || !last) return;
  for (int i = 1; (r + i) % 4 != 0; ++i) to[i * out.row_step] = 1.0f;
}

// One factor for the tile: the same codes in both directions.
template <class T, tile::Fp8 kFmt>
__device__ __forceinline__ float scan_tile(FactorSmem<T>& s, const FactorParams& p,
                                           const typename Input<T>::Word (&x)[8][4],
                                           const Tile& t) {
  using In = Input<T>;
  typename In::Word most = x[0][0];
#pragma unroll
  for (int i = 1; i < 32; ++i) most = In::larger(most, x[i / 4][i % 4]);
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) most = In::larger(most, In::shuffle_xor(most, lanes));
  if (threadIdx.x % 32 == 0) s.row_most[0][threadIdx.x / 32] = most;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kQuantizeThreads / 32; ++i) most = In::larger(most, s.row_most[0][i]);
  most = In::larger_halves(most, most);
  const Factor f = factor_of_block<kFmt>(magnitude_of<T>(most, 0), p.epsilon, p.power_of_two);
  if (threadIdx.x == 0) write_square(p.row_factors, f.scale, t.rt, t.ct, t.last_row);
  if (threadIdx.x == 32) write_square(p.col_factors, f.scale, t.ct, t.rt, t.last_col);
  return f.factor;
}

// What follows reading a tile, of its elements x. kSums: column sums may be wanted.
template <class T, tile::Fp8 kFmt, FactorBlocks kBlocks, bool kSums = true>
__device__ __forceinline__ void quantize_factor_patch(const FactorParams& p, FactorSmem<T>& s,
                                                      const typename Input<T>::Word (&x)[8][4],
                                                      Tile t, const Place& at) {
  constexpr bool kSquare = kBlocks == FactorBlocks::squares;
  constexpr bool kAligned = kBlocks == FactorBlocks::rows_aligned;
  const bool sums = kSums && p.a.col_sum != nullptr;
  if (sums) sum_cols<T>(s.sums, x, at);
  const bool row_side = threadIdx.x < 128;
  const int i = threadIdx.x % 128;
  float tile_factor;
  uint32_t entry = 0;  // of this thread's column
  if constexpr (kSquare) {
    tile_factor = scan_tile<T, kFmt>(s, p, x, t);
  } else {
    scan_factors<T>(s, x, at);
    if (kAligned && threadIdx.x == 0) s.place = {t.rt, t.ct, t.cols, t.last_row};
    __syncthreads();
    typename Input<T>::Word most;
    if (row_side) {
      most = Input<T>::larger(s.row_most[0][i / 2], s.row_most[1][i / 2]);
    } else {
      most = Input<T>::larger(Input<T>::larger(s.col_most[0][i / 2], s.col_most[1][i / 2]),
                              Input<T>::larger(s.col_most[2][i / 2], s.col_most[3][i / 2]));
    }
    const Factor f = factor_of_block<kFmt>(magnitude_of<T>(most, i % 2), p.epsilon, p.power_of_two);
    if (row_side) {
      s.row_factors[i] = f.factor;
      if (p.row.enabled) write_scale(p.row_factors, f.scale, i, t.rt, t.ct, t.rows, t.last_row);
    } else {
      s.col_factors[i] = f.factor;
      if constexpr (kAligned) {
        entry = column_entry<kFmt>(magnitude_of<T>(most, i % 2), f);
        s.seen.add(threadIdx.x / 32 - 4, entry);
      } else {
        if (p.col.enabled) write_scale(p.col_factors, f.scale, i, t.ct, t.rt, t.cols, t.last_col);
      }
    }
  }
  if (!kSquare || sums) __syncthreads();
  if (sums && row_side && i < t.cols) {
    p.a.col_sum_ws[t.rt * p.a.cols + t.c0() + i] =
        (s.sums[0][i] + s.sums[1][i]) + (s.sums[2][i] + s.sums[3][i]);
  }

  uint2 cols[8];
  float col_factors[8];
  if constexpr (kAligned) {
    const AlignedTile aligned(s.seen, p.a.spread);
    tile_factor = aligned.factor();
    if (!row_side) {
      const auto counts = [&](int b) {
        return has_codes<kFmt>(magnitude_of<T>(s.col_most[b][i / 2], i % 2), s.col_factors[i]);
      };
      write_words(aligned.word(entry, t.rows, counts), aligned.exponent, aligned.cls, i,
                  tile_words(p.a.col_packed.scales, t.rt, t.ct, p.col_tiles),
                  t.last_col && (p.col_tiles & 1) != 0);
    }
  } else if constexpr (!kSquare) {
#pragma unroll
    for (int j = 0; j < 8; j += 4) {
      const float4 four = *reinterpret_cast<const float4*>(&s.col_factors[at.c + j]);
      col_factors[j] = four.x, col_factors[j + 1] = four.y;
      col_factors[j + 2] = four.z, col_factors[j + 3] = four.w;
    }
  }
  RowWriter out(p.row, t, at);
  if (!p.row.enabled) out.rows = 0;
  const bool vectors = p.row.vectors || !p.row.enabled;
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    float v[8];
    values_of<T>(v, x[k]);
    const uint2 row = codes_by_row<T, kFmt>(v, kSquare ? tile_factor : s.row_factors[at.r + k]);
    if constexpr (kSquare) {
      cols[k] = row;
    } else if constexpr (kAligned) {
      // Rounding at once gives the bytes of rounding twice, but for codes that come out subnormal.
      cols[k] = codes_by_row<T, kFmt>(v, tile_factor);
      const uint32_t again =
          tile::fp8x4_subnormal<kFmt>(cols[k].x) | tile::fp8x4_subnormal<kFmt>(cols[k].y);
      // NOTE: what is known of the tile is worked out again, for want of registers.
      if (isnan(tile_factor) || (again & 0x80808080u) != 0)
        cols[k] =
            aligned_codes<T, kFmt>(x[k], &s.col_factors[at.c], AlignedTile(s.seen, p.a.spread));
    } else {
      cols[k] = codes_by_column<T, kFmt>(v, col_factors);
    }
    if (vectors) {
      out.write(k, row);
    } else {
      out.write_bytes(k, row);
    }
  }
  if constexpr (kAligned) {
    const int4 place = s.place;
    t.rt = place.x, t.ct = place.y, t.cols = place.z, t.last_row = place.w != 0;
  }
  if (!p.col.enabled) return;
  if (p.a.col_lies_as_x) {
    write_rows<true>(p.col, t, at, [&](int k) { return cols[k]; });
    return;
  }
  stage_cols(s.codes, cols, at);
  __syncthreads();
  write_cols<true>(s.codes, p.col, t);
}

template <class T, tile::Fp8 kFmt, FactorBlocks kBlocks, class Where>
__device__ __forceinline__ void quantize_factor_tile(const FactorParams& all, const Where& where,
                                                     FactorSmem<T>& s) {
  Tile t;
  if (!where.find(t, all)) return;
  typename Where::template Outputs<FactorParams> p = where.outputs(all, t);
  const Place at;
  typename Input<T>::Word x[8][4];
  load_patch<T>(
      x, static_cast<const T*>(where.x(all, t)) + (t.r0 + at.r) * p.a.x_stride + t.c0() + at.c,
      p.a.x_stride, t.rows - at.r, t.cols - at.c, p.x_vectors, &s.codes[0][0] + 64 * threadIdx.x);
  quantize_factor_patch<T, kFmt, kBlocks>(p, s, x, t, at);
}

// CTAs on an SM: as many as registers allow. Parameters that are a copy (of a stack) take some.
template <class T, FactorBlocks kBlocks, class Where>
constexpr int factor_ctas() {
  constexpr bool kCopy = !std::is_reference_v<typename Where::template Outputs<FactorParams>>;
  return sizeof(T) != 2 ? 2 : kCopy && kBlocks == FactorBlocks::rows_aligned ? 3 : 4;
}

template <class T, tile::Fp8 kFmt, FactorBlocks kBlocks, class Where>
__global__ void __launch_bounds__(kQuantizeThreads, factor_ctas<T, kBlocks, Where>())
    factor_kernel(const __grid_constant__ FactorParams p, const __grid_constant__ Where where) {
  __shared__ FactorSmem<T> s;
  tile::let_dependents_start();
  if (!p.beside) tile::await_predecessors();
  quantize_factor_tile<T, kFmt, kBlocks>(p, where, s);
  if (p.beside) tile::await_predecessors();
}

}  // namespace te_mx::sm90
