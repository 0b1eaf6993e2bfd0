// The bf16 panel GEMM: loop order, cache blocking and epilogue calls around an engine that
// multiplies 32 x 32 blocks.
//
//   item            rows x columns of D that one thread makes at a time
//     k chunk       all of k when enough whole lhs panels fit L2, else short
//       n panel     32 columns: whole k streams once by all rows, a short chunk stays in L1
//         m panel   32 rows: engine.block() adds one chunk to a 32 x 32 fp32 block
//
// The sum of one element runs over k in order; blocking only decides when the fp32 value rests in
// memory.
#pragma once

#include "common/isa.h"
#include "common/parallel.h"
#include "common/room.h"
#include "gemm/gemm_internal.hpp"
#include "gemm/gemm_rows.hpp"
#include "gemm/pack_bf16.hpp"

namespace te_mx::cpu {

// The operand whose panel other blocks read right after this one, and its first k steps, for which
// the first level of the cache has room.
struct Reuse {
  enum Side { none, lhs, rhs } side;
  int64_t steps;
};

// What later blocks will read, fetched a little at every k step. The second level of the cache
// fetches both lines of an aligned pair when it misses one, so every other line will do.
struct Ahead {
  const char* rhs;
  const char* lhs;
  int rhs_fetches, lhs_fetches;  // a k step
  int64_t stride;                // bytes from fetch to fetch
};

// What an engine does next to its products, a little at every k step: rows of the block before, and
// prefetches.
template <class Simd>
class PanelWork {
 public:
  PanelWork(PendingRows<Simd>& pending, const Ahead& ahead) : pending_(pending), ahead_(ahead) {}

  TE_MX_MEMBER void begin(int64_t steps) { pending_.begin(steps); }

  TE_MX_MEMBER void step() {
    pending_.step();
    fetch(ahead_.rhs, ahead_.rhs_fetches);
    fetch(ahead_.lhs, ahead_.lhs_fetches);
  }

 private:
  TE_MX_MEMBER void fetch(const char*& p, int count) const {
    for (int i = 0; i < count; ++i, p += ahead_.stride) __builtin_prefetch(p, 0, 2);
  }

  PendingRows<Simd>& pending_;
  Ahead ahead_;
};

inline constexpr int64_t kPairBytes = 128;                 // two cache lines
inline constexpr int64_t kStepBytes = 2 * kTileWords * 2;  // one k block of one 32-row panel
inline constexpr int64_t kBlockFloats = kRowBlock * kRowBlock;

inline constexpr int64_t kFactorSteps = kWideBlock / kBlock;  // k steps that share a factor

// The factors of a block of 32 x 32 of D, of its blocks of 128 k on; both [k / 128][stride].
struct BlockFactors {
  const float* lhs;  // [32] for every 128 k; null: 1
  const float* rhs;
  int64_t lhs_stride, rhs_stride;

  BlockFactors from(int64_t blocks) const {
    return {lhs == nullptr ? nullptr : lhs + blocks * lhs_stride,
            rhs == nullptr ? nullptr : rhs + blocks * rhs_stride, lhs_stride, rhs_stride};
  }
};

// Of 32 columns of rhs, as vectors.
template <class Simd>
struct ColumnFactors {
  static constexpr int kVectors = kRowBlock / Simd::kLanes;
  typename Simd::F of[kVectors];

  TE_MX_MEMBER explicit ColumnFactors(const float* rhs) {
    for (int v = 0; v < kVectors; ++v) {
      of[v] = rhs == nullptr ? Simd::set(1.0f) : Simd::load(rhs + v * Simd::kLanes);
    }
  }
};

// Engine: made of k; the word set Simd; constants kWholeBytes, kChunk, kNear, kRowPanels,
// kColPanels, ..; block(lhs, rhs, steps, rows, c, first, reuse, work), which calls work.begin(n)
// and n times work.step(), with n = steps where it prefetches; and scaled_block(), which does the
// same, except that it multiplies the sums of kFactorSteps steps by factors before it adds them to
// the block.
template <class Engine>
class PanelGemm {
 public:
  static Status run(const Range& range, const void* lhs, const void* rhs,
                    const EpilogueContext& context, void*) {
    const PanelGemm gemm(range, lhs, rhs, context);
    const int64_t row_items = ceil_div(gemm.row_panels_, gemm.item_rows_);
    parallel_for(context.args->threads, gemm.items(), [&](int64_t item) {
      gemm.run_item(item % row_items * gemm.item_rows_, item / row_items * gemm.item_cols_);
    });
    return Status::ok;
  }

 private:
  using Simd = typename Engine::Simd;

  PanelGemm(const Range& range, const void* lhs, const void* rhs, const EpilogueContext& context)
      : range_(range),
        lhs_(static_cast<const char*>(lhs)),
        rhs_(static_cast<const char*>(rhs)),
        context_(context),
        epilogue_(epilogue_for(isa_current())) {
    blocks_ = ceil_div(context.args->lhs.k, kBlock);
    row_panels_ = ceil_div(range.m1 - range.m0, kRowBlock);
    col_panels_ = ceil_div(range.n1 - range.n0, kRowBlock);
    normal_ = normal_powers<Simd>(context, range);
    const int64_t fit = Engine::kWholeBytes / (blocks_ * kStepBytes);
    whole_ = fit >= least(Engine::kLeastWhole, row_panels_) || blocks_ <= Engine::kChunk;
    factors_ = context.args->lhs.factors != nullptr || context.args->rhs.factors != nullptr;
    if (whole_) {
      chunk_ = blocks_;
      const int64_t stay = Engine::kStayBytes / (blocks_ * kStepBytes);
      item_rows_ = even_part(row_panels_, least(Engine::kMostWhole, stay > 1 ? stay : 1));
      item_cols_ = col_panels_;
    } else {
      chunk_ = even_part(blocks_, Engine::kChunk);
      if (factors_) chunk_ = round_up(chunk_, kFactorSteps);
      item_rows_ = even_part(row_panels_, Engine::kRowPanels);
      item_cols_ = even_part(col_panels_, Engine::kColPanels);
    }
    // Too few items leave threads idle; smaller ones only reread more.
    while (item_rows_ * item_cols_ > 4 && items() < Engine::kItems * context.args->threads) {
      int64_t& side = item_rows_ > item_cols_ ? item_rows_ : item_cols_;
      side = (side + 1) / 2;
    }
  }

