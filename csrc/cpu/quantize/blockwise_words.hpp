// The blockwise tile kernel for AVX-512: whole tiles of e4m3 and e5m2 whose scales are powers of
// two, on words of bf16 as MX blocks (mxtile/quant/avx512.hpp). The scale of the rule pow2 is that
// of rceil: the least power of two that brings the largest magnitude to max or below. What these
// words do not hold (numbers that are not finite, tiny blocks) and everything else goes to the
// plain loops. Everything here has internal linkage: two files compile it with different flags.
#pragma once

#include "common/room.h"
#include "quantize/blockwise_loops.hpp"
#include "quantize/quantize_tile_avx512.hpp"

namespace te_mx::cpu::blockwise {
namespace {

namespace q = mxtile::quant::avx512;
using q::Vector;

constexpr int kGroup = 32;  // rows whose largest magnitudes make a vector
constexpr int kGroups = kTile / kGroup, kParts = kTile / q::kWords;

struct alignas(64) Words {
  uint16_t x[kTile][kTile];
  uint32_t row_base[kTile], row_least[kTile];
  uint8_t row_bytes[kTile], col_bytes[kTile];
  q::Scale col_scale[kParts];
};

// First pass: copies the tile, and the largest magnitudes of 32 rows each and of 32 columns each.
template <DType D>
MXTILE_INLINE void measure_words(const Tile& tile, Words& words, Vector (&rows)[kGroups],
                                 Vector (&cols)[kParts], q::Sums* sums) {
  constexpr int64_t kBytes = D == DType::f32 ? 4 : 2;
  for (Vector& largest : cols) largest = q::zero();
  for (int h = 0; h < kGroups; ++h) {
    Vector eights[4];
#pragma GCC unroll 1
    for (int g = 0; g < 4; ++g) {
      Vector a[8];
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        const int row = h * kGroup + 8 * g + i;
        const uint8_t* x = static_cast<const uint8_t*>(tile.x) + row * tile.row_stride * kBytes;
        Vector v[kParts];
        quantize_tile::load_row<D>(x, v, sums);
        quantize_tile::load_row<D>(x + kTile / 2 * kBytes, v + 2, sums ? sums + 1 : nullptr);
        a[i] = q::zero();
#pragma GCC unroll 4
        for (int p = 0; p < kParts; ++p) {
          q::store(words.x[row] + p * q::kWords, v[p]);
          const Vector magnitude = q::magnitude(v[p]);
          cols[p] = q::max(cols[p], magnitude);
          a[i] = q::max(a[i], magnitude);
        }
      }
      eights[g] =
          q::fold_fours(q::fold_pairs(q::fold_words(a[0], a[1]), q::fold_words(a[2], a[3])),
                        q::fold_pairs(q::fold_words(a[4], a[5]), q::fold_words(a[6], a[7])));
    }
    rows[h] = q::fold_quarters(eights[0], eights[1], eights[2], eights[3]);
  }
}

// The largest magnitude of the whole tile, in every word.
MXTILE_INLINE Vector largest_of(const Vector (&cols)[kParts]) {
  alignas(64) uint16_t words[q::kWords];
  q::store(words, q::max(q::max(cols[0], cols[1]), q::max(cols[2], cols[3])));
  uint16_t largest = 0;
  for (const uint16_t word : words) largest = word > largest ? word : largest;
  return q::splat(largest);
}

MXTILE_INLINE float scale_of(uint8_t byte) {
  return mx::as_float(static_cast<uint32_t>(byte != 0 ? byte : 127) << 23);
}

template <bool Stream>
MXTILE_INLINE void put_words(uint8_t* p, Vector v) {
  Stream ? q::store_past_caches(p, v) : q::store(p, v);
}

// Second pass: codes. Meanwhile the next tile arrives.
template <int ElementBytes, class F, bool Stream>
MXTILE_INLINE void emit_words(const Tile& tile, const Words& words) {
#pragma GCC unroll 1
  for (int r = 0; r < kTile; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < kTile * ElementBytes; i += 64) {
      q::prefetch(tile.next + r * tile.row_stride * ElementBytes + i);
    }
    const q::Scale row{q::repeat(words.row_base + r), q::repeat(words.row_least + r)};
#pragma GCC unroll 2
    for (int c = 0; c < kTile; c += 64) {
      const Vector x[2] = {q::load(words.x[r] + c), q::load(words.x[r] + c + q::kWords)};
      const q::Elements e = q::make_elements<F>(x);
      const q::Scale* col = words.col_scale + c / q::kWords;
      Vector codes{};
      if (tile.row_codes) {
        codes = q::encode<F>(e, row, row);
        put_words<Stream>(tile.row_codes + r * tile.row_code_stride + c, codes);
      }
      if (tile.col_codes) {
        if (!tile.square || !tile.row_codes) codes = q::encode<F>(e, col[0], col[1]);
        put_words<Stream>(tile.col_codes + r * tile.col_code_stride + c, codes);
      }
    }
  }
}

