// The AMX stream, a template over real or emulated tiles.
//
// The weight rows are tile A, so their codes need no transpose; x^T is tile B with one column a row
// of x:
//
//               B T6 (even k blocks), T7 (odd)      x^T: [16 k pairs][M][2]
//   A T4        C T0 (even), T1 (odd)               rows n0 .. n0+15
//   A T5        C T2 (even), T3 (odd)               rows n0+16 .. n0+31
//
// Two accumulators a row group hide the latency of the tile product. D^T = even + odd is turned for
// the epilogue.
#pragma once

#include "stream_bf16.hpp"

namespace te_mx {

#ifndef TE_MX_STREAM_BATCH
#define TE_MX_STREAM_BATCH 8
#endif
#ifndef TE_MX_STREAM_AHEAD
#define TE_MX_STREAM_AHEAD 1024
#endif
#ifndef TE_MX_STREAM_ITEM_ROWS
#define TE_MX_STREAM_ITEM_ROWS 128
#endif

struct AmxStreamTuning {
  static constexpr int64_t kBatch = TE_MX_STREAM_BATCH;  // k blocks decoded to L1 at a time, even
  static constexpr int64_t kAhead = TE_MX_STREAM_AHEAD;  // bytes of a row between prefetch and use
  static constexpr int64_t kItemRows = TE_MX_STREAM_ITEM_ROWS;
};

template <class Tiles, class Decoder, class Tuning = AmxStreamTuning>
class AmxStream {
 public:
  static int64_t panel_bytes(Role role, int64_t rows, int64_t k) {
    return role == Role::rhs ? 0 : round_up(ceil_div(k, kBlock) * 16 * rows * 4, 64);
  }

  static Status pack(Role, const Operand& x, const float* exponents, void* panels, int threads) {
    Packer<Decoder>(x, exponents, TileOrder::compact, static_cast<uint16_t*>(panels), x.rows)
        .template run<true>(threads);
    return Status::ok;
  }

  static void row_sums(const Operand& x, const void* panels, const float* exponents, float* out,
                       int threads) {
    const int64_t m = x.rows;
    bf16_row_sums(static_cast<const uint16_t*>(panels), {16, 0, m * kBlock, 2, 2 * m}, m,
                  ceil_div(x.k, kBlock), exponents, out, threads);
  }

  static Status run(const Range&, const void* lhs, const void*, const EpilogueContext& context,
                    void*) {
    const AmxStream stream(static_cast<const char*>(lhs), context);
    const int64_t n = context.args->rhs.rows;
    const int threads = context.args->threads;
    const int64_t rows = stream_item_rows(n, threads, kRows, Tuning::kItemRows);
    parallel_for(threads, ceil_div(n, rows), [&](int64_t item) {
      const int64_t end = (item + 1) * rows < n ? (item + 1) * rows : n;
      Tiles tiles(static_cast<int>(context.args->lhs.rows));
      for (int64_t n0 = item * rows; n0 < end; n0 += kRows) stream.run_rows(tiles, n0);
    });
    return Status::ok;
  }

 private:
  static constexpr int64_t kRows = 32, kGroups = 2, kBatch = Tuning::kBatch;
  static_assert(kBatch % 2 == 0, "even and odd blocks have accumulators of their own");
  struct Batch {
    alignas(64) uint16_t tile[kGroups][kBatch][kTileWords];
  };

  AmxStream(const char* x, const EpilogueContext& context)
      : x_(x),
        context_(context),
        epilogue_(epilogue_for(isa_current())),
        w_(context.args->rhs),
        m_(context.args->lhs.rows),
        blocks_(ceil_div(context.args->rhs.k, kBlock)) {}

