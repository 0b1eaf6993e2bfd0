// Quantizes x [rows, cols] along both directions from one read, by tiles of 128 x 128, packing on
// the way out. A thread keeps 8 x 8 elements in registers, a warp 32 x 64: whole blocks of both
// directions.
//
//   read, block maxima and scale bytes of both directions, ranges of the tile
//   classes, scale words
//   codes: one rounding serves both directions where both are tile-shared, else each has its own
//   codes of the columns through shared memory, transposed
#pragma once

#include "common/groups.cuh"
#include "quantize/quantize_codes.cuh"

namespace te_mx::sm90 {

// Codes of a tile that is tile-shared in every direction, without NaN: E is one, and
// rounding at once to codes shifted by it gives the bytes of rounding twice, for both directions,
// unless a code comes out subnormal: then its row is made again. Writes the rows.
template <class T, tile::Fp8 kFmt>
__device__ __forceinline__ void codes_once(uint2 (&cols)[8], const QuantizeSmem& s,
                                           const QuantizeParams& p,
                                           const typename Input<T>::Word (&x)[8][4], const Tile& t,
                                           const Place& at, uint32_t exponent) {
  const Shifts shifts{true, (exponent + 1) * 0x10001u, nullptr};
  const uint32_t shared = block_factor(exponent) * 0x10001u;
  RowWriter out(p.row, t, at);
  if (!p.row.enabled) out.rows = 0;
  // NOTE: in two halves; as one loop ptxas spills a register of norm_kernel.
#pragma unroll
  for (int k0 = 0; k0 < 8; k0 += 4) {
#pragma unroll
    for (int k = k0; k < k0 + 4; ++k) {
      uint2 row = {codes_of<T, kFmt>(x[k][0], x[k][1], shared, shared),
                   codes_of<T, kFmt>(x[k][2], x[k][3], shared, shared)};
      cols[k] = row;
      const uint32_t left = tile::fp8x4_subnormal<kFmt>(row.x) & 0x80808080u;
      const uint32_t right = tile::fp8x4_subnormal<kFmt>(row.y) & 0x80808080u;
      if (__builtin_expect((left | right) != 0, false)) {
        cols[k] = col_codes<T, kFmt>(x[k], s.col_factors, at.band, at.c, shifts);
        row = row_codes<T, kFmt>(x[k], s.row_factors, at.row_block, at.r + k, shifts);
      }
      out.write(k, row);
    }
  }
}

// The same of MXFP4, whose codes are always rounded to the scales of their own blocks: only what
// they are multiplied by is one.
template <class T, class Rounds>
__device__ __forceinline__ void fp4_codes_once(uint2 (&cols)[8], const QuantizeSmem& s,
                                               const QuantizeParams& p,
                                               const typename Input<T>::Word (&x)[8][4],
                                               const Tile& t, const Place& at, uint32_t exponent,
                                               const Rounds& rounds) {
  const uint32_t target = (exponent + 1) * 0x10001u, shared = block_factor(exponent) * 0x10001u;
  const auto rounding = [&](uint32_t factors) {
    return tile::Fp4Rounding{shared, tile::fp4_rounding(factors, target).magic};
  };
  const uint4 f = *reinterpret_cast<const uint4*>(&s.col_factors.of[at.band][at.c]);
  const tile::Fp4Rounding c0 = rounding(f.x), c1 = rounding(f.y), c2 = rounding(f.z),
                          c3 = rounding(f.w);
  RowWriter out(p.row, t, at);
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const auto words = rounds.words(k);
    if (p.row.enabled) {
      const auto row = rounding(s.row_factors.of[at.row_block][at.r + k] * 0x10001u);
      out.write(k, Rounds::template fp4<T>(x[k], row, row, row, row, words));
    }
    if (p.col.enabled) cols[k] = Rounds::template fp4<T>(x[k], c0, c1, c2, c3, words);
  }
}

// The classes of a tile's directions, and what its blocks share.
struct TileClasses {
  int row, col;
  uint32_t row_exponent, col_exponent;
};