template <class F>
MXTILE_INLINE bool make_words(const Tile& tile, const Vector (&rows)[kGroups],
                              const Vector (&cols)[kParts], Words& words) {
  const Vector epsilon = q::splat(tile.epsilon >> 16 | ((tile.epsilon & 0xFFFF) != 0 ? 1 : 0));
  const Vector whole = largest_of(cols);
  bool exact = false;
  for (int i = 0; i < kGroups; ++i) {
    const q::Scales row =
        q::make_scales<F>(q::max(tile.square ? whole : rows[i], epsilon), mxtile::mx::Rule::rceil);
    q::store_low_bytes(words.row_bytes + i * kGroup, row.byte);
    q::store_twice(words.row_base + i * kGroup, row.scale.base);
    q::store_twice(words.row_least + i * kGroup, row.scale.least);
    const q::Scales col =
        q::make_scales<F>(q::max(tile.square ? whole : cols[i], epsilon), mxtile::mx::Rule::rceil);
    q::store_low_bytes(words.col_bytes + i * q::kWords, col.byte);
    words.col_scale[i] = col.scale;
    exact |= row.exact_needed | col.exact_needed;
  }
  return exact;
}

MXTILE_INLINE void emit_scales(const Tile& tile, const Words& words) {
  const int count = tile.square ? 1 : kTile;
  for (int i = 0; i < count && tile.row_codes; ++i) {
    tile.row_scales[i * tile.row_scale_stride] = scale_of(words.row_bytes[i]);
  }
  for (int i = 0; i < count && tile.col_codes; ++i) {
    tile.col_scales[i * tile.col_scale_stride] = scale_of(words.col_bytes[i]);
  }
}

template <DType D, class F>
void run_words(const Tile& tile) {
  const bool whole = tile.rows == kTile && tile.cols == kTile && tile.col_stride == 1;
  const bool transposed = tile.col_codes != nullptr && tile.transposed;
  if (!whole || transposed || !tile.pow2 || !(tile.row_codes || tile.col_codes))
    return run<D, F>(tile);
  const InRoom<Words> in_room;
  Words& words = *in_room;
  Vector rows[kGroups], cols[kParts];
  q::Sums sums[2];
  if (tile.col_sum) {
    sums[0].load(tile.col_sum);
    sums[1].load(tile.col_sum + kTile / 2);
    measure_words<D>(tile, words, rows, cols, sums);
  } else {
    measure_words<D>(tile, words, rows, cols, nullptr);
  }
  if (make_words<F>(tile, rows, cols, words)) return run<D, F>(tile);  // adds the sums itself
  if (tile.col_sum) {
    sums[0].store(tile.col_sum);
    sums[1].store(tile.col_sum + kTile / 2);
  }
  constexpr int kBytes = D == DType::f32 ? 4 : 2;
  tile.stream ? emit_words<kBytes, F, true>(tile, words)
              : emit_words<kBytes, F, false>(tile, words);
  emit_scales(tile, words);
  if (tile.stream && tile.last) q::fence_stores();
}

TileKernel choose_words(DType dtype, Element element) {
  if (element != Element::e4m3 && element != Element::e5m2) return choose(dtype, element);
  const bool e4m3 = element == Element::e4m3;
  switch (dtype) {
    case DType::f32:
      return e4m3 ? run_words<DType::f32, mx::E4M3> : run_words<DType::f32, mx::E5M2>;
    case DType::bf16:
      return e4m3 ? run_words<DType::bf16, mx::E4M3> : run_words<DType::bf16, mx::E5M2>;
    default:
      return e4m3 ? run_words<DType::f16, mx::E4M3> : run_words<DType::f16, mx::E5M2>;
  }
}

}  // namespace
}  // namespace te_mx::cpu::blockwise
