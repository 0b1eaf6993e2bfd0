// The AMX engine of the bf16 panel GEMM, a template over real or emulated tiles.
//
//          B T6   B T7        rhs: two pair tiles a k step, 16 columns each
//   A T4   C T0   C T1        lhs: two row tiles a k step, 16 rows each
//   A T5   C T2   C T3        four loads feed four tile products of 32 k
#pragma once

#include "gemm_bf16.hpp"

namespace te_mx {

#ifndef TE_MX_AMX_CHUNK
#define TE_MX_AMX_CHUNK 16
#endif
#ifndef TE_MX_AMX_ROW_PANELS
#define TE_MX_AMX_ROW_PANELS 16
#endif
#ifndef TE_MX_AMX_COL_PANELS
#define TE_MX_AMX_COL_PANELS 8
#endif
#ifndef TE_MX_AMX_PREFETCH
#define TE_MX_AMX_PREFETCH 1
#endif
#ifndef TE_MX_AMX_LHS_NEAR
#define TE_MX_AMX_LHS_NEAR 0
#endif

struct AmxTuning {
  static constexpr int64_t kChunk = TE_MX_AMX_CHUNK;  // k blocks: rhs chunk 2 KB each in L1
  static constexpr int64_t kRowPanels = TE_MX_AMX_ROW_PANELS;  // lhs chunk in L2
  static constexpr int64_t kColPanels = TE_MX_AMX_COL_PANELS;  // sums: 4 KB per panel pair, in L2
  static constexpr bool kPrefetch = TE_MX_AMX_PREFETCH != 0;   // fetch the next chunk to L2
  static constexpr int64_t kLhsNear = TE_MX_AMX_LHS_NEAR;      // k steps ahead to L1, 0: none
};

struct EmulatedTuning {
  static constexpr int64_t kChunk = 3, kRowPanels = 2,
                           kColPanels = 2;  // small, so that tests meet every edge
  static constexpr bool kPrefetch = false;
  static constexpr int64_t kLhsNear = 0;
};

template <class Tiles, class Tuning>
class AmxEngine : public Tuning {
 public:
  void block(const char* lhs, const char* rhs, int64_t steps, int rows, float* c, bool first,
             const Ahead& ahead) {
    if (rows > 16) {
      run<true>(lhs, rhs, steps, c, first, ahead);
    } else {
      run<false>(lhs, rhs, steps, c, first, ahead);
    }
  }

 private:
  static constexpr int64_t kTileBytes = kTileWords * 2, kTileRowBytes = 64;
  static constexpr int64_t kSumsRowBytes = kRowBlock * 4;

  template <bool both>
  void run(const char* lhs, const char* rhs, int64_t steps, float* c, bool first,
           const Ahead& ahead) {
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
    const char* far_rhs = ahead.rhs;
    const char* far_lhs = ahead.lhs;
    for (int64_t s = 0; s < steps; ++s, lhs += kStepBytes, rhs += kStepBytes) {
      tiles_.template load<4>(lhs, kTileRowBytes);
      tiles_.template load<6>(rhs, kTileRowBytes);
      tiles_.template dot_bf16<0, 4, 6>();
      tiles_.template load<7>(rhs + kTileBytes, kTileRowBytes);
      tiles_.template dot_bf16<1, 4, 7>();
      if constexpr (both) {
        tiles_.template load<5>(lhs + kTileBytes, kTileRowBytes);
        tiles_.template dot_bf16<2, 5, 6>();
        tiles_.template dot_bf16<3, 5, 7>();
      }
      if constexpr (Tuning::kLhsNear > 0) {
        for (int64_t line = 0; line < kStepBytes; line += 64) {
          __builtin_prefetch(lhs + Tuning::kLhsNear * kStepBytes + line, 0, 3);
        }
      }
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