// What follows scanning a tile and a barrier: its classes; writes scales and, with `sums`, partial
// column sums.
template <tile::Fp8 kFmt, bool kPlain>
__device__ __forceinline__ TileClasses finish_scales(const QuantizeParams& p, QuantizeSmem& s,
                                                     const Tile& t, bool sums) {
  const QuantizeTask& a = p.a;
  const int r = threadIdx.x % 128;
  const bool row_side = threadIdx.x < 128;
  const bool row_packed = kPlain ? p.row.packed : p.row.enabled;
  const bool col_packed = kPlain ? p.col.packed : p.col.enabled;
  const ScaleRange row_range = row_packed ? s.row.range() : ScaleRange{};
  const ScaleRange col_range = col_packed ? s.col.range() : ScaleRange{};
  const bool alone = p.by_rows && !row_range.empty();
  int row_class = row_packed ? TileScales::early_class(row_range, a.spread) : 2;
  if (alone) row_class = kUndecided;
  int col_class = col_packed ? TileScales::early_class(col_range, a.spread) : 2;
  if (row_class == kUndecided || col_class == kUndecided) {
    row_side ? s.row.examine(row_range, r, a.spread, kHeadroom<kFmt>, alone)
             : s.col.examine(col_range, r, a.spread, kHeadroom<kFmt>);
    __syncthreads();
    if (row_class == kUndecided) row_class = alone ? 1 : s.row.late_class(row_range);
    if (col_class == kUndecided) col_class = s.col.late_class(col_range);
  }
  const uint32_t row_exponent = row_range.exponent(kHeadroom<kFmt>);
  const uint32_t col_exponent = col_range.exponent(kHeadroom<kFmt>);
  if (row_side) {
    if (row_packed) {
      write_words(s.row, row_exponent, row_class, r,
                  tile_words(a.row_packed.scales, t.ct, t.rt, p.row_tiles),
                  t.last_row && (p.row_tiles & 1) != 0);
    } else if (kPlain && p.row.enabled) {
      write_plain_scales(s.row, r, a.row_scales, t.r0 + r, a.rows, t.ct * 4ll, (a.cols + 31) / 32,
                         false);
    }
    if (sums && r < t.cols) {
      a.col_sum_ws[t.rt * a.cols + t.c0() + r] =
          (s.sums[0][r] + s.sums[1][r]) + (s.sums[2][r] + s.sums[3][r]);
    }
  } else {
    if (col_packed) {
      write_words(s.col, col_exponent, col_class, r,
                  tile_words(a.col_packed.scales, t.rt, t.ct, p.col_tiles),
                  t.last_col && (p.col_tiles & 1) != 0);
    } else if (kPlain && p.col.enabled) {
      write_plain_scales(s.col, r, a.col_scales, t.c0() + r, a.cols, t.rt * 4ll, (a.rows + 31) / 32,
                         a.col_lies_as_x);
    }
  }
  return {row_class, col_class, row_exponent, col_exponent};
}

// What follows reading a tile: scales, classes, codes and sums of its elements x. kPlain: some
// direction is plain, or may be. kSums: column sums may be wanted; else their shared memory
// is the caller's. kOnce: whether codes are rounded at once where that may do; not where many would
// come out subnormal.
template <class T, tile::Fp8 kFmt, bool kPlain, bool kSums = true, bool kOnce = true,
          class Rounds = Nearest>
__device__ __forceinline__ void quantize_patch(const QuantizeParams& p, QuantizeSmem& s,
                                               const typename Input<T>::Word (&x)[8][4],
                                               const Tile& t, const Place& at,
                                               const Rounds& rounds = {}) {
  const QuantizeTask& a = p.a;
  if (threadIdx.x == 0) s.row.clear(), s.col.clear();
  if (p.row.enabled) scan_rows<T, kFmt>(s, x, at, a);
  if (p.col.enabled) scan_cols<T, kFmt>(s, x, at, a);
  const bool sums = kSums && a.col_sum != nullptr;
  if (sums) sum_cols<T>(s.sums, x, at);
  __syncthreads();

  const bool row_packed = kPlain ? p.row.packed : p.row.enabled;
  const bool col_packed = kPlain ? p.col.packed : p.col.enabled;
  const TileClasses classes = finish_scales<kFmt, kPlain>(p, s, t, sums);

  // NOTE: the floor rule saturates before the shift, so that rounding once would not do.
  const bool once = !kPlain && (kOnce || kIsFp4<kFmt>) && (!p.row.enabled || classes.row == 0) &&
                    (!p.col.enabled || classes.col == 0) && (kIsFp4<kFmt> || a.carry != 0) &&
                    *reinterpret_cast<const uint64_t*>(s.nan) == 0;
  uint2 cols[8];
  if (once) {
    const uint32_t exponent = p.row.enabled ? classes.row_exponent : classes.col_exponent;
    if constexpr (kIsFp4<kFmt>) {
      fp4_codes_once<T>(cols, s, p, x, t, at, exponent, rounds);
    } else {
      codes_once<T, kFmt>(cols, s, p, x, t, at, exponent);
    }
  } else {
    if (p.row.enabled) {
      const Shifts shifts(s.row, classes.row_exponent, row_packed, classes.row);
      const auto code = [&](int k) {
        return row_codes<T, kFmt, Rounds>(x[k], s.row_factors, at.row_block, at.r + k, shifts,
                                          rounds.words(k));
      };
      if (kPlain && kIsFp4<kFmt> && p.row.nibbles) {
        write_nibbles(p.row, t, at, code);
      } else {
        write_rows<kPlain>(p.row, t, at, code);
      }
    }
    if (p.col.enabled) {
      const Shifts shifts(s.col, classes.col_exponent, col_packed, classes.col);
#pragma unroll
      for (int k = 0; k < 8; ++k)
        cols[k] =
            col_codes<T, kFmt, Rounds>(x[k], s.col_factors, at.band, at.c, shifts, rounds.words(k));
    }
  }
  if (!p.col.enabled) return;
  if (kPlain && a.col_lies_as_x) {
    write_rows<true>(p.col, t, at, [&](int k) -> uint2 {
      if constexpr (kIsFp4<kFmt>)
        return {tile::fp4_of_fp8x4(cols[k].x), tile::fp4_of_fp8x4(cols[k].y)};
      return cols[k];
    });
    return;
  }
  stage_cols(s.codes, cols, at);
  __syncthreads();
  if (kPlain && kIsFp4<kFmt> && p.col.nibbles) {
    write_col_nibbles(s.codes, p.col, t);
  } else {
    write_cols<kPlain>(s.codes, p.col, t);
  }
}

