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
// whatever the chunks.
#pragma once

#include "common/isa.h"
#include "common/parallel.h"
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

  // c[kMr][kNr at stride kTileCols] (+)= a[n][kMr]^T b[n][kNr]
  static void micro_tile(const float* a, const float* b, int64_t n, bool first, float* c) {
    typename S::F sum[kMr][Shape::kVectors];
    for (int i = 0; i < kMr; ++i) {
      for (int v = 0; v < Shape::kVectors; ++v) {
        sum[i][v] = first ? S::set(0.0f) : S::load(c + i * kTileCols + v * S::kLanes);
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
    for (int i = 0; i < kMr; ++i) {
      for (int v = 0; v < Shape::kVectors; ++v) {
        S::store(c + i * kTileCols + v * S::kLanes, sum[i][v]);
      }
    }
  }

  // lhs and rhs start at the tile's first panel.
  static void sum_tile(const float* lhs, const float* rhs, int64_t K, int rows, int cols,
                       float* tile) {
    for (int64_t k0 = 0; k0 < K; k0 += kChunk) {
      const int64_t n = K - k0 < kChunk ? K - k0 : kChunk;
      for (int j = 0; j < cols; j += kNr) {
        for (int i = 0; i < rows; i += kMr) {
          micro_tile(lhs + i * K + k0 * kMr, rhs + j * K + k0 * kNr, n, k0 == 0,
                     tile + i * kTileCols + j);
        }
      }
    }
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
      alignas(64) float tile[kTileRows * kTileCols];
      sum_tile(static_cast<const float*>(lhs_panels) + m * K,
               static_cast<const float*>(rhs_panels) + n * K, K, rows, cols, tile);
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
