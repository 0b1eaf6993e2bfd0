// Packs an operand into bf16 tiles of 16 rows x 32 k. A template over the decoder, so that every
// ISA level has its own copy; include only from the family files.
#pragma once

#include "common/parallel.h"
#include "gemm/tiles_bf16.hpp"

namespace te_mx::cpu {

// Where the tile of (16-row group, k block) goes.
enum class TileOrder {
  panels,   // [rows/32][k/32][2 tiles]
  compact,  // rows <= 16, in panels of `kept` rows: pair tiles [k/32][16 k pairs][kept][2] (one
            // panel), row tiles [rows/kept][k/32 up to even][kept][32 k]
};

// kSkips: pair tiles of the only block of k end with used_of_one_block().
template <class Decoder, bool kSkips = false>
class Packer {
 public:
  static constexpr int64_t kGroupsPerItem = 8, kBlocksPerItem = 32;
  static constexpr int64_t kInlineTiles = 160;  // about 8 us: not worth waking a team

  Packer(const StridedOperand& operand, const float* exponents, TileOrder order, uint16_t* panels,
         int64_t kept = 16)
      : source_{operand, exponents},
        operand_(operand),
        order_(order),
        panels_(panels),
        kept_(kept) {
    blocks_ = ceil_div(operand.k, kBlock);
    used_ = kSkips ? used_of_one_block(operand.k) : kBlock;
    groups_ = order == TileOrder::panels ? 2 * ceil_div(operand.rows, kRowBlock) : 1;
  }

  // Pair tiles hold [16 k pairs][16 rows][2], row tiles [16 rows][32 k].
  template <bool pair>
  void run(int threads) const {
    const int64_t block_items = ceil_div(blocks_, kBlocksPerItem);
    const int64_t items = ceil_div(groups_, kGroupsPerItem) * block_items;
    const bool small = groups_ * blocks_ < kInlineTiles;
    parallel_for(small ? 1 : threads, items, [&](int64_t item) {
      const int64_t group = item / block_items * kGroupsPerItem;
      const int64_t block = item % block_items * kBlocksPerItem;
      const int64_t group_end = least(group + kGroupsPerItem, groups_);
      const int64_t block_end = least(block + kBlocksPerItem, blocks_);
      if (operand_.e4m3) {
        pack_small<pair>(group, group_end, block, block_end);
      } else if (operand_.code_k_stride == 1) {
        pack_item<true, pair>(group, group_end, block, block_end);
      } else {
        pack_item<false, pair>(group, group_end, block, block_end);
      }
    });
  }

 private:
  static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

  uint16_t* panel_tile(int64_t group, int64_t block) const {
    return panels_ + ((group / 2 * blocks_ + block) * 2 + group % 2) * kTileWords;
  }

  template <bool pair>
  void store_compact(const uint16_t* tile, int64_t block) const {
    uint16_t* to = panels_ + block * kept_ * kBlock;
    if constexpr (pair) {
      for (int64_t p = 0; p < 16; ++p) {
        std::memcpy(to + p * kept_ * 2, tile + p * kBlock, static_cast<size_t>(kept_) * 4);
      }
    } else {
      const int64_t panel_words = round_up(blocks_, 2) * kept_ * kBlock;
      for (int64_t r = 0; r < operand_.rows; r += kept_, to += panel_words) {
        std::memcpy(to, tile + r * kBlock, static_cast<size_t>(kept_ * kBlock) * 2);
      }
    }
  }

  // Of NVFP4: a row of a block at a time.
  template <bool pair>
  void pack_small(int64_t group0, int64_t group1, int64_t block0, int64_t block1) const {
    alignas(64) uint16_t rows[kTileWords], turned[kTileWords];
    for (int64_t g = group0; g < group1; ++g) {
      for (int64_t b = block0; b < block1; ++b) {
        for (int64_t r = 0; r < 16; ++r) {
          small_words<Decoder>(operand_, g * 16 + r, b * kBlock, rows + r * kBlock);
        }
        if constexpr (pair) mxtile::bf16::turn_pairs(rows, turned);
        const uint16_t* tile = pair ? turned : rows;
        if (order_ == TileOrder::panels) {
          std::memcpy(panel_tile(g, b), tile, sizeof rows);
        } else {
          store_compact<pair>(tile, b);
        }
      }
    }
  }

