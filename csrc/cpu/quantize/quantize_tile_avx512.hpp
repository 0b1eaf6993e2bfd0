// The tile kernel for AVX-512: two passes over a tile held in the first-level cache. Everything
// here has internal linkage: two files compile it with different flags.
#pragma once

#include <cstdint>

#include "mxtile/mx/format.hpp"
#include "mxtile/quant/avx512.hpp"
#include "quantize/quantize_choose.hpp"

namespace te_mx::cpu::quantize_tile {
namespace {

namespace mx = mxtile::mx;
namespace q = mxtile::quant::avx512;
using q::Vector;

constexpr int kHalf = mx::kBlockSize;

// 64 columns of a tile as bf16, and the scales, those of rows in the form q::repeat takes. The copy
// matters: rows a power of two apart share so few cache sets that a second read of the input would
// miss.
template <Columns C>
struct alignas(64) Work {
  static constexpr int kRows = tile_rows(C);
  static constexpr int kPairs = C == Columns::transposed ? kRows / 2 : 1;

  uint16_t x[kRows][kTile];
  uint32_t row_base[2][kRows];
  uint32_t row_least[2][kRows];
  q::Scale col_scale[kRows / kHalf][2];
  uint8_t row_bytes[2][kRows];
  uint8_t col_bytes[2][kTile];
  uint16_t pairs[2][kPairs][kHalf];  // [half][row pair][column], as q::pair_bytes orders them;
  uint8_t two_rows[kTile];           // of 4 bits: pairs of what q::nibble_rows makes of two rows
  bool done;                         // by the exact path
};

// 64 adjacent elements as bf16, their values added to sums (if any) first.
template <DType D>
MXTILE_INLINE void load_row(const void* p, Vector* v, q::Sums* sums) {
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    if constexpr (D == DType::bf16) {
      v[i] = q::load(static_cast<const uint16_t*>(p) + i * q::kWords);
      if (sums) {
        sums->add(2 * i, q::bf16_to_f32(v[i], 0));
        sums->add(2 * i + 1, q::bf16_to_f32(v[i], 1));
      }
    } else {
      Vector f[2];
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const int first = i * q::kWords + h * q::kWords / 2;
        f[h] = D == DType::f32 ? q::load(static_cast<const uint32_t*>(p) + first)
                               : q::f16_to_f32(static_cast<const uint16_t*>(p) + first);
        if (sums) sums->add(2 * i + h, f[h]);
      }
      v[i] = q::to_odd_bf16(f[0], f[1]);
    }
  }
}

alignas(64) constexpr uint8_t kNothing[kTile * 4] = {};  // a row of zeros

// First pass over 32 rows: copy, sums, column and row scales. Returns whether some block needs the
// exact path.
template <DType D, class F, bool Rows, Columns C>
MXTILE_INLINE bool measure(const Tile& tile, int half, Work<C>& work, q::Sums* sums) {
  constexpr int64_t kBytes = D == DType::f32 ? 4 : 2;
  bool exact = false;
  Vector col_max[2] = {q::zero(), q::zero()};
  Vector row_max[2][4];  // [block][group of 8 rows]
#pragma GCC unroll 1
  for (int g = 0; g < 4; ++g) {
    // Transposed columns read the copy of every row.
    if (C != Columns::transposed && half * kHalf + 8 * g >= tile.filled) {
      row_max[0][g] = row_max[1][g] = q::zero();
      continue;
    }
    Vector a[2][8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      const int row = half * kHalf + 8 * g + i;
      Vector v[2];
      const uint8_t* from = static_cast<const uint8_t*>(tile.x) + row * tile.row_stride * kBytes;
      if (C != Columns::transposed && row >= tile.filled) from = kNothing;
      load_row<D>(from, v, sums);
#pragma GCC unroll 2
      for (int b = 0; b < 2; ++b) {
        q::store(work.x[row] + b * q::kWords, v[b]);
        a[b][i] = q::magnitude(v[b]);
        col_max[b] = q::max(col_max[b], a[b][i]);
      }
    }
    if constexpr (Rows) {
#pragma GCC unroll 2
      for (int b = 0; b < 2; ++b) {
        const Vector low =
            q::fold_pairs(q::fold_words(a[b][0], a[b][1]), q::fold_words(a[b][2], a[b][3]));
        const Vector high =
            q::fold_pairs(q::fold_words(a[b][4], a[b][5]), q::fold_words(a[b][6], a[b][7]));
        row_max[b][g] = q::fold_fours(low, high);
      }
    }
  }
  if constexpr (Rows) {
    for (int b = 0; b < 2; ++b) {
      const Vector* m = row_max[b];
      const q::Scales s = q::make_scales<F>(q::fold_quarters(m[0], m[1], m[2], m[3]), tile.rule);
      exact |= s.exact_needed;
      q::store_low_bytes(work.row_bytes[b] + half * kHalf, s.byte);
      q::store_twice(work.row_base[b] + half * kHalf, s.scale.base);
      q::store_twice(work.row_least[b] + half * kHalf, s.scale.least);
    }
  }
  if constexpr (C != Columns::none) {
    for (int b = 0; b < 2; ++b) {
      const q::Scales s = q::make_scales<F>(col_max[b], tile.rule);
      exact |= s.exact_needed;
      q::store_low_bytes(work.col_bytes[half] + b * q::kWords, s.byte);
      work.col_scale[half][b] = s.scale;
    }
  }
  return exact;
}

