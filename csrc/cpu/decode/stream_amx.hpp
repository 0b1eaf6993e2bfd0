// The AMX stream, a template over real or emulated tiles.
//
// The weight rows are tile A, so their codes need no transpose; x^T is tile B with one column a row
// of x. A line of 64 codes becomes a row of an even-k and a row of an odd-k tile, and x^T is packed
// in the same order:
//
//               B T6 / T7      x^T: [16 k pairs][M][2], k = (0, 2), (4, 6).. or (1, 3), (5, 7)..
//   A T4        C T0 (even), T1 (odd)        rows n0 .. n0+15
//   A T5        C T2 (even), T3 (odd)        rows n0+16 .. n0+31
//
// A batch is a few lines of the 32 rows. Upper rows are decoded between the products of lower tiles
// and the other way round. D^T = even + odd is turned for the epilogue.
#pragma once

#include "decode/stream_bf16.hpp"
#include "mxtile/simd/transpose.hpp"

namespace te_mx::cpu {

struct AmxStreamTuning {
  static constexpr int64_t kLines = 4;  // a batch: it and x in L1
  static constexpr int64_t kItemRows = 128;
};

template <class Tiles, class Decoder, class Simd, class Tuning = AmxStreamTuning>
class AmxStream {
 public:
  static int64_t panel_bytes(Role role, int64_t rows, int64_t k) {
    return role == Role::rhs ? 0 : round_up(ceil_div(k, kLine) * kLine * rows * 2, 64);
  }

  static Status pack(Role, const StridedOperand& x, const float* exponents, void* panels,
                     int threads) {
    uint16_t* words = static_cast<uint16_t*>(panels);
    if (x.as_values() || x.e4m3) {
      const auto put = [&](int64_t r, int64_t b, const uint16_t* from) {
        uint16_t* to = words + b * kBlock * x.rows + 2 * r;
        for (int64_t p = 0; p < kRows; ++p) std::memcpy(to + 2 * p * x.rows, from + 2 * p, 4);
      };
      const Status status = put_values<Decoder>(x, exponents, threads, put);
      if (status != Status::ok) return status;
    } else {
      Packer<Decoder>(x, exponents, TileOrder::compact, words, x.rows).template run<true>(threads);
    }
    const int64_t blocks = ceil_div(x.k, kBlock), lines = ceil_div(x.k, kLine);
    if (blocks % 2 == 1) {
      std::memset(words + blocks * kBlock * x.rows, 0, static_cast<size_t>(kBlock * x.rows) * 2);
    }
    for (int64_t line = 0; line < lines; ++line, words += kLine * x.rows) {
      x.rows == 16 ? split_pairs<16>(words, 16) : split_pairs<0>(words, x.rows);
    }
    return Status::ok;
  }

  static void row_sums(const StridedOperand& x, const void* panels, const float* exponents,
                       float* out, int threads) {
    const int64_t m = x.rows;
    bf16_row_sums(static_cast<const uint16_t*>(panels), {16, 0, m * kBlock, 2, 2 * m}, m,
                  2 * ceil_div(x.k, kLine), exponents, out, threads);
  }

  static Status run(const Range&, const void* lhs, const void*, const EpilogueContext& context,
                    void*) {
    const AmxStream stream(static_cast<const char*>(lhs), context);
    const int64_t n = context.args->rhs.rows;
    const int threads = context.args->threads;
    const int64_t rows = stream_item_rows(n, threads, kCols, Tuning::kItemRows);
    parallel_for(threads, ceil_div(n, rows), [&](int64_t item) {
      const int64_t end = (item + 1) * rows < n ? (item + 1) * rows : n;
      Tiles tiles(static_cast<int>(context.args->lhs.rows));
      const Decoder decoder(context.args->rhs.element);
      for (int64_t n0 = item * rows; n0 < end; n0 += kCols) {
        if (stream.w_.e4m3) {
          stream.template run_cols<Codes::small>(tiles, decoder, n0);
        } else if (stream.w_.nibbles) {
          stream.template run_cols<Codes::nibbles>(tiles, decoder, n0);
        } else {
          stream.template run_cols<Codes::bytes>(tiles, decoder, n0);
        }
      }
    });
    return Status::ok;
  }

 private:
  static constexpr int64_t kLine = mxtile::bf16::kLineK;
  static constexpr int64_t kRows = 16, kCols = 32;  // weight rows of a tile, of an epilogue call
  static constexpr int64_t kLines = Tuning::kLines, kHalves = 2 * kLines;
  static constexpr int64_t kRowsAProduct = kRows / kHalves;  // decoded between two products
  struct alignas(64) Batch {
    uint16_t tile[kHalves][2][kTileWords];  // even k of line 0, odd k of line 0, even k of line 1..
  };
  struct Row {
    int64_t number;
    const uint8_t* codes;
    const uint8_t* scales;
    int32_t byte;
  };