  void run_rows(Tiles& tiles, int64_t n0) const {
    Batch batch;
    alignas(64) int32_t row_bytes[kRows];
    for (int64_t r = 0; r < kRows; ++r) {
      row_bytes[r] = n0 + r < w_.rows ? row_byte(context_.rhs_exp[n0 + r]) : 127;
    }
    tiles.template zero<0>();
    tiles.template zero<1>();
    tiles.template zero<2>();
    tiles.template zero<3>();
    for (int64_t b = 0; b < blocks_; b += kBatch) {
      const int64_t count = blocks_ - b < kBatch ? blocks_ - b : kBatch;
      decode(n0, b, count, row_bytes, batch);
      const char* x = x_ + b * 64 * m_;
      for (int64_t i = 0; i < count; i += 2, x += 128 * m_) {
        tiles.template load<6>(x, 4 * m_);
        tiles.template load<4>(batch.tile[0][i], 64);
        tiles.template dot_bf16<0, 4, 6>();
        tiles.template load<5>(batch.tile[1][i], 64);
        tiles.template dot_bf16<2, 5, 6>();
        if (i + 1 == count) break;
        tiles.template load<7>(x + 64 * m_, 4 * m_);
        tiles.template load<4>(batch.tile[0][i + 1], 64);
        tiles.template dot_bf16<1, 4, 7>();
        tiles.template load<5>(batch.tile[1][i + 1], 64);
        tiles.template dot_bf16<3, 5, 7>();
      }
    }
    finish(tiles, n0);
  }

  // Weight blocks [block, block + count) of the 32 rows to bf16 row tiles.
  void decode(int64_t n0, int64_t block, int64_t count, const int32_t* row_bytes,
              Batch& batch) const {
    alignas(64) uint8_t bytes[kGroups][kBatch][16];
    for (int64_t r = 0; r < kRows; ++r) {
      const bool inside = n0 + r < w_.rows;
      const uint8_t* s = w_.scales + (n0 + r) * w_.scale_row_stride + block;
      for (int64_t i = 0; i < count; ++i) {
        bytes[r / 16][i][r % 16] = inside ? s[i] : 127;
      }
    }
    const Decoder decoder(fp8_of(w_.fmt));
    for (int64_t i = 0; i < count; ++i) {
      const int64_t k = (block + i) * kBlock;
      if (i % 2 == 0) prefetch(n0, k);
      for (int64_t g = 0; g < kGroups; ++g) {
        const int64_t row = n0 + g * 16;
        const uint8_t* codes = w_.codes + row * w_.code_row_stride + k;
        int64_t stride = w_.code_row_stride;
        alignas(64) uint8_t padded[16 * kBlock];
        if (row + 16 > w_.rows || k + kBlock > w_.k) {
          copy_stream_tail(w_, row, k, kBlock, padded);
          codes = padded;
          stride = kBlock;
        }
        decoder.template row_tile<true>(codes, stride, {bytes[g][i], row_bytes + g * 16},
                                        batch.tile[g][i]);
      }
    }
  }

  // One line of each row, kAhead bytes on; past the end of the rows, of the next 32.
  void prefetch(int64_t n0, int64_t k) const {
    int64_t ahead = k + Tuning::kAhead;
    if (ahead >= w_.k) ahead += (kRows - 1) * w_.code_row_stride;
    const uint8_t* p = w_.codes + n0 * w_.code_row_stride + ahead;
    for (int64_t r = 0; r < kRows; ++r, p += w_.code_row_stride) __builtin_prefetch(p, 0, 3);
  }

  void finish(Tiles& tiles, int64_t n0) const {
    alignas(64) float sums[4][16 * 16];
    alignas(64) float turned[16 * kRows];
    tiles.template store<0>(sums[0], 64);
    tiles.template store<1>(sums[1], 64);
    tiles.template store<2>(sums[2], 64);
    tiles.template store<3>(sums[3], 64);
    for (int64_t n = 0; n < kRows; ++n) {
      const float* even = sums[n / 16 * 2] + n % 16 * 16;
      const float* odd = sums[n / 16 * 2 + 1] + n % 16 * 16;
      for (int64_t m = 0; m < m_; ++m) turned[m * kRows + n] = even[m] + odd[m];
    }
    const int64_t cols = w_.rows - n0 < kRows ? w_.rows - n0 : kRows;
    epilogue_(context_, turned, kRows, 0, n0, static_cast<int>(m_), static_cast<int>(cols));
  }

  const char* x_;
  const EpilogueContext& context_;
  EpilogueFn epilogue_;
  const Operand& w_;
  int64_t m_, blocks_;
};

template <class Stream>
const KernelImpl* stream_impl() {
  static constexpr KernelImpl impl{Stream::panel_bytes, Stream::pack, nullptr, Stream::run,
                                   Stream::row_sums};
  return &impl;
}

}  // namespace te_mx