template <bool Stream>
MXTILE_INLINE void put(uint8_t* p, Vector v) {
  if constexpr (Stream) {
    q::store_past_caches(p, v);
  } else {
    q::store(p, v);
  }
}

// Second pass over two rows of 64 columns from c on: codes. There is time between them for the next
// tile to arrive.
template <int ElementBytes, class F, bool Rows, Columns C, bool Stream>
MXTILE_INLINE void emit(const Tile& tile, int pair, int c, Work<C>& work) {
  const q::Scale* col_scale = work.col_scale[pair / (kHalf / 2)];
  Vector col[2];
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const int row = 2 * pair + i;
#pragma GCC unroll 4
    for (int j = 0; j < kTile * ElementBytes; j += 64) {
      q::prefetch(tile.next + row * tile.next_row_bytes + c * ElementBytes + j);
    }
    const Vector x[2] = {q::load(work.x[row]), q::load(work.x[row] + q::kWords)};
    const q::Elements e = q::make_elements<F>(x);
    if constexpr (Rows) {
      const q::Scale s0{q::repeat(work.row_base[0] + row), q::repeat(work.row_least[0] + row)};
      const q::Scale s1{q::repeat(work.row_base[1] + row), q::repeat(work.row_least[1] + row)};
      const Vector codes = q::encode<F>(e, s0, s1);
      uint8_t* to = tile.row_codes + row * tile.row_code_stride;
      if constexpr (is_fp4(F::kElement)) {
        q::store_nibbles(to + c / 2, codes);
      } else {
        put<Stream>(to + c, codes);
      }
    }
    if constexpr (C != Columns::none) col[i] = q::encode<F>(e, col_scale[0], col_scale[1]);
    if constexpr (C == Columns::plain) {
      put<Stream>(tile.col_codes + row * tile.col_code_stride + c, col[i]);
    }
  }
  if constexpr (C == Columns::transposed) {
    int at = pair;
    if constexpr (is_fp4(F::kElement)) {
      const Vector rows = q::nibble_rows(col[0], col[1]);
      if (pair % 2 == 0) return q::store(work.two_rows, rows);
      col[0] = q::load(work.two_rows);
      col[1] = rows;
      at = pair / 2;
    }
#pragma GCC unroll 2
    for (int b = 0; b < 2; ++b) {
      q::store(work.pairs[b][at], q::pair_bytes(col[0], col[1], b));
    }
  }
}

// 32 row pairs x 64 columns into 64 runs of 64 codes; of 4 bits, 16 pairs.
template <class F, bool Stream>
MXTILE_INLINE void emit_transposed(const Tile& tile, const Work<Columns::transposed>& work) {
  for (int b = 0; b < 2; ++b) {
    constexpr int kGroups = is_fp4(F::kElement) ? 2 : 4;
    Vector groups[8][4] = {};  // [column % 8][group of 8 pairs]: 128 bits for each column / 16
    for (int g = 0; g < kGroups; ++g) {
      Vector in[8], out[8];
      for (int i = 0; i < 8; ++i) in[i] = q::load(work.pairs[b][8 * g + i]);
      q::transpose_words_8(in, out);
      for (int i = 0; i < 8; ++i) groups[i][g] = out[i];
    }
    for (int i = 0; i < 8; ++i) {
      Vector out[4];
      q::transpose_quarters(groups[i], out);
      for (int j = 0; j < 4; ++j) {
        uint8_t* to = tile.col_codes + (16 * j + 8 * b + i) * tile.col_code_stride;
        if constexpr (is_fp4(F::kElement)) {
          q::store_half(to, out[j]);
        } else {
          put<Stream>(to, out[j]);
        }
      }
    }
  }
}

