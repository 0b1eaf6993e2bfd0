// Kernel::avx512_bf16_stream: dot products along k.
//
// Four weight rows at a time: a line of 64 codes of each becomes two registers of bf16, which meet
// up to four rows of x at once. With more rows of x the decoded lines of a k chunk rest in L1 for
// the following rows. Lane i of an accumulator sums k pair i of every block, in block order,
// whatever M is; the lanes are added at the end.
#include <type_traits>

#include "decode/stream_bf16.hpp"
#include "mxtile/bf16/avx512.hpp"
#include "mxtile/simd/avx512.hpp"
#include "mxtile/simd/transpose.hpp"

namespace te_mx::cpu {
namespace {

namespace bf16 = mxtile::bf16;

struct Tuning {
  static constexpr int64_t kQuad = 4;         // weight rows at a time
  static constexpr int64_t kGroup = 16;       // weight rows an epilogue call
  static constexpr int64_t kLongChunk = 128;  // k blocks, M <= 4: bounds the exponent words
  static constexpr int64_t kShortChunk = 32;  // k blocks, M > 4: x chunk and decoded lines in L1
  static constexpr int64_t kAhead = 8 << 10;  // bytes fetched beyond the next quad
  static constexpr int64_t kItemRows = 128;
  static constexpr int64_t kPackBlocks = 32;      // of x, of an item
  static constexpr int64_t kInlineBlocks = 1600;  // of x, about 8 us: not worth waking a team
};

// Rows of x are stored in panels of 1, 2 or 4 rows, with zero rows to fill the last.
int64_t panel_rows(int64_t m) { return m <= 2 ? m : 4; }
int64_t panel_words(int64_t k, int64_t m) {
  return round_up(ceil_div(k, kBlock), 2) * panel_rows(m) * kBlock;
}

constexpr int64_t kLineWords = 2 * Tuning::kQuad * kBlock;  // of a decoded line of a quad

struct Quad {
  const uint8_t* codes[Tuning::kQuad];   // lines of the chunk
  const uint8_t* scales[Tuning::kQuad];  // of NVFP4, four a line; nothing of what follows then
  const uint32_t* words[Tuning::kQuad];  // exponent word of each block, twice
  const uint32_t* nan_words;             // [quad][kLongChunk], or null when no block is NaN
  int64_t lines;
  const uint8_t* ahead;  // to fetch meanwhile: as many bytes as the lines have
  Codes kind;
};

// run(kind as a type)
template <class Run>
[[gnu::always_inline]] inline void with_kind(Codes kind, const Run& run) {
  if (kind == Codes::small) return run(std::integral_constant<Codes, Codes::small>{});
  if (kind == Codes::nibbles) return run(std::integral_constant<Codes, Codes::nibbles>{});
  run(std::integral_constant<Codes, Codes::bytes>{});
}

// copy_last_line() of this level.
void last_line(const StridedOperand& o, int64_t row, int64_t k, uint8_t* padded) {
  if (o.nibbles) return copy_last_line(o, row, k, padded);
  bf16::copy_part(o.at(row, k), o.k - k, padded);
}

// Line `line` of row r of a quad, as words of k 0..31 and of k 32..63.
template <Codes kind>
[[gnu::always_inline]] inline void decode_row_line(const bf16::Avx512Decoder& decoder,
                                                   const Quad& q, int r, int64_t line,
                                                   bf16::Words& first, bf16::Words& second) {
  const uint8_t* codes = q.codes[r] + line * line_bytes(kind);
  if constexpr (kind == Codes::small) {
    const uint8_t* scales = q.scales[r] + 4 * line;
    first = bf16::Avx512Decoder::scaled_block(codes, scales);
    second = bf16::Avx512Decoder::scaled_block(codes + 16, scales + 2);
    return;
  }
  const uint32_t* words = q.words[r] + 2 * line;
  if constexpr (kind == Codes::nibbles) {
    first = decoder.decode_packed_block(codes, words[0]);
    second = decoder.decode_packed_block(codes + 16, words[1]);
  } else {
    decoder.decode_line(codes, words[0], words[1], first, second);
  }
  if (__builtin_expect(q.nan_words != nullptr, 0)) {
    const uint32_t* nan = q.nan_words + r * Tuning::kLongChunk + 2 * line;
    first = bf16::or_words(first, bf16::broadcast_word(nan[0]));
    second = bf16::or_words(second, bf16::broadcast_word(nan[1]));
  }
}

// sums[row][m] += lines of the quad . rows of x
template <int rows_x, Codes kind>
void decode_lines_and_dot(const bf16::Avx512Decoder& decoder, const Quad& q, const uint16_t* x,
                          int64_t x_block, float* sums) {
  constexpr int64_t kLineBytes = line_bytes(kind);
  bf16::Vec acc[4][rows_x];
  for (int r = 0; r < 4; ++r) {
    for (int m = 0; m < rows_x; ++m) acc[r][m] = bf16::load(sums + (r * rows_x + m) * 16);
  }
  const uint8_t* ahead = q.ahead;
  for (int64_t line = 0; line < q.lines; ++line, x += 2 * x_block, ahead += 4 * kLineBytes) {
    bf16::Words first[4], second[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      decode_row_line<kind>(decoder, q, r, line, first[r], second[r]);
      // To L2, the next line of memory at every line of codes (of 4 bits, every second one).
      if (kind == Codes::bytes || r % 2 == 0) __builtin_prefetch(ahead + r * kLineBytes, 0, 2);
    }
#pragma GCC unroll 4
    for (int m = 0; m < rows_x; ++m) {
      const bf16::Words x0 = bf16::load_words(x + m * kBlock);
      const bf16::Words x1 = bf16::load_words(x + x_block + m * kBlock);
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) {
        acc[r][m] = bf16::dot(bf16::dot(acc[r][m], first[r], x0), second[r], x1);
      }
    }
  }
  for (int r = 0; r < 4; ++r) {
    for (int m = 0; m < rows_x; ++m) bf16::store(sums + (r * rows_x + m) * 16, acc[r][m]);
  }
}

template <int rows_x>
void decode_and_dot(const bf16::Avx512Decoder& decoder, const Quad& q, const uint16_t* x,
                    int64_t x_block, float* sums) {
  with_kind(q.kind, [&](auto kind) {
    decode_lines_and_dot<rows_x, kind.value>(decoder, q, x, x_block, sums);
  });
}

// decoded[line][half][4 rows][32 k]
template <Codes kind>
void decode_lines(const bf16::Avx512Decoder& decoder, const Quad& q, uint16_t* decoded) {
  constexpr int64_t kLineBytes = line_bytes(kind);
  const uint8_t* ahead = q.ahead;
  for (int64_t line = 0; line < q.lines; ++line, ahead += 4 * kLineBytes, decoded += kLineWords) {
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      bf16::Words first, second;
      decode_row_line<kind>(decoder, q, r, line, first, second);
      if (kind == Codes::bytes || r % 2 == 0) __builtin_prefetch(ahead + r * kLineBytes, 0, 2);
      bf16::store_words(decoded + r * kBlock, first);
      bf16::store_words(decoded + (4 + r) * kBlock, second);
    }
  }
}

