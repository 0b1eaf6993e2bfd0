// Products whose k is one block, of many rows with few: the many are decoded where they are
// multiplied, since to make panels of them would cost more than all else.
//
//   item            kItemRows rows of the longer side
//     32 rows       decoded to two pair tiles in the first level of the cache
//       rhs is longer   blocks of 32 columns of D, by the engine of the panel GEMM
//       lhs is longer   rows of D that follow each other, sixteen elements at a time
//
// The products of an element and their order are those of PanelGemm, and so are its bits. With one
// block a row no value has an exponent of its own: it is that of its row.
#pragma once

#include "common/isa.h"
#include "common/parallel.h"
#include "common/room.h"
#include "gemm/gemm_bf16.hpp"
#include "mxtile/bf16/avx512.hpp"

namespace te_mx::cpu {

namespace bf16 = mxtile::bf16;

inline constexpr int64_t kThinRows = 64;   // of lhs, at most, where rhs is decoded
inline constexpr int64_t kFlatRows = 256;  // at least, where lhs is: fewer are not worth a table
inline constexpr int64_t kFlatWork = 160;  // vectors of a FlatTable, at most

// 16 rows of an operand at a time as a pair tile of the k pairs that there are.
template <class Decoder, class BlockDecoder>
class OneBlock {
 public:
  explicit OneBlock(const StridedOperand& operand)
      : source_{operand, nullptr},
        operand_(operand),
        decoder_(operand.element),
        block_decoder_(operand.element),
        k_(static_cast<int>(operand.k)),
        used_(used_of_one_block(operand.k)) {
    const int64_t width = operand.nibbles ? 16 : round_up(used_, 16);
    const int64_t bytes = operand.nibbles ? ceil_div(operand.k, 2) : operand.k;
    // Rows whose registers end before the operand does.
    const int64_t behind = operand.code_row_stride > 0 ? width - bytes : 0;
    in_place_ = operand.rows - (behind > 0 ? ceil_div(behind, operand.code_row_stride) : 0);
    std::memset(lines_, 0, sizeof lines_);
  }

  static int pairs(int64_t k) { return static_cast<int>(ceil_div(k, 2)); }

  // Of 32 rows.
  void panel(int64_t panel, uint16_t* to) {
    const int64_t row = panel * kRowBlock;
    if (!operand_.nibbles && operand_.code_row_stride == 1 && operand_.scale_row_stride == 1 &&
        !is_fnuz(operand_.element) && row + kRowBlock <= operand_.rows) {
      return block_decoder_.pair_tiles(operand_.at(row, 0), operand_.code_k_stride,
                                       operand_.scales + row, to, to + kTileWords, k_);
    }
    tile(2 * panel, to);
    tile(2 * panel + 1, to + kTileWords);
  }

  void tile(int64_t group, uint16_t* to) {
    alignas(16) uint8_t bytes[16];
    const int64_t row = group * 16;
    if (row + 16 <= operand_.rows && operand_.scale_row_stride == 1) {
      std::memcpy(bytes, operand_.scales + row, 16);
    } else {
      source_.template scale_bytes<true>(group, 0, 1, reinterpret_cast<uint8_t (*)[16]>(bytes));
    }
    for (uint8_t& b : bytes) b = b == 255 ? 255 : 127;
    const mxtile::bf16::TileScales scales{bytes, kRowBytes};
    if (operand_.code_k_stride == 1) {
      k_last(group, scales, to);
    } else {
      k_first(group, scales, to);
    }
  }

 private:
  alignas(64) static constexpr int32_t kRowBytes[16] = {127, 127, 127, 127, 127, 127, 127, 127,
                                                        127, 127, 127, 127, 127, 127, 127, 127};

  void k_last(int64_t group, mxtile::bf16::TileScales scales, uint16_t* to) {
    const int64_t row = group * 16;
    if (row + 16 > in_place_) {
      source_.template pad_tail<true>(group, 0, lines_);
      return decoder_.template pair_tile<true>(lines_, kBlock, scales, to, used_);
    }
    if (operand_.nibbles) {
      decoder_.packed_pair_tile(operand_.at(row, 0), operand_.code_row_stride, scales.bytes, to,
                                pairs(k_));
    } else {
      decoder_.template pair_tile<true>(operand_.at(row, 0), operand_.code_row_stride, scales, to,
                                        used_);
    }
    // What follows the last k is the next row's.
    if (k_ % 2 != 0) {
      for (int r = 0; r < 16; ++r) to[(k_ / 2) * kBlock + 2 * r + 1] = 0;
    }
  }

