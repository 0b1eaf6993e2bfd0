// The tile kernel in plain loops, compiled once for every instruction set without a kernel of its
// own. Everything here has internal linkage: two files compile it with different flags.
#pragma once

#include <cstdint>
#include <cstring>

#include "mxtile/mx/nibbles.hpp"
#include "mxtile/mx/round.hpp"
#include "mxtile/quant/portable.hpp"
#include "quantize/quantize_choose.hpp"

namespace te_mx::cpu::quantize_tile {
namespace {

namespace mx = mxtile::mx;
namespace quant = mxtile::quant;

template <DType D>
inline void load_row(const Tile& tile, int row, uint32_t* out) {
  const int64_t first = row * tile.row_stride;
  if constexpr (D == DType::f32) {
    std::memcpy(out, static_cast<const uint32_t*>(tile.x) + first, kTile * sizeof(uint32_t));
  } else {
    const uint16_t* x = static_cast<const uint16_t*>(tile.x) + first;
    if constexpr (D == DType::f16) {
      quant::load_f16(x, out, kTile);
    } else {
      for (int c = 0; c < kTile; ++c) out[c] = mx::bf16_to_f32(x[c]);
    }
  }
}

// Columns of one block of 32 rows. codes: rows of 64.
template <class F>
inline void quantize_columns(const uint32_t (*x)[kTile], uint8_t (*codes)[kTile], uint8_t* bytes,
                             mx::Rule rule) {
  uint32_t largest[kTile] = {};
  for (int r = 0; r < mx::kBlockSize; ++r) quant::fold_magnitudes(x[r], largest, kTile);
  float scale[kTile];
  bool exact = false;
  for (int c = 0; c < kTile; ++c) {
    const uint32_t byte = mx::scale_byte<F>(largest[c], rule);
    bytes[c] = static_cast<uint8_t>(byte);
    scale[c] = quant::multiplier(byte);
    exact |= quant::needs_exact(largest[c]);
  }
  for (int r = 0; r < mx::kBlockSize; ++r) quant::encode_row<F>(x[r], scale, codes[r], kTile);
  if (!exact) return;
  for (int c = 0; c < kTile; ++c) {
    if (!quant::needs_exact(largest[c])) continue;
    for (int r = 0; r < mx::kBlockSize; ++r) codes[r][c] = mx::encode<F>(x[r][c], bytes[c]);
  }
}

template <DType D, class F, bool Rows, Columns C>
void run_part(const Tile& tile) {
  uint32_t x[tile_rows(C)][kTile];
  const int rows = written_rows(tile, C);
  for (int r = 0; r < rows; ++r) load_row<D>(tile, r, x[r]);
  for (int r = rows; r < tile.rows; ++r) std::memset(x[r], 0, sizeof(x[r]));
  if (tile.col_sum) {
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < kTile; ++c) tile.col_sum[c] += mx::as_float(x[r][c]);
    }
  }
  if constexpr (Rows) {
    for (int r = 0; r < rows; ++r) {
      for (int b = 0; b < 2; ++b) {
        uint8_t codes[mx::kBlockSize];
        uint8_t* to = tile.row_codes + r * tile.row_code_stride;
        uint8_t* place = to + code_bytes(F::kElement, b * mx::kBlockSize);
        tile.row_scales[r * tile.row_scale_stride + b] = quant::quantize_block<F>(
            x[r] + b * mx::kBlockSize, is_fp4(F::kElement) ? codes : place, tile.rule);
        if constexpr (is_fp4(F::kElement)) mx::pack_nibbles<mx::kBlockSize / 2>(codes, place);
      }
    }
  }
  if constexpr (C != Columns::none) {
    uint8_t codes[tile_rows(C)][kTile];
    uint8_t bytes[2][kTile];
    for (int h = 0; h < tile.rows / mx::kBlockSize; ++h) {
      quantize_columns<F>(x + h * mx::kBlockSize, codes + h * mx::kBlockSize, bytes[h], tile.rule);
    }
    if constexpr (C == Columns::plain) {
      for (int r = 0; r < rows; ++r) {
        std::memcpy(tile.col_codes + r * tile.col_code_stride, codes[r], kTile);
      }
      for (int h = 0; h < tile.rows / mx::kBlockSize; ++h) {
        std::memcpy(tile.col_scales + h * tile.col_scale_stride, bytes[h], kTile);
      }
    } else {
      if (tile.rows < kTile) {
        std::memset(codes[mx::kBlockSize], 0, sizeof(codes) / 2);
        std::memset(bytes[1], 0, sizeof(bytes[1]));
      }
      for (int c = 0; c < kTile; ++c) {
        uint8_t* out = tile.col_codes + c * tile.col_code_stride;
        if constexpr (is_fp4(F::kElement)) {
          for (int r = 0; r < kTile; r += 2) {
            out[r / 2] = static_cast<uint8_t>(codes[r][c] | codes[r + 1][c] << 4);
          }
        } else {
          for (int r = 0; r < kTile; ++r) out[r] = codes[r][c];
        }
        for (int h = 0; h < 2; ++h) tile.col_scales[c * tile.col_scale_stride + h] = bytes[h][c];
      }
    }
  }
}

template <DType D, class F, bool Rows, Columns C>
void run(const Tile& tile) {
  constexpr int kBytes = D == DType::f32 ? 4 : 2;
  for (int c = 0; c < tile.cols; c += kTile)
    run_part<D, F, Rows, C>(part_of<kBytes, F::kElement>(tile, c));
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
