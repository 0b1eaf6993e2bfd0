// Decodes panels of an operand a tile at a time, between the tile products of those before: loads,
// shuffles and stores have time while the products wait for none of them.
#pragma once

#include "gemm/gemm_rows.hpp"
#include "gemm/tiles_bf16.hpp"

namespace te_mx::cpu {

// Two neighbouring panels at a time: 64 rows, the cache lines of codes that lie by k. `pair`: pair
// tiles, for rhs.
template <class Decoder, bool pair, int64_t kMostBlocks>
class TileStream {
 public:
  static constexpr int64_t kPanels = 2, kGroups = 2 * kPanels;
  static constexpr int64_t kWords = kPanels * kMostBlocks * 2 * kTileWords;

  TileStream(const StridedOperand& operand, const float* exponents)
      : source_{operand, exponents},
        decoder_(operand.element),
        k_last_(operand.code_k_stride == 1) {}

  // Panels [panel, panel + panels) to `to` as [panel][block][2 tiles], spread over `steps` calls of
  // step(). `next`: bytes to the codes that will come after these.
  void start(int64_t panel, int64_t panels, int64_t blocks, uint16_t* to, int64_t steps,
             int64_t next) {
    group0_ = 2 * panel;
    groups_ = 2 * panels;
    blocks_ = blocks;
    to_ = to;
    next_ = next;
    group_ = at_ = credit_ = 0;
    left_ = a_step_ = groups_ * blocks_;
    steps_ = steps;
    for (int64_t g = 0; g < groups_; ++g) source_.row_bytes(group0_ + g, row_bytes_[g]);
  }

  TE_MX_MEMBER void step() {
    credit_ += a_step_;
    while (credit_ >= steps_) {
      credit_ -= steps_;
      if (left_ > 0) tile();
    }
  }

  void finish() {
    while (left_ > 0) tile();
  }

 private:
  void tile() {
    --left_;
    if (k_last_) {
      tile_k_last();
    } else {
      tile_k_first();
    }
  }

  uint16_t* place() const {
    return to_ + ((group_ / 2 * blocks_ + at_) * 2 + group_ % 2) * kTileWords;
  }

  // Group by group; every second tile copies a line of 16 rows (see Packer).
  void tile_k_last() {
    const int64_t g = group0_ + group_, b = at_;
    if (b == 0) source_.template scale_bytes<true>(g, 0, blocks_, bytes_);
    if (b % 2 == 0) {
      copied_ = b + 2 <= blocks_ && source_.inside(g, 1, b, 2);
      if (copied_)
        copy_lines(16, source_.operand.at(g * 16, b * kBlock), source_.operand.code_row_stride);
    }
    make<true>(g, b, lines_[0] + b % 2 * kBlock, bytes_[b]);
    if (++at_ == blocks_) {
      at_ = 0;
      ++group_;
    }
  }

  // Block by block; every fourth tile copies a line of 32 k.
  void tile_k_first() {
    const int64_t g = group0_ + group_, b = at_;
    if (group_ == 0) {
      copied_ = groups_ == kGroups && source_.inside(g, kGroups, b, 1);
      if (copied_) {
        copy_lines(kBlock, source_.operand.at(g * 16, b * kBlock), source_.operand.code_k_stride);
      }
    }
    source_.template scale_bytes<false>(g, b, b + 1, bytes_);
    make<false>(g, b, lines_[0] + group_ * 16, bytes_[0]);
    if (++group_ == groups_) {
      group_ = 0;
      ++at_;
    }
  }

  void copy_lines(int64_t count, const uint8_t* from, int64_t stride) {
    for (int64_t i = 0; i < count; ++i, from += stride) {
      source_.template copy<64>(from, lines_[i]);
      __builtin_prefetch(from + next_, 0, 2);
    }
  }

  template <bool k_last>
  void make(int64_t g, int64_t b, const uint8_t* line, const uint8_t* bytes) {
    const mxtile::bf16::TileScales scales{bytes, row_bytes_[group_]};
    if (copied_) return decode_tile<k_last, pair>(decoder_, line, 64, scales, place());
    alignas(64) uint8_t padded[16 * 32];
    source_.template pad_tail<k_last>(g, b, padded);
    decode_tile<k_last, pair>(decoder_, padded, k_last ? 32 : 16, scales, place());
  }

  const TileSource source_;
  const Decoder decoder_;
  const bool k_last_;
  int64_t group0_ = 0, groups_ = 0, blocks_ = 0;  // of this start()
  int64_t group_ = 0, at_ = 0, left_ = 0;         // the next tile
  int64_t a_step_ = 0, steps_ = 1, credit_ = 0, next_ = 0;
  uint16_t* to_ = nullptr;
  bool copied_ = false;  // whether lines_ holds the codes of the next tile
  alignas(64) uint8_t lines_[kBlock][64];
  alignas(64) int32_t row_bytes_[kGroups][16];
  alignas(64) uint8_t bytes_[kMostBlocks][16];
};

}  // namespace te_mx::cpu