  void k_first(int64_t group, mxtile::bf16::TileScales scales, uint16_t* to) {
    const int64_t row = group * 16, stride = operand_.code_k_stride;
    if (row + 16 > operand_.rows) {
      source_.template pad_tail<false>(group, 0, lines_, used_);
    } else if (k_ % 4 == 0) {
      return decoder_.template pair_tile<false>(operand_.at(row, 0), stride, scales, to, used_);
    } else {
      for (int k = 0; k < k_; ++k) std::memcpy(lines_ + 16 * k, operand_.at(row, k), 16);
    }
    decoder_.template pair_tile<false>(lines_, 16, scales, to, used_);
  }

  const TileSource source_;
  const StridedOperand& operand_;
  const Decoder decoder_;
  const BlockDecoder block_decoder_;
  const int k_;
  const int used_;
  int64_t in_place_;
  alignas(64) uint8_t lines_[16 * kBlock];  // codes one a byte; by k, those past the last stay 0
};

// Engine: that of PanelGemm, which is also made of a number of k pairs.
template <class Engine, class Decoder, class BlockDecoder>
class ThinGemm {
 public:
  // The side to decode.
  static Decodes decodes(const GemmTask& args) {
    const int64_t m = args.lhs.rows, n = args.rhs.rows, k = args.lhs.k;
    if (k > kBlock || k == 0) return Decodes::none;
    if (m <= kThinRows && args.rhs.packed == nullptr) return Decodes::rhs;
    const bool flat = n <= kRowBlock && Tiles::pairs(k) * n <= kFlatWork;
    const bool no_sums = args.bias_grad_kind == BiasGrad::none;
    return m >= kFlatRows && flat && no_sums && args.lhs.packed == nullptr ? Decodes::lhs
                                                                           : Decodes::none;
  }

  static Status run(const Range& range, const void* lhs, const void* rhs,
                    const EpilogueContext& context, void* workspace) {
    if (lhs != nullptr && rhs != nullptr)
      return PanelGemm<Engine>::run(range, lhs, rhs, context, workspace);
    const ThinGemm gemm(range, context);
    if (rhs == nullptr) {
      gemm.run_columns(static_cast<const char*>(lhs));
    } else {
      gemm.run_rows(static_cast<const uint16_t*>(rhs));
    }
    return Status::ok;
  }

 private:
  using Simd = typename Engine::Simd;
  using Tiles = OneBlock<Decoder, BlockDecoder>;
  static constexpr int64_t kMostItem = 64;  // panels

  ThinGemm(const Range& range, const EpilogueContext& context)
      : range_(range),
        context_(context),
        args_(*context.args),
        epilogue_(epilogue_for(isa_current())),
        normal_(normal_powers<Simd>(context, range)),
        pairs_(Tiles::pairs(args_.lhs.k)) {}

  static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

  // Calls body(begin, end) with shares of so many panels.
  template <class Body>
  void in_items(int64_t panels, const Body& body) const {
    const int64_t most = least(kMostItem, ceil_div(panels, Engine::kItems * args_.threads));
    parallel_for(args_.threads, ceil_div(panels, most),
                 [&](int64_t item) { body(item * most, least((item + 1) * most, panels)); });
  }

  struct alignas(64) Buffers {
    uint16_t decoded[2 * kTileWords];
    float sums[2][kBlockFloats];  // one is summed and one stored
  };

  // Whether all that is done to sums is to scale them, to add a bias and D, and to store them.
  bool plain() const {
    return normal_ && args_.aux == nullptr && args_.gelu == Gelu::none &&
           context_.bias_grad_partial == nullptr && !context_.past_caches;
  }

  // rhs is decoded.
  void run_columns(const char* lhs) const {
    const StridedOperand rhs = part_of_rows(args_.rhs, range_.n0, range_.n1);
    in_items(ceil_div(rhs.rows, kRowBlock), [&](int64_t begin, int64_t end) {
      if (!plain()) {
        columns_by_blocks(lhs, rhs, begin, end);
      } else if (args_.out_dtype == DType::bf16) {
        columns_in_place<DType::bf16>(lhs, rhs, begin, end);
      } else if (args_.out_dtype == DType::f32) {
        columns_in_place<DType::f32>(lhs, rhs, begin, end);
      } else {
        columns_in_place<DType::f16>(lhs, rhs, begin, end);
      }
    });
  }