// acc[row][m] += decoded lines . four rows of x
[[gnu::always_inline]] inline void dot_decoded(const uint16_t* decoded, int64_t lines,
                                               const uint16_t* x, int64_t x_block,
                                               bf16::Vec (&acc)[4][4]) {
  for (int64_t half = 0; half < 2 * lines; ++half, x += x_block, decoded += 4 * kBlock) {
    bf16::Words w[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) w[r] = bf16::load_words(decoded + r * kBlock);
#pragma GCC unroll 4
    for (int m = 0; m < 4; ++m) {
      const bf16::Words xm = bf16::load_words(x + m * kBlock);
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) acc[r][m] = bf16::dot(acc[r][m], w[r], xm);
    }
  }
}

class Stream {
 public:
  Stream(const uint16_t* x, const EpilogueContext& context)
      : x_(x),
        context_(context),
        epilogue_(epilogue_for(isa_current())),
        w_(context.args->rhs),
        m_(context.args->lhs.rows),
        x_rows_(panel_rows(m_)),
        kept_(round_up(m_, x_rows_)),
        blocks_(ceil_div(w_.k, kBlock)) {}

  // D[:, n0 .. end - 1], sixteen columns at most
  void run_group(const bf16::Avx512Decoder& decoder, int64_t n0, int64_t end) const {
    alignas(64) float turned[kValuesMaxRows * Tuning::kGroup];
    const int64_t cols = least(end - n0, Tuning::kGroup);
    if (kept_ <= 4) {
      sum_group(decoder, n0, cols, turned);
    } else {
      for (int64_t q = 0; q < cols; q += Tuning::kQuad) sum_quad(decoder, n0 + q, turned + q);
    }
    for (int64_t m = 0; m < m_; m += kRowBlock) {
      epilogue_(context_, turned + m * Tuning::kGroup, Tuning::kGroup, m, n0,
                static_cast<int>(least(m_ - m, kRowBlock)), static_cast<int>(cols));
    }
  }

