// Quantizes compact matrices of at most 32 columns: rows of one block. A group of 32 rows is a run
// of elements; rows are looked at for their maxima alone, and codes are made as the elements lie.
// Internal linkage: two files compile this with different flags.
#pragma once

#include <cstdint>
#include <cstring>

#include "mxtile/mx/format.hpp"
#include "mxtile/quant/avx512.hpp"
#include "quantize/quantize.hpp"

namespace te_mx::cpu::quantize_tile {
namespace {

namespace narrow_words = mxtile::quant::avx512;

// Elements [32 v, 32 v + 32) as bf16, for v < cols; where they lie if they are that.
template <DType D>
MXTILE_INLINE const uint16_t* narrow_bf16(const Narrow& t, uint16_t* room) {
  namespace q = narrow_words;
  if constexpr (D == DType::bf16) {
    return static_cast<const uint16_t*>(t.x);
  } else {
    for (int v = 0; v < t.cols; ++v) {
      q::Vector f[2];
      for (int h = 0; h < 2; ++h) {
        const int first = v * q::kWords + h * q::kWords / 2;
        f[h] = D == DType::f32 ? q::load(static_cast<const uint32_t*>(t.x) + first)
                               : q::f16_to_f32(static_cast<const uint16_t*>(t.x) + first);
      }
      q::store(room + v * q::kWords, q::to_odd_bf16(f[0], f[1]));
    }
    return room;
  }
}

template <class F>
MXTILE_INLINE void put_codes(uint8_t* to, int v, bool both, bool packs,
                             narrow_words::Vector codes) {
  namespace q = narrow_words;
  if (packs) {
    q::store_nibbles(to + v * q::kWords / 2, codes);
  } else if (both) {
    q::store(to + v * q::kWords, codes);
  } else {
    q::store_half(to + v * q::kWords, codes);
  }
}

template <DType D, class F>
bool quantize_narrow(const Narrow& t) {
  namespace q = narrow_words;
  alignas(64) uint16_t room[q::kWords * q::kWords];
  const uint16_t* const x = narrow_bf16<D>(t, room);
  const int n = t.cols;

  q::Vector col_max = q::zero(), row_max[4];
  for (int g = 0; g < 4; ++g) {
    q::Vector a[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      a[i] = q::magnitude(q::load_words(x + (8 * g + i) * n, n));
      col_max = q::max(col_max, a[i]);
    }
    const q::Vector low = q::fold_pairs(q::fold_words(a[0], a[1]), q::fold_words(a[2], a[3]));
    const q::Vector high = q::fold_pairs(q::fold_words(a[4], a[5]), q::fold_words(a[6], a[7]));
    row_max[g] = q::fold_fours(low, high);
  }
  const q::Scales rows =
      q::make_scales<F>(q::fold_quarters(row_max[0], row_max[1], row_max[2], row_max[3]), t.rule);
  const q::Scales cols = q::make_scales<F>(col_max, t.rule);
  if ((t.row_codes && rows.exact_needed) || (t.col_codes && cols.exact_needed)) return false;

  if (t.row_codes) q::store_low_bytes(t.row_scales, rows.byte);
  if (t.col_codes) {
    uint8_t bytes[q::kWords];
    q::store_low_bytes(bytes, cols.byte);
    std::memcpy(t.col_scales, bytes, static_cast<size_t>(n));
  }
  for (int v = 0; v < n; v += 2) {
    const bool both = v + 1 < n;
    const int w = both ? v + 1 : v;
    const q::Vector values[2] = {q::load(x + v * q::kWords), q::load(x + w * q::kWords)};
    const q::Elements e = q::make_elements<F>(values);
    if (t.row_codes) {
      const q::Vector codes = q::encode<F>(e, q::pick_scale(rows.scale, t.order->row[v]),
                                           q::pick_scale(rows.scale, t.order->row[w]));
      put_codes<F>(t.row_codes, v, both, is_fp4(F::kElement), codes);
    }
    if (t.col_codes) {
      const q::Vector codes = q::encode<F>(e, q::pick_scale(cols.scale, t.order->col[v]),
                                           q::pick_scale(cols.scale, t.order->col[w]));
      put_codes<F>(t.col_codes, v, both, false, codes);
    }
  }
  return true;
}

template <class F>
NarrowKernel choose_narrow(DType dtype) {
  if (dtype == DType::f32) return quantize_narrow<DType::f32, F>;
  return dtype == DType::bf16 ? quantize_narrow<DType::bf16, F> : quantize_narrow<DType::f16, F>;
}

inline NarrowKernel choose_narrow(DType dtype, Element element) {
  if (element == Element::e4m3) return choose_narrow<mxtile::mx::E4M3>(dtype);
  if (element == Element::e5m2) return choose_narrow<mxtile::mx::E5M2>(dtype);
  return choose_narrow<mxtile::mx::E2M1>(dtype);
}

}  // namespace
}  // namespace te_mx::cpu::quantize_tile