// The rows of a tile that is placed, where they are grouped; or not: groups of none. False for a
// tile of no group. The whole warp calls it.
__device__ __forceinline__ bool place_rows(Tile& t, const GroupTable& groups) {
  if (groups.count == 0) return true;
  GroupRows group;
  if (!find_tile(groups, t.rt, group)) return false;
  const int inside = 128 * (t.rt - group.first_tile());
  t.r0 = group.start + inside, t.rows = min(128, group.size() - inside);
  t.last_row = false;  // whole tiles are written along K, and the words need no padding
  return true;
}

// The tile of a CTA; false for one without.
__device__ __forceinline__ bool find_rows(Tile& t, const QuantizeParams& p,
                                          const GroupTable& groups) {
  return find_tile(t, p) && place_rows(t, groups);
}

// The tiles of rows that lie in one matrix, or in up to kMostJoined that are one, their rows behind
// each other; or in groups of rows, with each of which tiles begin anew.
struct RowTiles {
  template <class Params>
  using Outputs = const Params&;
  static constexpr bool kOfWeights = false;  // not only
  GroupTable groups;                         // of none: rows are not grouped
  const int32_t* gather;                     // the row of x of each row, or null; of tiles only
  int begins[kMostJoined];    // the first tile of rows; past all tiles where there is no matrix
  uintptr_t xs[kMostJoined];  // where row 0 of all would be, if every row were this matrix's

  __device__ __forceinline__ const void* x(const QuantizeParams&, const Tile& t) const {
    uintptr_t from = xs[0];
#pragma unroll
    for (int i = 1; i < kMostJoined; ++i) from = t.rt < begins[i] ? from : xs[i];
    return reinterpret_cast<const void*>(from);
  }
  template <class Params>
  __device__ __forceinline__ const Params& outputs(const Params& p, const Tile&) const {
    return p;
  }
  // False for a CTA without a tile.
  __device__ __forceinline__ bool find(Tile& t, const QuantizeParams& p) const {
    return find_rows(t, p, groups);
  }
};

inline RowTiles row_tiles_of(const void* x, const GroupTable& groups = {}) {
  RowTiles rows{groups, nullptr};
  rows.xs[0] = reinterpret_cast<uintptr_t>(x);
  for (int i = 1; i < kMostJoined; ++i) rows.begins[i] = INT32_MAX;
  return rows;
}

template <class T, tile::Fp8 kFmt, bool kPlain, class Where>
__device__ __forceinline__ void quantize_tile(const QuantizeParams& all, const Where& where,
                                              QuantizeSmem& s) {
  Tile t;
  if (!where.find(t, all)) return;
  typename Where::template Outputs<QuantizeParams> p = where.outputs(all, t);
  const Place at;
  typename Input<T>::Word x[8][4];
  const T* const from = static_cast<const T*>(where.x(all, t)) + t.c0() + at.c;
  void* const slot = &s.codes[0][0] + 64 * threadIdx.x;
  if constexpr (!Where::kOfWeights && !kPlain) {
    if (where.gather != nullptr) {
      const int32_t* const rows = where.gather + t.r0 + at.r;
      const int left = t.cols > at.c ? t.rows - at.r : 0;
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const T* const row = from + (k < left ? __ldg(rows + k) : 0) * p.a.x_stride;
        load_row<T>(x[k], row, k < left ? t.cols - at.c : 0, p.x_vectors, slot);
      }
      quantize_patch<T, kFmt, kPlain>(p, s, x, t, at);
      return;
    }
  }
  load_patch<T>(x, from + (t.r0 + at.r) * p.a.x_stride, p.a.x_stride, t.rows - at.r, t.cols - at.c,
                p.x_vectors, slot);
  quantize_patch<T, kFmt, kPlain>(p, s, x, t, at);
}

// Where: RowTiles, or the Stack of quantize_places.cuh.
template <class T, tile::Fp8 kFmt, bool kPlain, class Where>
__global__ void __launch_bounds__(kQuantizeThreads, sizeof(T) == 2 ? 4 : 2)
    quantize_kernel(const __grid_constant__ QuantizeParams p, const __grid_constant__ Where where) {
  __shared__ QuantizeSmem s;
  tile::let_dependents_start();
  if (!p.beside) tile::await_predecessors();
  quantize_tile<T, kFmt, kPlain>(p, where, s);
  // Whoever waits for this kernel waits for the one that it ran beside, too.
  if (p.beside) tile::await_predecessors();
}

}  // namespace te_mx::sm90
