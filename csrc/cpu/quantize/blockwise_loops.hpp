// The blockwise tile kernel in plain loops, compiled once for every instruction set: compilers make
// vectors of them. Everything here has internal linkage: several files compile it with different
// flags.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "mxtile/mx/round.hpp"
#include "mxtile/quant/portable.hpp"
#include "quantize/blockwise.hpp"

namespace te_mx::cpu::blockwise {
namespace {

namespace mx = mxtile::mx;
namespace quant = mxtile::quant;

// A row as fp32 bits, zeros behind its end.
template <DType D>
inline void load_row(const Tile& tile, int row, uint32_t* out) {
  using T = std::conditional_t<D == DType::f32, uint32_t, uint16_t>;
  const T* x = static_cast<const T*>(tile.x) + row * tile.row_stride;
  T whole[kTile];
  if (tile.cols < kTile || tile.col_stride != 1) {
    std::memset(whole, 0, sizeof whole);
    for (int c = 0; c < tile.cols; ++c) whole[c] = x[c * tile.col_stride];
    x = whole;
  }
  if constexpr (D == DType::f32) {
    std::memcpy(out, x, sizeof whole);
  } else if constexpr (D == DType::f16) {
    quant::load_f16(x, out, kTile);
  } else {
    for (int c = 0; c < kTile; ++c) out[c] = mx::bf16_to_f32(x[c]);
  }
}

// What a block is multiplied by, and the scale that is stored.
struct Factor {
  float factor, scale;
  bool finite;
};

template <class F>
inline Factor factor_of(const Tile& tile, uint32_t amax) {
  if (amax >= mx::kF32Inf) return {1.0f, mx::as_float(mx::kF32Nan), false};
  const float factor = quant::block_factor<F>(amax, tile.epsilon, tile.pow2);
  return {factor, 1.0f / factor, true};
}

// The codes of a row, each with the factor of its column.
template <class F>
inline void encode_each(const uint32_t* x, const float* factors, uint8_t* codes) {
  for (int c = 0; c < kTile; ++c) codes[c] = quant::encode_fast<F>(x[c], factors[c]);
}

inline void put_row(uint8_t* to, const uint8_t* codes, int cols) {
  if (cols == kTile) {
    std::memcpy(to, codes, kTile);
  } else {
    std::memcpy(to, codes, static_cast<size_t>(cols));
  }
}

inline void put_transposed(const Tile& tile, const uint8_t (*codes)[kTile]) {
  for (int c = 0; c < tile.cols; ++c) {
    uint8_t line[kTile];
    for (int r = 0; r < kTile; ++r) line[r] = codes[r][c];
    put_row(tile.col_codes + c * tile.col_code_stride, line, tile.rows);
  }
}

// The largest magnitudes of a tile, and its column sums.
struct Largest {
  uint32_t rows[kTile], cols[kTile];
};

template <DType D>
inline void measure(const Tile& tile, Largest& largest) {
  std::memset(&largest, 0, sizeof largest);
  uint32_t x[kTile];
  for (int r = 0; r < tile.rows; ++r) {
    load_row<D>(tile, r, x);
    largest.rows[r] = quant::max_magnitude(x, kTile);
    quant::fold_magnitudes(x, largest.cols, kTile);
    if (tile.col_sum) {
      for (int c = 0; c < tile.cols; ++c) tile.col_sum[c] += mx::as_float(x[c]);
    }
  }
}

template <DType D, class F>
void run_square(const Tile& tile) {
  Largest largest;
  measure<D>(tile, largest);
  const Factor block = factor_of<F>(tile, quant::max_magnitude(largest.rows, kTile));
  uint8_t codes[kTile][kTile];
  uint32_t x[kTile];
  float factors[kTile];
  for (float& factor : factors) factor = block.factor;
  for (int r = 0; r < tile.rows; ++r) {
    if (block.finite) {
      load_row<D>(tile, r, x);
      encode_each<F>(x, factors, codes[r]);
    } else {
      std::memset(codes[r], static_cast<int>(F::kNanCode), kTile);
    }
    if (tile.row_codes) put_row(tile.row_codes + r * tile.row_code_stride, codes[r], tile.cols);
    if (tile.col_codes && !tile.transposed) {
      put_row(tile.col_codes + r * tile.col_code_stride, codes[r], tile.cols);
    }
  }
  if (tile.row_codes) *tile.row_scales = block.scale;
  if (!tile.col_codes) return;
  *tile.col_scales = block.scale;
  if (tile.transposed) put_transposed(tile, codes);
}

template <DType D, class F>
void run_vectors(const Tile& tile) {
  Largest largest;
  measure<D>(tile, largest);
  if (!tile.row_codes && !tile.col_codes) return;
  uint8_t codes[kTile][kTile];
  uint32_t x[kTile];
  float factors[kTile], of_row[kTile];
  bool finite = true;
  for (int c = 0; c < tile.cols && tile.col_codes; ++c) {
    const Factor column = factor_of<F>(tile, largest.cols[c]);
    factors[c] = column.factor;
    finite = finite && column.finite;
    tile.col_scales[c * tile.col_scale_stride] = column.scale;
  }
  for (int c = tile.cols; c < kTile; ++c) factors[c] = 1.0f;
  for (int r = 0; r < tile.rows; ++r) {
    load_row<D>(tile, r, x);
    if (tile.row_codes) {
      const Factor row = factor_of<F>(tile, largest.rows[r]);
      tile.row_scales[r * tile.row_scale_stride] = row.scale;
      for (float& factor : of_row) factor = row.factor;
      encode_each<F>(x, of_row, codes[r]);
      if (!row.finite) std::memset(codes[r], static_cast<int>(F::kNanCode), kTile);
      put_row(tile.row_codes + r * tile.row_code_stride, codes[r], tile.cols);
    }
    if (!tile.col_codes) continue;
    encode_each<F>(x, factors, codes[r]);
    for (int c = 0; c < tile.cols && !finite; ++c) {
      if (largest.cols[c] >= mx::kF32Inf) codes[r][c] = static_cast<uint8_t>(F::kNanCode);
    }
    if (!tile.transposed) put_row(tile.col_codes + r * tile.col_code_stride, codes[r], tile.cols);
  }
  if (tile.col_codes && tile.transposed) put_transposed(tile, codes);
}

template <DType D, class F>
void run(const Tile& tile) {
  tile.square ? run_square<D, F>(tile) : run_vectors<D, F>(tile);
}

template <DType D>
TileKernel choose(Element element) {
  switch (element) {
    case Element::e4m3:
      return run<D, mx::E4M3>;
    case Element::e5m2:
      return run<D, mx::E5M2>;
    case Element::e4m3fnuz:
      return run<D, mx::E4M3FNUZ>;
    default:
      return run<D, mx::E5M2FNUZ>;
  }
}

TileKernel choose(DType dtype, Element element) {
  if (dtype == DType::f32) return choose<DType::f32>(element);
  return dtype == DType::bf16 ? choose<DType::bf16>(element) : choose<DType::f16>(element);
}

}  // namespace
}  // namespace te_mx::cpu::blockwise