  // The largest of the parts of almost one size that `whole` is cut into, none above `most`.
  static int64_t even_part(int64_t whole, int64_t most) {
    return ceil_div(whole, ceil_div(whole, most));
  }
  static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

  int64_t items() const {
    return ceil_div(row_panels_, item_rows_) * ceil_div(col_panels_, item_cols_);
  }

  const char* step(const char* base, int64_t panel, int64_t block) const {
    return base + (panel * blocks_ + block) * kStepBytes;
  }

  void run_item(int64_t row_panel, int64_t col_panel) const {
    const Room room(sizeof(float) * Engine::kRowPanels * Engine::kColPanels * kBlockFloats);
    float* const sums = static_cast<float*>(room.get());
    const int64_t rows = least(item_rows_, row_panels_ - row_panel);
    const int64_t cols = least(item_cols_, col_panels_ - col_panel);
    Engine engine(context_.args->lhs.k);
    PendingRows<Simd> pending(context_, normal_);
    const Reuse reuse{Reuse::rhs, !whole_    ? chunk_
                                  : factors_ ? Engine::kNearFactors
                                             : Engine::kNear};
    int64_t turn = 0;  // whole: two blocks take turns, one is summed and one stored
    for (int64_t k = 0; k < blocks_; k += chunk_) {
      const int64_t steps = least(chunk_, blocks_ - k);
      for (int64_t j = 0; j < cols; ++j) {
        for (int64_t i = 0; i < rows; ++i) {
          float* c = sums + (whole_ ? (turn ^= 1) : j * rows + i) * kBlockFloats;
          const int64_t m = range_.m0 + (row_panel + i) * kRowBlock;
          const int block_rows = static_cast<int>(least(kRowBlock, range_.m1 - m));
          const int64_t n = range_.n0 + (col_panel + j) * kRowBlock;
          const int block_cols = static_cast<int>(least(kRowBlock, range_.n1 - n));
          const bool last = k + steps >= blocks_, pend = block_cols == kRowBlock;
          if (last && pend) pending.expect(m, n, block_rows);
          PanelWork<Simd> work(pending, ahead(row_panel, col_panel, rows, cols, i, j, k, steps));
          const char* left = step(lhs_, row_panel + i, k);
          const char* right = step(rhs_, col_panel + j, k);
          if (factors_) {
            engine.scaled_block(left, right, steps, block_rows, c, k == 0, reuse, work,
                                factors(m, n).from(k / kFactorSteps));
          } else {
            engine.block(left, right, steps, block_rows, c, k == 0, reuse, work);
          }
          pending.finish();
          if (!last) continue;
          if (pend) {
            pending.start(c, m, n, block_rows);
          } else {
            epilogue_(context_, c, kRowBlock, m, n, block_rows, block_cols);
          }
        }
      }
    }
    pending.finish();
    pending.fence();
  }

  BlockFactors factors(int64_t m, int64_t n) const {
    const StridedOperand &l = context_.args->lhs, &r = context_.args->rhs;
    return {l.factors == nullptr ? nullptr : l.factors + m,
            r.factors == nullptr ? nullptr : r.factors + n, l.factor_stride, r.factor_stride};
  }

  // Spreads the next rhs panel over the blocks of this one, and the next lhs chunk over the blocks
  // of this chunk. With all of k the first rhs panel brings the lhs panels, each a block ahead.
  Ahead ahead(int64_t row_panel, int64_t col_panel, int64_t rows, int64_t cols, int64_t i,
              int64_t j, int64_t k, int64_t steps) const {
    Ahead a{};
    if constexpr (Engine::kPrefetch) {
      a.stride = whole_ ? kPairBytes : kPairBytes / 2;
      const int64_t next = k + steps;
      const int64_t chunk_bytes = steps * kStepBytes, step_bytes = steps * a.stride;
      if (j + 1 < cols || next < blocks_) {
        const char* panel =
            j + 1 < cols ? step(rhs_, col_panel + j + 1, k) : step(rhs_, col_panel, next);
        a.rhs_fetches = static_cast<int>(ceil_div(chunk_bytes, rows * step_bytes));
        a.rhs = panel + i * a.rhs_fetches * step_bytes;
      }
      if (next < blocks_) {
        a.lhs_fetches = static_cast<int>(ceil_div(chunk_bytes, cols * step_bytes));
        a.lhs = step(lhs_, row_panel + i, next) + j * a.lhs_fetches * step_bytes;
      } else if (whole_ && j == 0 && i + 1 < rows) {
        a.lhs_fetches = kStepBytes / kPairBytes;
        a.lhs = step(lhs_, row_panel + i + 1, 0);
      }
    }
    return a;
  }

  const Range range_;
  const char* lhs_;
  const char* rhs_;
  const EpilogueContext& context_;
  EpilogueFn epilogue_;
  int64_t blocks_, chunk_, row_panels_, col_panels_, item_rows_, item_cols_;
  bool whole_, normal_, factors_;
};

}  // namespace te_mx::cpu
