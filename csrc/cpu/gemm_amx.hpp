// The AMX engine of the bf16 panel GEMM, a template over real or emulated tiles.
//
//          B T6   B T7        rhs: two pair tiles a k step, 16 columns each
//   A T4   C T0   C T1        lhs: two row tiles a k step, 16 rows each
//   A T5   C T2   C T3        four loads feed four tile products of 32 k
#pragma once

#include "gemm_bf16.hpp"

namespace te_mx {

// Measured on Emerald Rapids: 2 MB of L2 and 48 KB of L1 a core.
struct AmxTuning {
  static constexpr int64_t kWholeBytes = 1280 * 1024;  // lhs panels with all of k, in L2
  static constexpr int64_t kLeastWhole = 16;           // fewer panels reread rhs too often
  static constexpr int64_t kMostWhole = 16;
  static constexpr int64_t kChunk = 16;      // else: k blocks, the rhs chunk of 2 KB each in L1
  static constexpr int64_t kRowPanels = 12;  // lhs chunk of 384 KB in L2
  static constexpr int64_t kColPanels = 12;  // sums: 4 KB a panel pair, 576 KB in L2
  static constexpr int64_t kItems = 2;       // at least, a thread
  static constexpr bool kPrefetch = true;    // fetch the next panel and chunk to L2
};

struct EmulatedTuning {
  static constexpr int64_t kWholeBytes = 3 * 2 * 2048, kLeastWhole = 2, kMostWhole = 3;
  static constexpr int64_t kChunk = 3, kRowPanels = 2,
                           kColPanels = 2;  // small, so that tests meet every edge
  static constexpr int64_t kItems = 2;
  static constexpr bool kPrefetch = false;
};

template <class Tiles, class SimdWords, class Tuning>
class AmxEngine : public Tuning {
 public:
  using Simd = SimdWords;

  void block(const char* lhs, const char* rhs, int64_t steps, int rows, float* c, bool first,
             bool whole, const Ahead& ahead, PendingRows<Simd>& pending) {
    if (rows > 16) {
      if (whole) {
        run<true, true>(lhs, rhs, steps, c, first, ahead, pending);
      } else {
        run<true, false>(lhs, rhs, steps, c, first, ahead, pending);
      }
    } else {
      run<false, true>(lhs, rhs, steps, c, first, ahead, pending);
    }
  }

 private:
  static constexpr int64_t kTileBytes = kTileWords * 2, kTileRowBytes = 64;
  static constexpr int64_t kSumsRowBytes = kRowBlock * 4;

  // Loads that leave L1 to others: a whole panel is longer than L1, a lhs chunk is used once before
  // the others come.
  template <int T, bool once>
  TE_MX_MEMBER void load(const char* p) {
    if constexpr (once) {
      tiles_.template load_once<T>(p, kTileRowBytes);
    } else {
      tiles_.template load<T>(p, kTileRowBytes);
    }
  }

  template <bool both, bool whole>
  void run(const char* lhs, const char* rhs, int64_t steps, float* c, bool first,
           const Ahead& ahead, PendingRows<Simd>& pending) {
    float* lower = c + 16 * kRowBlock;
    if (first) {
      tiles_.template zero<0>();
      tiles_.template zero<1>();
      if constexpr (both) {
        tiles_.template zero<2>();
        tiles_.template zero<3>();
      }
    } else {
      tiles_.template load<0>(c, kSumsRowBytes);
      tiles_.template load<1>(c + 16, kSumsRowBytes);
      if constexpr (both) {
        tiles_.template load<2>(lower, kSumsRowBytes);
        tiles_.template load<3>(lower + 16, kSumsRowBytes);
      }
    }
    const int rows_a_step = static_cast<int>(ceil_div(pending.left(), steps));
    const char* far_rhs = ahead.rhs;
    const char* far_lhs = ahead.lhs;
    for (int64_t s = 0; s < steps; ++s, lhs += kStepBytes, rhs += kStepBytes) {
      load<4, true>(lhs);
      load<6, whole>(rhs);
      tiles_.template dot_bf16<0, 4, 6>();
      load<7, whole>(rhs + kTileBytes);
      tiles_.template dot_bf16<1, 4, 7>();
      if constexpr (both) {
        load<5, true>(lhs + kTileBytes);
        tiles_.template dot_bf16<2, 5, 6>();
        tiles_.template dot_bf16<3, 5, 7>();
      }
      for (int r = 0; r < rows_a_step && pending.left() > 0; ++r) pending.row();
      if constexpr (Tuning::kPrefetch) {
        for (int i = 0; i < ahead.rhs_lines; ++i, far_rhs += 64) __builtin_prefetch(far_rhs, 0, 2);
        for (int i = 0; i < ahead.lhs_lines; ++i, far_lhs += 64) __builtin_prefetch(far_lhs, 0, 2);
      }
    }
    tiles_.template store<0>(c, kSumsRowBytes);
    tiles_.template store<1>(c + 16, kSumsRowBytes);
    if constexpr (both) {
      tiles_.template store<2>(lower, kSumsRowBytes);
      tiles_.template store<3>(lower + 16, kSumsRowBytes);
    }
  }

  Tiles tiles_;
};

}  // namespace te_mx