 private:
  static_assert(Tuning::kGroup == 16 && Tuning::kQuad == 4, "row_sums() takes sixteen sums");
  using Simd = mxtile::simd::Avx512;

  // turned[m][16] of `cols` rows of weights from n0 on, for up to four rows of x.
  void sum_group(const bf16::Avx512Decoder& decoder, int64_t n0, int64_t cols,
                 float* turned) const {
    alignas(64) float sums[Tuning::kGroup * 4 * 16];
    std::memset(sums, 0, static_cast<size_t>(Tuning::kGroup * kept_ * 16) * 4);
    for (int64_t q = 0; q < cols; q += Tuning::kQuad) {
      for (int64_t b = 0; b < blocks_; b += Tuning::kLongChunk) {
        run_quad(n0 + q, b, least(blocks_ - b, Tuning::kLongChunk),
                 [&](const Quad& quad, int64_t line) {
                   const uint16_t* x = x_ + (b + 2 * line) * x_rows_ * kBlock;
                   dot_lines(decoder, quad, x, sums + q * kept_ * 16);
                 });
      }
    }
    for (int64_t m = 0; m < m_; ++m) {
      bf16::Vec rows[Tuning::kGroup];
#pragma GCC unroll 16
      for (int64_t n = 0; n < Tuning::kGroup; ++n) {
        rows[n] = bf16::load(sums + (n * kept_ + m) * 16);
      }
      bf16::store(turned + m * Tuning::kGroup, mxtile::simd::row_sums<Simd>(rows));
    }
  }

  // turned[m][4 of 16] of a quad, for more rows of x: its lines are decoded to L1, and four rows of
  // x at a time keep their sums in registers. Only a k of several chunks has sums in memory.
  void sum_quad(const bf16::Avx512Decoder& decoder, int64_t row, float* turned) const {
    alignas(64) float sums[Tuning::kQuad * kValuesMaxRows * 16];
    alignas(64) uint16_t decoded[Tuning::kShortChunk / 2 * kLineWords];
    alignas(64) float lanes[16];
    for (int64_t b = 0; b < blocks_; b += Tuning::kShortChunk) {
      const int64_t count = least(blocks_ - b, Tuning::kShortChunk);
      run_quad(row, b, count, [&](const Quad& quad, int64_t line) {
        with_kind(quad.kind, [&](auto kind) {
          decode_lines<kind.value>(decoder, quad, decoded + line * kLineWords);
        });
      });
      const uint16_t* x = x_ + b * x_rows_ * kBlock;
      for (int64_t m = 0; m < kept_; m += 4, x += panel_words(w_.k, m_)) {
        bf16::Vec acc[4][4];
        float* kept = sums + m * Tuning::kQuad * 16;
#pragma GCC unroll 16
        for (int64_t i = 0; i < 16; ++i) {
          acc[i % 4][i / 4] = b == 0 ? bf16::zero() : bf16::load(kept + i * 16);
        }
        dot_decoded(decoded, ceil_div(count, 2), x, x_rows_ * kBlock, acc);
        bf16::Vec rows[16];
#pragma GCC unroll 16
        for (int64_t i = 0; i < 16; ++i) rows[i] = acc[i % 4][i / 4];
        if (b + count < blocks_) {
#pragma GCC unroll 16
          for (int64_t i = 0; i < 16; ++i) bf16::store(kept + i * 16, rows[i]);
          continue;
        }
        bf16::store(lanes, mxtile::simd::row_sums<Simd>(rows));
        for (int64_t i = 0; i < 4; ++i) {
          std::memcpy(turned + (m + i) * Tuning::kGroup, lanes + 4 * i, 16);
        }
      }
    }
  }