  // What 32 columns of D, or the `count` that there are, take beside their sums.
  template <DType D>
  struct Columns {
    typename Simd::I exponent[2];
    typename Simd::F bias[2];
    const GemmTask& args;
    int64_t n;
    int count;

    TE_MX_MEMBER Columns(const EpilogueContext& context, int64_t n0, int columns)
        : args(*context.args), n(n0), count(columns) {
      for (int h = 0; h < 2; ++h) {
        const auto e = mxtile::simd::nearest_int<Simd>(Simd::load(context.rhs_exp + n + 16 * h));
        exponent[h] = Simd::template shl<23>(e);
        bias[h] = bf16::zero();
      }
      if (args.bias == nullptr) return;
      alignas(64) float row[kRowBlock] = {};
      block_epilogue::load_row<Simd>(args.bias_dtype, args.bias, n, row, count);
      for (int h = 0; h < 2; ++h) bias[h] = Simd::load(row + 16 * h);
    }

    // power: 2^exponent of the row, in place.
    TE_MX_MEMBER void put(int64_t m, int32_t power, const bf16::Vec* sums) const {
      typename Simd::F x[2];
      for (int h = 0; h < 2; ++h) {
        x[h] = Simd::mul(sums[h], Simd::as_float(Simd::iadd(Simd::iset(power), exponent[h])));
        if (args.bias != nullptr) x[h] = Simd::add(x[h], bias[h]);
      }
      const int64_t at = m * args.ldo + n;
      if constexpr (D == DType::bf16) {
        if (count == kRowBlock && !args.accumulate) {
          return Simd::store_u16_line(static_cast<uint16_t*>(args.out) + at,
                                      mxtile::simd::bf16_bits<Simd>(x[0]),
                                      mxtile::simd::bf16_bits<Simd>(x[1]));
        }
      }
      for (int h = 0; h < 2 && count > 16 * h; ++h) {
        const int there = count - 16 * h < 16 ? count - 16 * h : 16;
        if (args.accumulate)
          x[h] = Simd::add(x[h], block_epilogue::load<Simd, D>(args.out, at + 16 * h, there));
        block_epilogue::store<Simd, D>(args.out, at + 16 * h, x[h], there);
      }
    }
  };

  // From sums in registers, eight rows at a time; of one or two rows that are left, those alone.
  template <DType D>
  void columns_in_place(const char* lhs, const StridedOperand& rhs, int64_t begin,
                        int64_t end) const {
    constexpr int kRows = 8, kLeft = 2;
    const int64_t rows = range_.m1 - range_.m0;
    Tiles tiles(rhs);
    alignas(64) uint16_t decoded[2 * kTileWords];
    alignas(64) int32_t powers[kThinRows] = {};
    for (int64_t r = 0; r < rows; ++r) {
      powers[r] = (static_cast<int32_t>(context_.lhs_exp[range_.m0 + r]) + 127) * (1 << 23);
    }
    for (int64_t panel = begin; panel < end; ++panel) {
      tiles.panel(panel, decoded);
      const int64_t n = range_.n0 + panel * kRowBlock;
      const Columns<D> columns(context_, n, static_cast<int>(least(kRowBlock, range_.n1 - n)));
      for (int64_t r0 = 0; r0 < rows; r0 += kRows) {
        const uint16_t* x = reinterpret_cast<const uint16_t*>(lhs + r0 / kRowBlock * kStepBytes) +
                            r0 % kRowBlock * kBlock;
        const int64_t m = range_.m0 + r0;
        if (rows - r0 <= kLeft) {
          put_columns<D, kLeft>(columns, x, decoded, m, powers + r0, rows - r0);
        } else {
          put_columns<D, kRows>(columns, x, decoded, m, powers + r0, rows - r0);
        }
      }
    }
  }

