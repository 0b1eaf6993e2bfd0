// The tile kernel that rounds at random and transforms, in plain loops, compiled once for every
// instruction set. te_mx/formats/stochastic.py and hadamard.py say what the bytes are. Everything
// here has internal linkage: several files compile it with different flags.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/room.h"
#include "mxtile/mx/nibbles.hpp"
#include "mxtile/mx/round.hpp"
#include "mxtile/quant/portable.hpp"
#include "mxtile/quant/stochastic.hpp"
#include "quantize/quantize.hpp"

namespace te_mx::cpu::quantize_tile {
namespace {

namespace mx = mxtile::mx;
namespace quant = mxtile::quant;

constexpr int kB = mx::kBlockSize;
using Row = uint32_t[kTile];  // fp32 patterns, or random words

inline void load_row(DType dtype, const Tile& tile, int row, uint32_t* out) {
  const int64_t first = row * tile.row_stride;
  if (dtype == DType::f32) {
    std::memcpy(out, static_cast<const uint32_t*>(tile.x) + first, sizeof(Row));
    return;
  }
  const uint16_t* x = static_cast<const uint16_t*>(tile.x) + first;
  if (dtype == DType::f16) return quant::load_f16(x, out, kTile);
  for (int c = 0; c < kTile; ++c) out[c] = mx::bf16_to_f32(x[c]);
}

// How many of 32 elements from `at` on, a multiple of 32, lie in whole chunks of the transform of k
// elements; 0 without one.
inline int whole_part(const Hadamard& h, int64_t at, int64_t k) {
  if (h.size == 0) return 0;
  const int64_t left = k / h.size * h.size - at;
  return static_cast<int>(left < 0 ? 0 : left < kB ? left : kB);
}

// Transforms the whole chunks of 32 rows of kWidth patterns.
template <int kWidth>
inline void transform(const Hadamard& h, int whole, uint32_t* x) {
  if (h.size == 32 && whole == 32) return quant::hadamard<32, kWidth>(x, h.signs);
  for (int i = 0; h.size == 16 && i + 16 <= whole; i += 16) {
    quant::hadamard<16, kWidth>(x + i * kWidth, h.signs >> i);
  }
}

// Codes of n elements. words: of random bits, one an element; null rounds to nearest.
template <class F>
inline void encode(const uint32_t* x, const uint32_t* words, const uint32_t* bytes, int n,
                   uint8_t* codes) {
  if (words != nullptr) {
    for (int i = 0; i < n; ++i) codes[i] = quant::encode_random_fast<F>(x[i], bytes[i], words[i]);
  } else {
    for (int i = 0; i < n; ++i) codes[i] = quant::encode_fast<F>(x[i], quant::multiplier(bytes[i]));
  }
}
template <class F>
inline uint8_t encode_exact(uint32_t x, const uint32_t* word, uint32_t byte) {
  return word == nullptr ? mx::encode<F>(x, byte) : quant::encode_random<F>(x, byte, *word);
}

// Codes of a block to where they lie along it.
template <class F>
inline void put_block(const uint8_t* codes, uint8_t* to) {
  if constexpr (is_fp4(F::kElement)) {
    mx::pack_nibbles<kB / 2>(codes, to);
  } else {
    std::memcpy(to, codes, kB);
  }
}

template <class F>
void quantize_rows(const Tile& tile, const Row* x, const Row* words) {
  const Special& s = *tile.special;
  for (int r = 0; r < tile.rows; ++r) {
    for (int b = 0; b < kTile / kB; ++b) {
      const uint32_t* random = words == nullptr ? nullptr : words[r] + b * kB;
      uint32_t block[kB], bytes[kB];
      uint8_t codes[kB];
      std::memcpy(block, x[r] + b * kB, sizeof block);
      transform<1>(s.row, whole_part(s.row, tile.col0 + b * kB, s.cols), block);
      const uint32_t amax = quant::max_magnitude(block, kB);
      const uint32_t byte = mx::scale_byte<F>(amax, tile.rule);
      if (quant::needs_exact(amax)) {
        for (int i = 0; i < kB; ++i) {
          codes[i] = encode_exact<F>(block[i], random == nullptr ? nullptr : random + i, byte);
        }
      } else {
        for (int i = 0; i < kB; ++i) bytes[i] = byte;
        encode<F>(block, random, bytes, kB, codes);
      }
      tile.row_scales[r * tile.row_scale_stride + b] = static_cast<uint8_t>(byte);
      put_block<F>(codes,
                   tile.row_codes + r * tile.row_code_stride + code_bytes(F::kElement, b * kB));
    }
  }
}

// Codes [32][64] and bytes of the blocks that 32 rows from `at` on are columns of.
template <class F>
void make_columns(const Tile& tile, const Row* x, const Row* words, int at, uint8_t (*codes)[kTile],
                  uint32_t* bytes) {
  const Special& s = *tile.special;
  Row y[kB], largest = {};
  std::memcpy(y, x + at, sizeof y);
  transform<kTile>(s.col, whole_part(s.col, tile.row0 + at, s.rows), y[0]);
  for (int r = 0; r < kB; ++r) quant::fold_magnitudes(y[r], largest, kTile);
  bool exact = false;
  for (int c = 0; c < kTile; ++c) {
    bytes[c] = mx::scale_byte<F>(largest[c], tile.rule);
    exact |= quant::needs_exact(largest[c]);
  }
  for (int r = 0; r < kB; ++r) {
    encode<F>(y[r], words == nullptr ? nullptr : words[at + r], bytes, kTile, codes[r]);
  }
  for (int c = 0; exact && c < kTile; ++c) {
    if (!quant::needs_exact(largest[c])) continue;
    for (int r = 0; r < kB; ++r) {
      const uint32_t* word = words == nullptr ? nullptr : words[at + r] + c;
      codes[r][c] = encode_exact<F>(y[r][c], word, bytes[c]);
    }
  }
}

template <class F>
void quantize_columns(const Tile& tile, const Row* x, const Row* words) {
  const bool transposed = tile.special->transposed;
  uint8_t codes[kTile][kTile];
  uint32_t bytes[kTile / kB][kTile];
  for (int h = 0; h < tile.rows / kB; ++h) {
    make_columns<F>(tile, x, words, h * kB, codes + h * kB, bytes[h]);
  }
  if (!transposed) {
    for (int r = 0; r < tile.rows; ++r) {
      std::memcpy(tile.col_codes + r * tile.col_code_stride, codes[r], kTile);
    }
    for (int h = 0; h < tile.rows / kB; ++h) {
      uint8_t* to = tile.col_scales + h * tile.col_scale_stride;
      for (int c = 0; c < kTile; ++c) to[c] = static_cast<uint8_t>(bytes[h][c]);
    }
    return;
  }
  if (tile.rows < kTile) {  // runs are written whole
    std::memset(codes[kB], 0, sizeof codes / 2);
    std::memset(bytes[1], 0, sizeof bytes[1]);
  }
  for (int c = 0; c < kTile; ++c) {
    for (int h = 0; h < kTile / kB; ++h) {
      uint8_t block[kB];
      for (int r = 0; r < kB; ++r) block[r] = codes[h * kB + r][c];
      put_block<F>(block,
                   tile.col_codes + c * tile.col_code_stride + code_bytes(F::kElement, h * kB));
      tile.col_scales[c * tile.col_scale_stride + h] = static_cast<uint8_t>(bytes[h][c]);
    }
  }
}

template <class F>
void run_random(const Tile& tile) {
  const Special& s = *tile.special;
  const InRoom<Row[2][kTile]> rows;
  auto& [x, words] = *rows;
  for (int r = 0; r < tile.rows; ++r) load_row(s.dtype, tile, r, x[r]);
  if (tile.col_sum) {
    for (int r = 0; r < tile.rows; ++r) {
      for (int c = 0; c < kTile; ++c) tile.col_sum[c] += mx::as_float(x[r][c]);
    }
  }
  if (s.stochastic) {
    for (int r = 0; r < tile.rows; ++r) {
      quant::random_bits(static_cast<uint32_t>(s.first + tile.row0 + r), tile.col0, s.seed,
                         words[r]);
    }
  }
  const Row* random = s.stochastic ? words : nullptr;
  if (tile.row_codes != nullptr) quantize_rows<F>(tile, x, random);
  if (tile.col_codes != nullptr) quantize_columns<F>(tile, x, random);
}

template <class F>
void run_random_parts(const Tile& tile) {
  const int bytes = tile.special->dtype == DType::f32 ? 4 : 2;
  for (int c = 0; c < tile.cols; c += kTile) {
    run_random<F>(bytes == 4 ? part_of<4, F::kElement>(tile, c) : part_of<2, F::kElement>(tile, c));
  }
}

inline Kernel choose_random(Element element) {
  if (element == Element::e4m3) return run_random_parts<mx::E4M3>;
  return element == Element::e5m2 ? run_random_parts<mx::E5M2> : run_random_parts<mx::E2M1>;
}

}  // namespace
}  // namespace te_mx::cpu::quantize_tile