  static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

  // body(quad, first line) for `count` blocks of four rows: whole lines, then the rest.
  template <class Body>
  [[gnu::always_inline]] inline void run_quad(int64_t row, int64_t block, int64_t count,
                                              const Body& body) const {
    alignas(64) uint32_t words[Tuning::kQuad][Tuning::kLongChunk + 16];
    alignas(64) uint32_t nan_words[Tuning::kQuad][Tuning::kLongChunk];
    alignas(64) uint8_t padded[Tuning::kQuad * 64];
    uint8_t last_scales[Tuning::kQuad][4];
    Quad q{};
    q.kind = w_.e4m3 ? Codes::small : w_.nibbles ? Codes::nibbles : Codes::bytes;
    bool any_nan = false;
    const int64_t k = block * kBlock;
    for (int64_t r = 0; r < Tuning::kQuad; ++r) {
      const int64_t n = clamp_row(row + r);
      q.codes[r] = w_.at(n, k);
      if (w_.e4m3) {
        q.scales[r] = w_.small_scale(n, k / kSmallBlock);
        continue;
      }
      q.words[r] = words[r];
      any_nan |= fill_words(n, block, count, words[r]);
    }
    q.nan_words = nullptr;
    if (any_nan) {
      for (int64_t r = 0; r < Tuning::kQuad; ++r) {
        fill_nan_words(clamp_row(row + r), block, count, nan_words[r]);
      }
      q.nan_words = nan_words[0];
    }
    // Rows are used side by side, but fetched one after the other, as they lie: prefetchers of the
    // core then see one stream, and run ahead of it too.
    const int64_t bytes = line_bytes(q.kind);
    q.ahead = w_.codes + (row + Tuning::kQuad) * w_.code_row_stride + Tuning::kAhead +
              k / 64 * Tuning::kQuad * bytes;

    const int64_t left = w_.k - k < count * kBlock ? w_.k - k : count * kBlock;
    q.lines = left / 64;
    if (q.lines > 0) body(q, int64_t{0});
    if (left % 64 != 0) {  // the last line of the rows, zero-filled
      const int64_t done = q.lines;
      for (int64_t r = 0; r < Tuning::kQuad; ++r) {
        last_line(w_, clamp_row(row + r), k + done * 64, padded + r * 64);
        q.codes[r] = padded + r * 64;
        if (w_.e4m3) {
          copy_last_scales(w_, clamp_row(row + r), k + done * 64, last_scales[r]);
          q.scales[r] = last_scales[r];
          continue;
        }
        q.words[r] += 2 * done;
      }
      if (q.nan_words != nullptr) q.nan_words += 2 * done;
      q.lines = 1;
      q.ahead += done * Tuning::kQuad * bytes;
      body(q, done);
    }
  }