  // `rows` rows of D from m on, most_rows at most.
  template <DType D, int most_rows>
  TE_MX_MEMBER void put_columns(const Columns<D>& columns, const uint16_t* x,
                                const uint16_t* decoded, int64_t m, const int32_t* powers,
                                int64_t rows) const {
    bf16::Vec sums[most_rows][2];
    for (int r = 0; r < most_rows; ++r) sums[r][0] = sums[r][1] = bf16::zero();
    for (int p = 0; p < pairs_; ++p) {
      const bf16::Words left = bf16::load_words(decoded + p * kBlock);
      const bf16::Words right = bf16::load_words(decoded + kTileWords + p * kBlock);
#pragma GCC unroll 8
      for (int r = 0; r < most_rows; ++r) {
        const bf16::Words pair = bf16::broadcast_pair(x + r * kBlock + 2 * p);
        sums[r][0] = bf16::dot(sums[r][0], left, pair);
        sums[r][1] = bf16::dot(sums[r][1], right, pair);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < most_rows; ++r) {
      if (r < rows) columns.put(m + r, powers[r], sums[r]);
    }
  }

  // With every epilogue.
  void columns_by_blocks(const char* lhs, const StridedOperand& rhs, int64_t begin,
                         int64_t end) const {
    const int64_t row_panels = ceil_div(range_.m1 - range_.m0, kRowBlock);
    const InRoom<Buffers> buffers;
    Tiles tiles(rhs);
    Engine engine(pairs_);
    PendingRows<Simd> pending(context_, normal_);
    int64_t turn = 0;
    for (int64_t panel = begin; panel < end; ++panel) {
      tiles.panel(panel, buffers->decoded);
      const int64_t n = range_.n0 + panel * kRowBlock;
      const int cols = static_cast<int>(least(kRowBlock, range_.n1 - n));
      for (int64_t i = 0; i < row_panels; ++i) {
        const int64_t m = range_.m0 + i * kRowBlock;
        const int rows = static_cast<int>(least(kRowBlock, range_.m1 - m));
        float* const c = buffers->sums[turn ^= 1];
        if (cols == kRowBlock) pending.expect(m, n, rows);
        PanelWork<Simd> work(pending, Ahead{});
        engine.block(lhs + i * kStepBytes, reinterpret_cast<const char*>(buffers->decoded), 1, rows,
                     c, true, Reuse{}, work);
        pending.finish();
        if (cols == kRowBlock) {
          pending.start(c, m, n, rows);
        } else {
          epilogue_(context_, c, kRowBlock, m, n, rows, cols);
        }
      }
    }
    pending.finish();
    pending.fence();
  }

  // What sixteen elements of D that follow each other need, of the n sixteens of sixteen rows.
  struct alignas(64) FlatTable {
    uint16_t rhs[kFlatWork][kBlock];  // [sixteen][k pair]: of their columns
    int32_t row[kRowBlock][16];
    int32_t exponent[kRowBlock][16];  // of their columns, in place where all are normal
    float bias[kRowBlock][16];
  };

  void fill(FlatTable& t, const uint16_t* rhs) const {
    const int n = static_cast<int>(args_.rhs.rows);
    alignas(64) float bias[kRowBlock] = {};
    if (args_.bias != nullptr)
      block_epilogue::load_row<Simd>(args_.bias_dtype, args_.bias, 0, bias, n);
    for (int v = 0, row = 0, col = 0; v < n; ++v) {
      for (int lane = 0; lane < 16; ++lane) {
        const int32_t exponent = static_cast<int32_t>(context_.rhs_exp[col]);
        t.row[v][lane] = row;
        t.exponent[v][lane] = normal_ ? exponent * (1 << 23) : exponent;
        t.bias[v][lane] = bias[col];
        for (int p = 0; p < pairs_; ++p) {
          std::memcpy(t.rhs[v * pairs_ + p] + 2 * lane,
                      rhs + col / 16 * kTileWords + p * kBlock + col % 16 * 2, 4);
        }
        if (++col == n) col = 0, ++row;
      }
    }
  }

  // lhs is decoded.
  void run_rows(const uint16_t* rhs) const {
    const InRoom<FlatTable> table;
    fill(*table, rhs);
    const bool in_place = plain() && args_.ldo == args_.rhs.rows;
    in_items(ceil_div(range_.m1 - range_.m0, kRowBlock), [&](int64_t begin, int64_t end) {
      if (!in_place) {
        rows_by_blocks(*table, begin, end);
      } else if (args_.out_dtype == DType::bf16) {
        rows_in_place<DType::bf16>(*table, begin, end);
      } else if (args_.out_dtype == DType::f32) {
        rows_in_place<DType::f32>(*table, begin, end);
      } else {
        rows_in_place<DType::f16>(*table, begin, end);
      }
    });
  }

  // The sums of sixteen elements of sixteen rows.
  TE_MX_MEMBER bf16::Vec sixteen(const FlatTable& t, int v, bf16::Words row,
                                 const uint16_t* decoded) const {
    bf16::Vec sum = bf16::zero();
    const uint16_t* rhs = t.rhs[v * pairs_];
    for (int p = 0; p < pairs_; ++p, rhs += kBlock, decoded += kBlock) {
      const bf16::Words pair = bf16::pick_pairs(bf16::load_words(decoded), row);
      sum = bf16::dot(sum, bf16::load_words(rhs), pair);
    }
    return sum;
  }

  // D as one run of elements.
  template <DType D>
  void rows_in_place(const FlatTable& t, int64_t begin, int64_t end) const {
    const StridedOperand lhs = part_of_rows(args_.lhs, range_.m0, range_.m1);
    const int n = static_cast<int>(args_.rhs.rows);
    Tiles tiles(lhs);
    alignas(64) uint16_t decoded[2 * kTileWords];
    for (int64_t panel = begin; panel < end; ++panel) {
      tiles.panel(panel, decoded);
      for (int half = 0; half < 2; ++half) {
        const int64_t m = range_.m0 + panel * kRowBlock + 16 * half;
        const int64_t rows = least(16, range_.m1 - m);
        if (rows > 0) put_rows<D>(t, decoded + half * kTileWords, m, static_cast<int>(rows) * n);
      }
    }
  }

  // `elements` of D from row m on.
  template <DType D>
  TE_MX_MEMBER void put_rows(const FlatTable& t, const uint16_t* decoded, int64_t m,
                             int elements) const {
    const auto exponent = mxtile::simd::nearest_int<Simd>(Simd::load(context_.lhs_exp + m));
    const auto power = Simd::template shl<23>(Simd::iadd(exponent, Simd::iset(127)));
    for (int v = 0; 16 * v < elements; ++v) {
      const bf16::Words row = bf16::load_words(t.row[v]);
      const auto scale = Simd::iadd(bf16::pick_pairs(power, row), bf16::load_words(t.exponent[v]));
      auto x = Simd::mul(sixteen(t, v, row, decoded), Simd::as_float(scale));
      if (args_.bias != nullptr) x = Simd::add(x, Simd::load(t.bias[v]));
      const int64_t at = m * args_.rhs.rows + 16 * v;
      const int count = elements - 16 * v < 16 ? elements - 16 * v : 16;
      if (args_.accumulate) x = Simd::add(x, block_epilogue::load<Simd, D>(args_.out, at, count));
      block_epilogue::store<Simd, D>(args_.out, at, x, count);
    }
  }

  struct alignas(64) RowBuffers {
    uint16_t decoded[2 * kTileWords];
    float sums[kRowBlock * 16], block[kBlockFloats];
  };

  // With every epilogue.
  void rows_by_blocks(const FlatTable& t, int64_t begin, int64_t end) const {
    const StridedOperand lhs = part_of_rows(args_.lhs, range_.m0, range_.m1);
    const int n = static_cast<int>(args_.rhs.rows);
    Tiles tiles(lhs);
    const InRoom<RowBuffers> b;
    for (int64_t panel = begin; panel < end; ++panel) {
      tiles.panel(panel, b->decoded);
      for (int half = 0; half < 2; ++half) {
        const uint16_t* decoded = b->decoded + half * kTileWords;
        for (int v = 0; v < n; ++v) {
          bf16::store(b->sums + 16 * v, sixteen(t, v, bf16::load_words(t.row[v]), decoded));
        }
        for (int r = 0; r < 16; ++r) {
          std::memcpy(b->block + (16 * half + r) * kRowBlock, b->sums + r * n,
                      static_cast<size_t>(n) * sizeof(float));
        }
      }
      const int64_t m = range_.m0 + panel * kRowBlock;
      epilogue_(context_, b->block, kRowBlock, m, 0,
                static_cast<int>(least(kRowBlock, range_.m1 - m)), n);
    }
  }

  const Range range_;
  const EpilogueContext& context_;
  const GemmTask& args_;
  EpilogueFn epilogue_;
  const bool normal_;
  const int pairs_;
};

}  // namespace te_mx::cpu
