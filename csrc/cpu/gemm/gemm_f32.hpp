// The fp32 panel GEMM, written once over the f32 vector words S and built for each instruction set.
//
//   lhs panels [M/kMr][K][kMr], rhs panels [N/kNr][K][kNr]; a micro tile kMr x kNr lives in
//   registers:
//
//            rhs panel row k:  | b0 | b1 | ..  kVectors vectors
//     lhs panel row k:  a[0]   | c00| c01|
//                       a[1]   | c10| c11|     c[i][v] += a[i] * b[v] for k = 0, 1, ..., K - 1
//
// K runs in chunks of kChunk so that a chunk of an rhs panel stays in L1 while the rows of a tile
// pass by; sums wait in `tile` between chunks. The order of one element's sum is k ascending,
// whatever the chunks. With factors, chunks are blocks of 128, each a sum of its own that is
// multiplied and then added.
#pragma once

#include "common/isa.h"
#include "common/parallel.h"
#include "common/room.h"
#include "gemm/gemm_internal.hpp"
#include "gemm/pack_f32.hpp"

namespace te_mx::cpu::f32 {

// Register and cache blocking. Shape is one instruction set's choice:
//   kMr rows (a divisor of 32) x kVectors vectors in registers; kTileCols columns of a task and
//   kEpilogueCols columns of an epilogue call, both multiples of 16 and of kNr.
template <class S, class Shape>
struct PanelGemm {
  static constexpr int kMr = Shape::kMr;
  static constexpr int kNr = Shape::kVectors * S::kLanes;
  static constexpr int kTileRows = 64;
  static constexpr int kTileCols = Shape::kTileCols;
  static constexpr int64_t kChunk = 256;
  static_assert(kRowBlock % kMr == 0 && kTileCols % kNr == 0 && kTileCols % 16 == 0);
  static_assert(Shape::kEpilogueCols % 16 == 0 && Shape::kEpilogueCols <= 64);

  static int64_t panel_bytes(Role role, int64_t rows, int64_t k) {
    return round_up(round_up(rows, role == Role::lhs ? kMr : kNr) * k * 4, 64);
  }

  static Status pack(Role role, const StridedOperand& operand, const float* exponents, void* panels,
                     int threads) {
    float* out = static_cast<float*>(panels);
    if (role == Role::lhs) {
      pack_panels<S, kMr>(operand, exponents, out, threads);
    } else {
      pack_panels<S, kNr>(operand, exponents, out, threads);
    }
    return Status::ok;
  }

  // The factors of a tile for n of k; null: 1.
  struct Factors {
    const float* rows = nullptr;
    const float* cols = nullptr;
    int row_count = 0, col_count = 0;  // that there are
  };

  // c[kMr][kNr at stride kTileCols] (+)= a[n][kMr]^T b[n][kNr], times factors
  template <bool kFactors>
  static void micro_tile(const float* a, const float* b, int64_t n, bool first, float* c,
                         const Factors& factors) {
    typename S::F sum[kMr][Shape::kVectors];
    for (int i = 0; i < kMr; ++i) {
      for (int v = 0; v < Shape::kVectors; ++v) {
        const bool fresh = first || kFactors;
        sum[i][v] = fresh ? S::set(0.0f) : S::load(c + i * kTileCols + v * S::kLanes);
      }
    }
    for (int64_t k = 0; k < n; ++k) {
      typename S::F row[Shape::kVectors];
      for (int v = 0; v < Shape::kVectors; ++v) row[v] = S::load(b + k * kNr + v * S::kLanes);
      for (int i = 0; i < kMr; ++i) {
        const auto x = S::set(a[k * kMr + i]);
        for (int v = 0; v < Shape::kVectors; ++v) sum[i][v] = S::fma(x, row[v], sum[i][v]);
      }
    }
    if constexpr (kFactors) scale(sum, first, c, factors);
    for (int i = 0; i < kMr; ++i) {
      for (int v = 0; v < Shape::kVectors; ++v) {
        S::store(c + i * kTileCols + v * S::kLanes, sum[i][v]);
      }
    }
  }

  // sum = c + sum * factors
  [[gnu::always_inline]] static void scale(typename S::F (&sum)[kMr][Shape::kVectors], bool first,
                                           const float* c, const Factors& factors) {
    for (int v = 0; v < Shape::kVectors; ++v) {
      const int left = factors.col_count - v * S::kLanes;
      auto col = S::set(1.0f);
      if (factors.cols != nullptr) {
        const float* from = factors.cols + v * S::kLanes;
        col = left >= S::kLanes ? S::load(from) : S::load_part(from, left > 0 ? left : 0);
      }
      for (int i = 0; i < kMr; ++i) {
        const bool inside = factors.rows != nullptr && i < factors.row_count;
        const auto factor = S::mul(S::set(inside ? factors.rows[i] : 1.0f), col);
        const auto old = first ? S::set(0.0f) : S::load(c + i * kTileCols + v * S::kLanes);
        sum[i][v] = S::fma(sum[i][v], factor, old);
      }
    }
  }