  template <bool k_last, bool pair>
  void pack_item(int64_t group0, int64_t group1, int64_t block0, int64_t block1) const {
    alignas(64) uint8_t bytes[kGroupsPerItem][kBlocksPerItem][16];
    alignas(64) int32_t row_bytes[kGroupsPerItem][16];
    const Decoder decoder(operand_.element);
    const int64_t used = pair ? used_ : kBlock;
    for (int64_t g = group0; g < group1; ++g) {
      source_.row_bytes(g, row_bytes[g - group0]);
      source_.scale_bytes<k_last>(g, block0, block1, bytes[g - group0]);
    }
    const auto make_tile = [&](int64_t g, int64_t b, const uint8_t* codes, int64_t stride) {
      const mxtile::bf16::TileScales scales{bytes[g - group0][b - block0], row_bytes[g - group0]};
      alignas(64) uint16_t whole[kTileWords];
      uint16_t* tile = order_ == TileOrder::panels ? panel_tile(g, b) : whole;
      decode_tile<k_last, pair>(decoder, codes, stride, scales, tile, used);
      if (order_ == TileOrder::compact) store_compact<pair>(tile, b);
    };
    const auto pack_tile = [&](int64_t g, int64_t b) {
      if (!source_.inside(g, 1, b, 1)) {
        alignas(64) uint8_t padded[16 * 32];
        source_.pad_tail<k_last>(g, b, padded, used);
        make_tile(g, b, padded, k_last ? 32 : 16);
      } else if (k_last && operand_.nibbles) {
        alignas(64) uint8_t codes[16 * 32];
        for (int64_t r = 0; r < 16; ++r) {
          source_.template copy<kBlock>(operand_.at(g * 16 + r, b * kBlock), codes + r * kBlock);
        }
        make_tile(g, b, codes, kBlock);
      } else {
        make_tile(g, b, operand_.at(g * 16, b * kBlock),
                  k_last ? operand_.code_row_stride : operand_.code_k_stride);
      }
    };
    if constexpr (k_last) {
      for (int64_t g = group0; g < group1; ++g) {
        int64_t b = block0;
        if ((g + 1) * 16 <= operand_.rows) {
          // A line of each row at a time: rows a power of two apart share a cache set, so a line
          // may be gone when its second block comes.
          for (; b + 2 <= block1 && (b + 2) * kBlock <= operand_.k; b += 2) {
            alignas(64) uint8_t lines[16][64];
            const uint8_t* from = operand_.at(g * 16, b * kBlock);
            for (int64_t r = 0; r < 16; ++r, from += operand_.code_row_stride) {
              source_.template copy<64>(from, lines[r]);
            }
            make_tile(g, b, lines[0], 64);
            make_tile(g, b + 1, lines[0] + kBlock, 64);
          }
        }
        for (; b < block1; ++b) pack_tile(g, b);
      }
    } else {  // the same with the lines of 32 k, which hold four groups
      for (int64_t b = block0; b < block1; ++b) {
        int64_t g = group0;
        if ((b + 1) * kBlock <= operand_.k) {
          for (; g + 4 <= group1 && (g + 4) * 16 <= operand_.rows; g += 4) {
            alignas(64) uint8_t lines[kBlock][64];
            const uint8_t* from = operand_.at(g * 16, b * kBlock);
            const int64_t ahead = kBlock * operand_.code_k_stride;
            for (int64_t k = 0; k < kBlock; ++k, from += operand_.code_k_stride) {
              std::memcpy(lines[k], from, 64);
              __builtin_prefetch(from + ahead, 0, 2);  // no prefetcher sees strides this long
            }
            for (int64_t i = 0; i < 4; ++i) make_tile(g + i, b, lines[0] + 16 * i, 64);
          }
        }
        for (; g < group1; ++g) pack_tile(g, b);
      }
    }
  }

  const TileSource source_;
  const StridedOperand& operand_;
  TileOrder order_;
  uint16_t* panels_;
  int64_t kept_, blocks_, groups_, used_;
};

static inline int64_t bf16_panel_bytes(Role, int64_t rows, int64_t k) {
  return ceil_div(rows, kRowBlock) * ceil_div(k, kBlock) * 2 * kTileWords * 2;
}

// lhs as row tiles, rhs as pair tiles.
template <class Decoder, bool kSkips = false>
Status pack_bf16_panels(Role role, const StridedOperand& operand, const float* exponents,
                        void* panels, int threads) {
  const Packer<Decoder, kSkips> packer(operand, exponents, TileOrder::panels,
                                       static_cast<uint16_t*>(panels));
  if (role == Role::lhs) {
    packer.template run<false>(threads);
  } else {
    packer.template run<true>(threads);
  }
  return Status::ok;
}

// How the 32 k of one block and row lie: words at block * block_stride + row * row_stride + (k/2) *
// pair_stride + k%2.
struct Bf16Layout {
  int64_t panel_rows,
      panel_stride;  // rows further apart than panel_rows are panel_stride words apart
  int64_t block_stride, row_stride, pair_stride;
};

// out[m] = 2^exponents[m] * sum over k, in a fixed order. row_sums_bf16.cpp
void bf16_row_sums(const uint16_t* words, const Bf16Layout& layout, int64_t rows, int64_t blocks,
                   const float* exponents, float* out, int threads);

static inline void bf16_panel_row_sums(const StridedOperand& lhs, const void* panels,
                                       const float* exps, float* out, int threads) {
  const int64_t blocks = ceil_div(lhs.k, kBlock);
  const Bf16Layout layout{kRowBlock, blocks * 2 * kTileWords, 2 * kTileWords, kBlock, 2};
  bf16_row_sums(static_cast<const uint16_t*>(panels), layout, lhs.rows, blocks, exps, out, threads);
}

}  // namespace te_mx::cpu