  void dot_lines(const bf16::Avx512Decoder& decoder, const Quad& q, const uint16_t* x,
                 float* sums) const {
    const int64_t x_block = x_rows_ * kBlock;
    switch (kept_) {
      case 1:
        return decode_and_dot<1>(decoder, q, x, x_block, sums);
      case 2:
        return decode_and_dot<2>(decoder, q, x, x_block, sums);
      default:
        return decode_and_dot<4>(decoder, q, x, x_block, sums);
    }
  }

  int64_t clamp_row(int64_t row) const { return row < w_.rows ? row : w_.rows - 1; }

  const uint8_t* scales(int64_t row, int64_t block) const {
    return w_.scales + row * w_.scale_row_stride + block;
  }

  // Returns whether a block is NaN. An odd count is followed by a word for the missing half of the
  // last line.
  bool fill_words(int64_t row, int64_t block, int64_t count, uint32_t* words) const {
    const uint8_t* s = scales(row, block);
    const int base = row_byte(context_.rhs_exp[row]);
    unsigned nan = 0;
    for (int64_t i = 0; i < count; i += 16) {
      const int64_t blocks = count - i < 16 ? count - i : 16;
      nan |= bf16::Avx512Decoder::line_words(s + i, blocks, base, words + i);
    }
    words[count] = 0;
    return nan != 0;
  }

  void fill_nan_words(int64_t row, int64_t block, int64_t count, uint32_t* words) const {
    const uint8_t* s = scales(row, block);
    for (int64_t i = 0; i < Tuning::kLongChunk; ++i) {
      const bool nan = i < count && s[i] == 255;
      words[i] = nan ? bf16::kQuietNan * 0x10001u : 0;
    }
  }

  const uint16_t* x_;
  const EpilogueContext& context_;
  EpilogueFn epilogue_;
  const StridedOperand& w_;
  int64_t m_, x_rows_, kept_, blocks_;  // kept_: m_ with the zero rows
};

// x as panels [k/32 up to even][panel rows][32]: the second half of an odd last line meets zeros.
int64_t panel_bytes(Role role, int64_t rows, int64_t k) {
  return role == Role::rhs ? 0 : ceil_div(rows, panel_rows(rows)) * panel_words(k, rows) * 2;
}

// Blocks [begin, end) of a row of x whose k is contiguous, a line of two at a time; begin is even.
// Blocks of the panel lie `stride` words apart.
void pack_lines(const bf16::Avx512Decoder& decoder, const StridedOperand& x, int64_t row, int base,
                int64_t begin, int64_t end, uint16_t* panel, int64_t stride) {
  alignas(64) uint32_t words[Tuning::kPackBlocks + 16];
  alignas(64) uint8_t padded[64];
  const uint8_t* scales = x.scales + row * x.scale_row_stride;
  uint32_t nan = 0;
  for (int64_t b = begin; b < end; b += 16) {
    const int64_t count = end - b < 16 ? end - b : 16;
    nan |= bf16::Avx512Decoder::line_words(scales + b, count, base, words + b - begin)
           << (b - begin);
  }
  words[end - begin] = 0;
  for (int64_t b = begin; b < end; b += 2) {
    const int64_t k = b * kBlock;
    const uint8_t* codes = padded;
    if (k + 64 > x.k) {
      last_line(x, row, k, padded);
    } else {
      codes = x.at(row, k);
    }
    const uint32_t* word = words + b - begin;
    bf16::Words half[2];
    if (x.nibbles) {
      half[0] = decoder.decode_packed_block(codes, word[0]);
      half[1] = decoder.decode_packed_block(codes + 16, word[1]);
    } else {
      decoder.decode_line(codes, word[0], word[1], half[0], half[1]);
    }
    for (int64_t i = 0; i < 2; ++i) {
      if (__builtin_expect(nan >> (b - begin + i) & 1, 0)) {
        half[i] = bf16::or_words(half[i], bf16::broadcast_word(bf16::kQuietNan * 0x10001u));
      }
      bf16::store_words(panel + (b + i) * stride, half[i]);
    }
  }
}