template <bool Rows, Columns C>
MXTILE_INLINE void emit_scales(const Tile& tile, const Work<C>& work) {
  if constexpr (Rows) {
    for (int r = 0; r < written_rows(tile, C); ++r) {
      uint8_t* out = tile.row_scales + r * tile.row_scale_stride;
      out[0] = work.row_bytes[0][r];
      out[1] = work.row_bytes[1][r];
    }
  }
  if constexpr (C == Columns::plain) {
    for (int h = 0; h < tile.rows / kHalf; ++h) {
      q::store(tile.col_scales + h * tile.col_scale_stride, q::load(work.col_bytes[h]));
    }
  } else if constexpr (C == Columns::transposed) {
    for (int c = 0; c < kTile; ++c) {
      uint8_t* out = tile.col_scales + c * tile.col_scale_stride;
      out[0] = work.col_bytes[0][c];
      out[1] = work.col_bytes[1][c];
    }
  }
}

// A few rows of the whole width at a time: stores to adjacent lines follow each other.
template <int ElementBytes, class F, bool Rows, Columns C, bool Stream>
MXTILE_INLINE void emit_tile(const Tile& tile, Work<C>* works) {
  const int rows = written_rows(tile, C);
#pragma GCC unroll 1
  for (int pair = 0; pair < (rows + 1) / 2; ++pair) {
#pragma GCC unroll 1
    for (int c = 0; c < tile.cols; c += kTile) {
      Work<C>& work = works[c / kTile];
      if (!work.done) emit<ElementBytes, F, Rows, C, Stream>(tile, pair, c, work);
    }
  }
  if constexpr (C == Columns::transposed) {
    if (!works[0].done) emit_transposed<F, Stream>(tile, works[0]);
  }
}

// First pass over 64 columns; those that need the exact path take it at once.
template <DType D, class F, bool Rows, Columns C>
MXTILE_INLINE void measure_part(const Tile& part, Work<C>& work) {
  q::Sums sums;
  bool exact = false;
  if (part.col_sum) {
    sums.load(part.col_sum);
    for (int h = 0; h < part.rows / kHalf; ++h) {
      exact |= measure<D, F, Rows, C>(part, h, work, &sums);
    }
  } else {
    for (int h = 0; h < part.rows / kHalf; ++h) {
      exact |= measure<D, F, Rows, C>(part, h, work, nullptr);
    }
  }
  work.done = exact;
  if (exact) {
    // Adds the column sums itself.
    constexpr Element kElement = F::kElement;
    return find_portable(D, kElement, Rows, C)(part);
  }
  if (part.col_sum) sums.store(part.col_sum);
  if (C == Columns::transposed && part.rows < kTile) {
    for (int b = 0; b < 2; ++b) {
      constexpr int kPairs = is_fp4(F::kElement) ? Work<C>::kPairs / 2 : Work<C>::kPairs;
      for (int i = kPairs / 2; i < kPairs; ++i) {
        q::store(work.pairs[b][i], q::zero());
      }
    }
    q::store(work.col_bytes[1], q::zero());
  }
}

template <DType D, class F, bool Rows, Columns C>
void run(const Tile& tile) {
  constexpr int kBytes = D == DType::f32 ? 4 : 2;
  Work<C> works[C == Columns::transposed ? 1 : kTileCols / kTile];
  for (int c = 0; c < tile.cols; c += kTile) {
    measure_part<D, F, Rows, C>(part_of<kBytes, F::kElement>(tile, c), works[c / kTile]);
  }
  if constexpr (!Rows && C == Columns::none) return;
  if (tile.stream) {
    emit_tile<kBytes, F, Rows, C, true>(tile, works);
  } else {
    emit_tile<kBytes, F, Rows, C, false>(tile, works);
  }
  for (int c = 0; c < tile.cols; c += kTile) {
    const Work<C>& work = works[c / kTile];
    if (!work.done) emit_scales<Rows, C>(part_of<kBytes, F::kElement>(tile, c), work);
  }
  // Not for every tile: the next one's first pass would wait for this one's stores.
  if (tile.last) q::fence_stores();
}

// What choose() picks from.
struct Tiles {
  template <DType D, class F, bool Rows, Columns C>
  static void run(const Tile& tile) {
    quantize_tile::run<D, F, Rows, C>(tile);
  }
};

}  // namespace
}  // namespace te_mx::cpu::quantize_tile