  // lhs and rhs start at the tile's first panel, which is that of row m and column n of D.
  template <bool kFactors>
  static void sum_tile(const float* lhs, const float* rhs, const GemmTask& args, int64_t m,
                       int64_t n, int rows, int cols, float* tile) {
    const int64_t K = args.lhs.k;
    constexpr int64_t kStep = kFactors ? kWideBlock : kChunk;
    for (int64_t k0 = 0; k0 < K; k0 += kStep) {
      const int64_t count = K - k0 < kStep ? K - k0 : kStep;
      for (int j = 0; j < cols; j += kNr) {
        for (int i = 0; i < rows; i += kMr) {
          Factors factors;
          if constexpr (kFactors) {
            factors = {factors_at(args.lhs, k0, m + i), factors_at(args.rhs, k0, n + j), rows - i,
                       cols - j};
          }
          micro_tile<kFactors>(lhs + i * K + k0 * kMr, rhs + j * K + k0 * kNr, count, k0 == 0,
                               tile + i * kTileCols + j, factors);
        }
      }
    }
  }

  static const float* factors_at(const StridedOperand& o, int64_t k, int64_t row) {
    return o.factors == nullptr ? nullptr : o.factors + k / kWideBlock * o.factor_stride + row;
  }

  static Status run(const Range& range, const void* lhs_panels, const void* rhs_panels,
                    const EpilogueContext& context, void*) {
    const GemmTask& args = *context.args;
    const int64_t K = args.lhs.k;
    const EpilogueFn epilogue = epilogue_for(isa_native());
    const int64_t row_tiles = ceil_div(range.m1 - range.m0, kTileRows);
    const int64_t col_tiles = ceil_div(range.n1 - range.n0, kTileCols);
    parallel_for(args.threads, row_tiles * col_tiles, [&](int64_t item) {
      // Neighbouring items share rhs panels.
      const int64_t m = item % row_tiles * kTileRows, n = item / row_tiles * kTileCols;
      const int rows = static_cast<int>(smaller(range.m1 - range.m0 - m, kTileRows));
      const int cols = static_cast<int>(smaller(range.n1 - range.n0 - n, kTileCols));
      const Room room(sizeof(float) * kTileRows * kTileCols);
      float* const tile = static_cast<float*>(room.get());
      const float* left = static_cast<const float*>(lhs_panels) + m * K;
      const float* right = static_cast<const float*>(rhs_panels) + n * K;
      const auto sum = args.lhs.factors != nullptr || args.rhs.factors != nullptr ? sum_tile<true>
                                                                                  : sum_tile<false>;
      sum(left, right, args, range.m0 + m, range.n0 + n, rows, cols, tile);
      for (int i = 0; i < rows; i += kRowBlock) {
        for (int j = 0; j < cols; j += Shape::kEpilogueCols) {
          epilogue(context, tile + i * kTileCols + j, kTileCols, range.m0 + m + i, range.n0 + n + j,
                   static_cast<int>(smaller(rows - i, kRowBlock)),
                   static_cast<int>(smaller(cols - j, Shape::kEpilogueCols)));
        }
      }
    });
    return Status::ok;
  }

  static void row_sums(const StridedOperand& lhs, const void* lhs_panels, const float* lhs_exp,
                       float* out, int threads) {
    parallel_for(threads, ceil_div(lhs.rows, kMr), [&](int64_t p) {
      const float* panel = static_cast<const float*>(lhs_panels) + p * kMr * lhs.k;
      const int rows = static_cast<int>(smaller(lhs.rows - p * kMr, kMr));
      alignas(64) float sums[kMr] = {};
      for (int64_t k = 0; k < lhs.k; ++k) {
        for (int i = 0; i < kMr; ++i) sums[i] += panel[k * kMr + i];
      }
      for (int i = 0; i < rows; ++i) {
        const auto exponent = S::iset(static_cast<int32_t>(lhs_exp[p * kMr + i]));
        S::store_part(out + p * kMr + i, S::scale2(S::set(sums[i]), exponent), 1);
      }
    });
  }

  static const KernelImpl* impl() {
    static constexpr KernelImpl kImpl = {panel_bytes, pack, nullptr, run, row_sums};
    return &kImpl;
  }

 private:
  [[gnu::always_inline]] static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
};

}  // namespace te_mx::cpu::f32