  AmxStream(const char* x, const EpilogueContext& context)
      : x_(x),
        context_(context),
        epilogue_(epilogue_for(isa_current())),
        w_(context.args->rhs),
        m_(context.args->lhs.rows),
        lines_(ceil_div(context.args->rhs.k, kLine)) {}

  // Two tiles [16 k pairs][rows][2] of k in order to one of even k and one of odd k.
  template <int64_t whole>
  static void split_pairs(uint16_t* words, int64_t count) {
    const int64_t rows = whole != 0 ? whole : count;
    uint32_t pair[kLine / 2 * kStreamMaxRows], split[kLine / 2 * kStreamMaxRows];
    std::memcpy(pair, words, static_cast<size_t>(kLine * rows) * 2);
    for (int64_t p = 0; p < kRows; ++p) {
      const uint32_t* a = pair + 2 * p * rows;
      const uint32_t* b = a + rows;
      uint32_t* even = split + p * rows;
      uint32_t* odd = even + kRows * rows;
      for (int64_t m = 0; m < rows; ++m) {
        even[m] = (a[m] & 0xFFFFu) | (b[m] << 16);
        odd[m] = (a[m] >> 16) | (b[m] & 0xFFFF0000u);
      }
    }
    std::memcpy(words, split, static_cast<size_t>(kLine * rows) * 2);
  }

  // D[:, n0 .. n0+31]
  template <Codes kind>
  void run_cols(Tiles& tiles, const Decoder& decoder, int64_t n0) const {
    Batch batch;
    Row rows[kCols];
    for (int64_t r = 0; r < kCols; ++r) {
      const int64_t n = n0 + r < w_.rows ? n0 + r : w_.rows - 1;
      rows[r] = {n, w_.codes + n * w_.code_row_stride, w_.scales_of(n),
                 row_byte(context_.rhs_exp[n])};
    }
    tiles.template zero<0>();
    tiles.template zero<1>();
    tiles.template zero<2>();
    tiles.template zero<3>();
    int64_t ready = 0;  // halves whose lower tiles are not multiplied yet
    const char* x = x_;
    for (int64_t line = 0; line < lines_; line += kLines) {
      const int64_t count = lines_ - line < kLines ? lines_ - line : kLines;
      if ((line + kLines) * kLine <= w_.k) {
        run_batch<true, kind>(tiles, decoder, rows, line, kLines, batch, x, ready);
      } else {
        run_batch<false, kind>(tiles, decoder, rows, line, count, batch, x, ready);
      }
      x += ready * kLine * m_;
      ready = 2 * count;
    }
    for (int64_t h = 0; h < ready; h += 2) {
      product<0, 1>(tiles, batch, x, h, ready);
      product<1, 1>(tiles, batch, x, h, ready);
    }
    finish(tiles, n0);
  }

  // Decodes lines [line, line + count) of the rows. Next to the upper ones the lower tiles of the
  // batch before are multiplied, whose x this is; next to the lower ones the upper tiles of this
  // one.
  template <bool inside, Codes kind>
  [[gnu::always_inline]] inline void run_batch(Tiles& tiles, const Decoder& decoder,
                                               const Row* rows, int64_t line, int64_t count,
                                               Batch& batch, const char* x, int64_t ready) const {
    for (int64_t h = 0, r = 0; h < kHalves; h += 2, r += 2 * kRowsAProduct) {
      decode_rows<inside, kind>(decoder, rows, r, line, count, batch);
      product<0, 1>(tiles, batch, x, h, ready);
      decode_rows<inside, kind>(decoder, rows, r + kRowsAProduct, line, count, batch);
      product<1, 1>(tiles, batch, x, h, ready);
    }
    x += ready * kLine * m_;
    ready = 2 * count;
    for (int64_t h = 0, r = kRows; h < kHalves; h += 2, r += 2 * kRowsAProduct) {
      decode_rows<inside, kind>(decoder, rows, r, line, count, batch);
      product<0, 0>(tiles, batch, x, h, ready);
      decode_rows<inside, kind>(decoder, rows, r + kRowsAProduct, line, count, batch);
      product<1, 0>(tiles, batch, x, h, ready);
    }
  }

  // Adds rows 16 lower .. of half h + odd of a batch.
  template <int odd, int lower>
  [[gnu::always_inline]] inline void product(Tiles& tiles, const Batch& batch, const char* x,
                                             int64_t h, int64_t ready) const {
    if (h + odd >= ready) return;
    tiles.template load<6 + odd>(x + (h + odd) * kLine * m_, 4 * m_);
    tiles.template load<4 + lower>(batch.tile[h + odd][lower], 64);
    tiles.template dot_bf16<2 * lower + odd, 4 + lower, 6 + odd>();
  }

  template <bool inside, Codes kind>
  [[gnu::always_inline]] inline void decode_rows(const Decoder& decoder, const Row* rows, int64_t r,
                                                 int64_t line, int64_t count, Batch& batch) const {
    for (int64_t i = 0; i < kRowsAProduct; ++i) {
      decode_row<inside, kind>(decoder, rows, r + i, line, count, batch);
    }
  }