Status pack(Role, const StridedOperand& x, const float* exponents, void* panels, int threads) {
  const int64_t blocks = ceil_div(x.k, kBlock), rows = panel_rows(x.rows);
  uint16_t* words = static_cast<uint16_t*>(panels);
  if (x.as_values() || x.e4m3) {
    const int64_t panel = panel_words(x.k, x.rows);
    for (int64_t r = x.rows; r < round_up(x.rows, rows); ++r) {
      uint16_t* to = words + r / rows * panel + r % rows * kBlock;
      for (int64_t b = 0; b < round_up(blocks, 2); ++b) {
        bf16::store_words(to + b * rows * kBlock, bf16::broadcast_word(0));
      }
    }
    return put_values<bf16::Avx512Decoder>(
        x, exponents, threads, [&](int64_t r, int64_t b, const uint16_t* from) {
          uint16_t* to = words + r / rows * panel + (b * rows + r % rows) * kBlock;
          bf16::store_words(to, bf16::load_words(from));
        });
  }
  if (x.code_k_stride == 1) {
    const bool small = x.rows * blocks < Tuning::kInlineBlocks;
    parallel_for(small ? 1 : threads, ceil_div(blocks, Tuning::kPackBlocks), [&](int64_t item) {
      const bf16::Avx512Decoder decoder(x.element);
      const int64_t begin = item * Tuning::kPackBlocks;
      const int64_t end =
          begin + Tuning::kPackBlocks < blocks ? begin + Tuning::kPackBlocks : blocks;
      for (int64_t r = 0; r < round_up(x.rows, rows); ++r) {
        uint16_t* to = words + r / rows * panel_words(x.k, x.rows) + r % rows * kBlock;
        if (r < x.rows) {
          pack_lines(decoder, x, r, row_byte(exponents[r]), begin, end, to, rows * kBlock);
          continue;
        }
        for (int64_t b = begin; b < round_up(end, 2); ++b) {
          bf16::store_words(to + b * rows * kBlock, bf16::broadcast_word(0));
        }
      }
    });
    return Status::ok;
  }
  Packer<bf16::Avx512Decoder>(x, exponents, TileOrder::compact, words, rows).run<false>(threads);
  if (blocks % 2 == 1) {
    for (int64_t r = 0; r < x.rows; r += rows, words += panel_words(x.k, x.rows)) {
      std::memset(words + blocks * rows * kBlock, 0, static_cast<size_t>(rows * kBlock) * 2);
    }
  }
  return Status::ok;
}

void row_sums(const StridedOperand& x, const void* panels, const float* exponents, float* out,
              int threads) {
  const int64_t rows = panel_rows(x.rows);
  bf16_row_sums(static_cast<const uint16_t*>(panels),
                {rows, panel_words(x.k, x.rows), rows * kBlock, kBlock, 2}, x.rows,
                ceil_div(x.k, kBlock), exponents, out, threads);
}

Status run(const Range&, const void* lhs, const void*, const EpilogueContext& context, void*) {
  const Stream stream(static_cast<const uint16_t*>(lhs), context);
  const int64_t n = context.args->rhs.rows;
  const int threads = context.args->threads;
  // Few columns and a long k are shared by fours, that all threads have some.
  const bool few = n <= Tuning::kGroup * threads;
  const int64_t step = few ? Tuning::kQuad : Tuning::kGroup;
  const int64_t rows = stream_item_rows(n, threads, step, Tuning::kItemRows);
  parallel_for(threads, ceil_div(n, rows), [&](int64_t item) {
    const bf16::Avx512Decoder decoder(context.args->rhs.element);
    const int64_t end = (item + 1) * rows < n ? (item + 1) * rows : n;
    for (int64_t n0 = item * rows; n0 < end; n0 += Tuning::kGroup)
      stream.run_group(decoder, n0, end);
  });
  return Status::ok;
}

}  // namespace

const KernelImpl* avx512_bf16_stream_impl() {
  static constexpr KernelImpl impl{panel_bytes, pack, nullptr, run, row_sums};
  return &impl;
}

}  // namespace te_mx::cpu
