// The AMX engine of the bf16 panel GEMM, a template over real or emulated tiles.
//
//          B T6   B T7        rhs: two pair tiles a k step, 16 columns each
//   A T4   C T0   C T1        lhs: two row tiles a k step, 16 rows each
//   A T5   C T2   C T3        four loads feed four tile products of 32 k
#pragma once

#include "gemm/gemm_bf16.hpp"

namespace te_mx::cpu {

// c += sums times factors, a few rows at every step of the next products: the tiles add up 128 of k
// at a time, and vectors have time beside them. Passes steps on to the work of the engine.
template <class Simd, class Work>
class ScaledSums {
 public:
  ScaledSums(Work& work, float* c, int rows) : work_(work), c_(c), rows_(rows) {}

  TE_MX_MEMBER void add(const float* sums, const BlockFactors& factors, bool first) {
    sums_ = sums;
    factors_ = factors;
    first_ = first;
    row_ = 0;
  }

  TE_MX_MEMBER void step() {
    work_.step();
    if (sums_ != nullptr) some(kRowBlock / static_cast<int>(kFactorSteps));
  }

  TE_MX_MEMBER void finish() {
    if (sums_ != nullptr) some(kRowBlock);
    sums_ = nullptr;
  }

 private:
  TE_MX_MEMBER void some(int count) {
    const int end = row_ + count < rows_ ? row_ + count : rows_;
    const ColumnFactors<Simd> cols(factors_.rhs);
    for (; row_ < end; ++row_) {
      const auto row = Simd::set(factors_.lhs == nullptr ? 1.0f : factors_.lhs[row_]);
      for (int v = 0; v < cols.kVectors; ++v) {
        const int64_t at = row_ * kRowBlock + v * Simd::kLanes;
        const auto old = first_ ? Simd::set(0.0f) : Simd::load(c_ + at);
        Simd::store(c_ + at, Simd::fma(Simd::load(sums_ + at), Simd::mul(row, cols.of[v]), old));
      }
    }
  }

  Work& work_;
  float* c_;
  const float* sums_ = nullptr;
  BlockFactors factors_{};
  int rows_, row_ = 0;
  bool first_ = false;
};

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

  // Where one side is decoded next to the products (gemm_decoded.hpp):
  static constexpr int64_t kMostBlocks = 40;  // k blocks of the decoded side: 80 KB a panel
  static constexpr int64_t kResident = 16;    // panels of the other side in L2, at least
  static constexpr int64_t kMostParts = 2;    // times that the side is decoded
  static constexpr int64_t kNearBlocks = 16;  // a panel of so many blocks stays in L1
};

struct EmulatedTuning {
  static constexpr int64_t kWholeBytes = 3 * 2 * 2048, kLeastWhole = 2, kMostWhole = 3;
  static constexpr int64_t kChunk = 3, kRowPanels = 2,
                           kColPanels = 2;  // small, so that tests meet every edge
  static constexpr int64_t kItems = 2;
  static constexpr bool kPrefetch = false;
  static constexpr int64_t kMostBlocks = 4, kResident = 2, kMostParts = 2, kNearBlocks = 1;
};

template <class Tiles, class SimdWords, class Tuning>
class AmxEngine : public Tuning {
 public:
  using Simd = SimdWords;

  template <class Work>
  void block(const char* lhs, const char* rhs, int64_t steps, int rows, float* c, bool first,
             Reuse reuse, Work& work) {
    work.begin(steps);
    products(lhs, rhs, steps, rows, c, first, reuse, work);
  }

  template <class Work>
  void scaled_block(const char* lhs, const char* rhs, int64_t steps, int rows, float* c, bool first,
                    Reuse reuse, Work& work, const BlockFactors& factors) {
    alignas(64) float sums[2][kBlockFloats];  // one is made and one is added
    ScaledSums<Simd, Work> scaled(work, c, rows);
    work.begin(steps);
    for (int64_t s = 0; s < steps; s += kFactorSteps) {
      float* part = sums[s / kFactorSteps % 2];
      const int64_t count = steps - s < kFactorSteps ? steps - s : kFactorSteps;
      products(lhs + s * kStepBytes, rhs + s * kStepBytes, count, rows, part, true, reuse, scaled);
      scaled.finish();
      scaled.add(part, factors.from(s / kFactorSteps), first && s == 0);
    }
    scaled.finish();
  }

 private:
  template <class Work>
  void products(const char* lhs, const char* rhs, int64_t steps, int rows, float* c, bool first,
                Reuse reuse, Work& work) {
    if (rows <= 16) {
      run<false, Reuse::none>(lhs, rhs, steps, c, first, work);
    } else if (reuse == Reuse::none) {
      run<true, Reuse::none>(lhs, rhs, steps, c, first, work);
    } else if (reuse == Reuse::rhs) {
      run<true, Reuse::rhs>(lhs, rhs, steps, c, first, work);
    } else {
      run<true, Reuse::lhs>(lhs, rhs, steps, c, first, work);
    }
  }

  static constexpr int64_t kTileBytes = kTileWords * 2, kTileRowBytes = 64;
  static constexpr int64_t kSumsRowBytes = kRowBlock * 4;

  // Loads that leave L1 to others: a whole panel is longer than L1, and what is not used again
  // before the others come had better not push out what is.
  template <int T, bool once>
  TE_MX_MEMBER void load(const char* p) {
    if constexpr (once) {
      tiles_.template load_once<T>(p, kTileRowBytes);
    } else {
      tiles_.template load<T>(p, kTileRowBytes);
    }
  }

  template <bool both, Reuse reuse, class Work>
  void run(const char* lhs, const char* rhs, int64_t steps, float* c, bool first, Work& work) {
    constexpr bool lhs_once = reuse != Reuse::lhs, rhs_once = reuse != Reuse::rhs;
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
    for (int64_t s = 0; s < steps; ++s, lhs += kStepBytes, rhs += kStepBytes) {
      load<4, lhs_once>(lhs);
      load<6, rhs_once>(rhs);
      tiles_.template dot_bf16<0, 4, 6>();
      load<7, rhs_once>(rhs + kTileBytes);
      tiles_.template dot_bf16<1, 4, 7>();
      if constexpr (both) {
        load<5, lhs_once>(lhs + kTileBytes);
        tiles_.template dot_bf16<2, 5, 6>();
        tiles_.template dot_bf16<3, 5, 7>();
      }
      work.step();
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

}  // namespace te_mx::cpu