  // inside: kLines whole lines. Else there may be fewer, and zeros follow the end of the row.
  template <bool inside, Codes kind>
  [[gnu::always_inline]] inline void decode_row(const Decoder& decoder, const Row* rows, int64_t r,
                                                int64_t line, int64_t count, Batch& batch) const {
    alignas(64) uint32_t words[16];
    alignas(64) uint8_t padded[kLine];
    constexpr int64_t kBytes = line_bytes(kind);
    if constexpr (inside) count = kLines;
    // Rows are read side by side, but the next ones fetched to L2 one after the other, as they lie:
    // prefetchers of the core then see one stream, and run ahead of it too.
    const uint8_t* ahead =
        rows[0].codes + kCols * w_.code_row_stride + (line * kCols + r * count) * kBytes;
#pragma GCC unroll 4
    for (int64_t i = 0; i < count * kBytes; i += 64) __builtin_prefetch(ahead + i, 0, 2);

    const Row& row = rows[r];
    const uint8_t* codes = row.codes + line * kBytes;
    constexpr int64_t kHalfWords = 2 * kTileWords;
    uint16_t* out = batch.tile[0][r / kRows] + r % kRows * kBlock;
    if constexpr (kind == Codes::small) {
      const uint8_t* scales = row.scales + line * 4;
#pragma GCC unroll 8
      for (int64_t i = 0; i < count; ++i, codes += kBytes, scales += 4, out += 2 * kHalfWords) {
        if (!inside && (line + i + 1) * kLine > w_.k) {
          copy_last_line(w_, row.number, (line + i) * kLine, padded);
          copy_last_scales(w_, row.number, (line + i) * kLine, padded + kLine / 2);
          decoder.split_scaled_line(padded, padded + kLine / 2, out, out + kHalfWords);
        } else {
          decoder.split_scaled_line(codes, scales, out, out + kHalfWords);
        }
      }
      return;
    }
    const int64_t left = ceil_div(w_.k, kBlock) - 2 * line;
    const int64_t blocks = inside || left > 2 * count ? 2 * count : left;
    const unsigned nan = Decoder::line_words(row.scales + line * 2, blocks, row.byte, words);
#pragma GCC unroll 8
    for (int64_t i = 0; i < count; ++i) {
      const uint8_t* from = codes + i * kBytes;
      if (!inside && (line + i + 1) * kLine > w_.k) {
        copy_last_line(w_, row.number, (line + i) * kLine, padded);
        from = padded;
      }
      uint16_t* even = out + 2 * i * kHalfWords;
      if constexpr (kind == Codes::nibbles) {
        decoder.split_packed_line(from, words, i, even, even + kHalfWords);
      } else {
        decoder.split_line(from, words + 2 * i, even, even + kHalfWords);
      }
    }
    if (__builtin_expect(nan != 0, 0)) {
      for (int i = 0; i < 2 * count; ++i) {
        uint16_t* even = out + i / 2 * 2 * kHalfWords;
        if (nan >> i & 1) Decoder::make_block_nan(i % 2, even, even + kHalfWords);
      }
    }
  }

  void finish(Tiles& tiles, int64_t n0) const {
    constexpr int kLanes = Simd::kLanes;
    alignas(64) float sums[4][kRows * 16] = {};
    alignas(64) float turned[kStreamMaxRows * kCols];
    tiles.template store<0>(sums[0], 64);
    tiles.template store<1>(sums[1], 64);
    tiles.template store<2>(sums[2], 64);
    tiles.template store<3>(sums[3], 64);
    for (int64_t n = 0; n < kCols; n += kLanes) {
      const float* even = sums[n / kRows * 2] + n % kRows * 16;
      const float* odd = sums[n / kRows * 2 + 1] + n % kRows * 16;
      for (int64_t m = 0; m < m_; m += kLanes) {
        typename Simd::F x[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          x[i] = Simd::add(Simd::load(even + i * 16 + m), Simd::load(odd + i * 16 + m));
        }
        mxtile::simd::transpose<Simd>(x);
        for (int i = 0; i < kLanes; ++i) Simd::store(turned + (m + i) * kCols + n, x[i]);
      }
    }
    const int64_t cols = w_.rows - n0 < kCols ? w_.rows - n0 : kCols;
    epilogue_(context_, turned, kCols, 0, n0, static_cast<int>(m_), static_cast<int>(cols));
  }

  const char* x_;
  const EpilogueContext& context_;
  EpilogueFn epilogue_;
  const StridedOperand& w_;
  int64_t m_, lines_;
};

template <class Stream>
const KernelImpl* stream_impl() {
  static constexpr KernelImpl impl{Stream::panel_bytes, Stream::pack, nullptr, Stream::run,
                                   Stream::row_sums};
  return &impl;
}

}  // namespace te_mx::cpu
