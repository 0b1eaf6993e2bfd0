// From an operand to bf16 tiles of 16 rows x 32 k, one at a time. Templates over the decoder;
// include only from the family files.
#pragma once

#include <cstring>

#include "common/copy.h"
#include "gemm/gemm_internal.hpp"
#include "mxtile/bf16/codes.hpp"

namespace te_mx::cpu {

static_assert(mxtile::bf16::kRelative == kRelativeExponent);
inline constexpr int64_t kTileWords = 512;  // bf16 values of one tile

// Of an operand whose k is less than a block: the codes that are not padding, up to whole steps of
// decoders; else all.
constexpr int64_t used_of_one_block(int64_t k) { return k < kBlock ? round_up(k, 4) : kBlock; }

// Pair tiles hold [16 k pairs][16 rows][2], of which the first `used` k are written; row tiles [16
// rows][32 k].
template <bool k_last, bool pair, class Decoder>
[[gnu::always_inline]] static inline void decode_tile(const Decoder& decoder, const uint8_t* codes,
                                                      int64_t stride,
                                                      mxtile::bf16::TileScales scales,
                                                      uint16_t* tile, int64_t used = kBlock) {
  if constexpr (pair) {
    decoder.template pair_tile<k_last>(codes, stride, scales, tile, static_cast<int>(used));
  } else {
    decoder.template row_tile<k_last>(codes, stride, scales, tile);
  }
}

// out[32] = the values of NVFP4 from k on, a multiple of 32; zeros behind the end of either side.
template <class Decoder>
[[gnu::always_inline]] static inline void small_words(const StridedOperand& o, int64_t row,
                                                      int64_t k, uint16_t* out) {
  const int64_t left = row < o.rows ? o.k - k : 0, n = left < kBlock ? left : kBlock;
  const bool inside = n == kBlock && o.nibbles;
  if (inside && o.scale_block_stride == 1) {
    return Decoder::scaled_block(o.at(row, k), o.small_scale(row, k / kSmallBlock), out);
  }
  uint8_t packed[kBlock / 2] = {}, scales[2] = {};
  for (int64_t i = 0; i < n; ++i) {
    packed[i / 2] = static_cast<uint8_t>(packed[i / 2] | o.code(row, k + i) << (i % 2 * 4));
  }
  for (int64_t i = 0; i < ceil_div(n, kSmallBlock); ++i) {
    scales[i] = *o.small_scale(row, k / kSmallBlock + i);
  }
  Decoder::scaled_block(packed, scales, out);
}

// What tiles are made of. A group is 16 rows, a block 32 k.
// NOTE: inline everywhere: what is compiled for AVX-512 must not be what a CPU without it runs.
struct TileSource {
  const StridedOperand& operand;
  const float* exponents;

  // kCodes codes from `from` on, which follow each other, one a byte.
  template <int kCodes>
  [[gnu::always_inline]] void copy(const uint8_t* from, uint8_t* to) const {
    if (operand.nibbles) {
      mxtile::mx::unpack_nibbles<kCodes / 2>(from, to);
    } else {
      std::memcpy(to, from, kCodes);
    }
  }

  // Whether none of these groups and blocks sticks out of the operand.
  [[gnu::always_inline]] bool inside(int64_t group, int64_t groups, int64_t block,
                                     int64_t blocks) const {
    return (group + groups) * 16 <= operand.rows && (block + blocks) * kBlock <= operand.k;
  }

  [[gnu::always_inline]] void row_bytes(int64_t group, int32_t* bytes) const {
    for (int64_t r = 0; r < 16; ++r) {
      const int64_t row = group * 16 + r;
      bytes[r] = row < operand.rows ? row_byte(exponents[row]) : 127;
    }
  }

  // Those of blocks [block0, block1).
  template <bool k_last>
  [[gnu::always_inline]] void scale_bytes(int64_t group, int64_t block0, int64_t block1,
                                          uint8_t (*bytes)[16]) const {
    if (!k_last && (group + 1) * 16 <= operand.rows) {
      const uint8_t* s = operand.scales + group * 16;
      for (int64_t b = block0; b < block1; ++b) {
        std::memcpy(bytes[b - block0], s + b * operand.scale_block_stride, 16);
      }
      return;
    }
    for (int64_t r = 0; r < 16; ++r) {
      const int64_t row = group * 16 + r;
      const bool inside = row < operand.rows;
      const uint8_t* s = operand.scales + row * operand.scale_row_stride;
      for (int64_t b = block0; b < block1; ++b) {
        bytes[b - block0][r] = inside ? s[b * operand.scale_block_stride] : 127;
      }
    }
  }

  // The codes of a tile that sticks out, one a byte, zeros behind the end: rows 32 apart, or `used`
  // k 16 apart.
  template <bool k_last>
  [[gnu::always_inline]] void pad_tail(int64_t group, int64_t block, uint8_t* padded,
                                       int64_t used = kBlock) const {
    std::memset(padded, 0, static_cast<size_t>(16 * (k_last ? kBlock : used)));
    const int64_t left = operand.k - block * kBlock, ks = left < kBlock ? left : kBlock;
    const int64_t below = operand.rows - group * 16, rows = below < 16 ? below : 16;
    if (rows <= 0) return;
    if constexpr (k_last) {
      for (int64_t r = 0; r < rows; ++r) {
        const uint8_t* from = operand.at(group * 16 + r, block * kBlock);
        if (ks == kBlock) {
          copy<kBlock>(from, padded + r * kBlock);
        } else if (!operand.nibbles) {
          copy_few(padded + r * kBlock, from, ks);
        } else {
          uint8_t bytes[kBlock / 2] = {};
          copy_few(bytes, from, ceil_div(ks, 2));
          mxtile::mx::unpack_nibbles<kBlock / 2>(bytes, padded + r * kBlock);
          if (ks % 2 != 0) padded[r * kBlock + ks] = 0;
        }
      }
    } else {
      for (int64_t k = 0; k < ks; ++k) {
        copy_few(padded + k * 16, operand.at(group * 16, block * kBlock + k), rows);
      }
    }
  }
};

}  // namespace te_mx::cpu
