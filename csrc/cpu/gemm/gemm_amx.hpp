// The AMX engine of the bf16 panel GEMM, a template over real or emulated tiles.
//
//          B T6   B T7        rhs: two pair tiles a k step, 16 columns each
//   A T4   C T0   C T1        lhs: two row tiles a k step, 16 rows each
//   A T5   C T2   C T3        four loads feed four tile products of 32 k
#pragma once

#include "gemm/gemm_bf16.hpp"

// A call a step would spill and clear what the vectors hold.
#define TE_MX_LAMBDA __attribute__((always_inline))

namespace te_mx::cpu {

// c += sums times factors, a few rows at every step of the next products: the tiles add up 128 of k
// at a time, and vectors have time beside them. Panels and factors are padded to whole tiles, so no
// row is counted. `fresh`: c holds nothing yet.
template <class Simd, int kRows>
class ScaledSums {
 public:
  explicit ScaledSums(float* c) : c_(c) {}

  void take(const float* sums, const BlockFactors& factors) {
    sums_ = sums;
    factors_ = factors;
    at_ = c_;
  }

  // One of kFactorSteps.
  template <bool fresh>
  TE_MX_MEMBER void step() {
    rows<fresh, kRows / static_cast<int>(kFactorSteps)>();
  }

  TE_MX_MEMBER void all(bool fresh) { fresh ? rows<true, kRows>() : rows<false, kRows>(); }

 private:
  template <bool fresh, int count>
  TE_MX_MEMBER void rows() {
    const ColumnFactors<Simd> cols(factors_.rhs);
    const int64_t row0 = (at_ - c_) / kRowBlock;
    const float* sums = sums_ + (at_ - c_);
    const float* factors = factors_.lhs == nullptr ? kOnes : factors_.lhs + row0;
#pragma GCC unroll 8
    for (int r = 0; r < count; ++r) {
      const auto row = Simd::set(factors[r]);
      for (int v = 0; v < cols.kVectors; ++v) {
        const int i = r * static_cast<int>(kRowBlock) + v * Simd::kLanes;
        const auto old = fresh ? Simd::set(0.0f) : Simd::load(at_ + i);
        Simd::store(at_ + i, Simd::fma(Simd::load(sums + i), Simd::mul(row, cols.of[v]), old));
      }
    }
    at_ += count * kRowBlock;
  }

  static constexpr float kOnes[kRowBlock] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                             1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

  float* const c_;
  float* at_ = nullptr;
  const float* sums_ = nullptr;
  BlockFactors factors_{};
};

// Measured on Emerald Rapids: 2 MB of L2 and 48 KB of L1 a core.
struct AmxTuning {
  static constexpr int64_t kWholeBytes = 1280 * 1024;  // lhs panels with all of k, in L2
  static constexpr int64_t kLeastWhole = 16;           // fewer panels reread rhs too often
  static constexpr int64_t kMostWhole = 16;
  static constexpr int64_t kStayBytes = 512 * 1024;  // of those next to lines of D and of rhs
  static constexpr int64_t kChunk = 16;       // else: k blocks, the rhs chunk of 2 KB each in L1
  static constexpr int64_t kNear = 16;        // whole: k blocks of a rhs panel in L1,
  static constexpr int64_t kNearFactors = 8;  // next to sums that are scaled
  static constexpr int64_t kRowPanels = 12;   // lhs chunk of 384 KB in L2
  static constexpr int64_t kColPanels = 12;   // sums: 4 KB a panel pair, 576 KB in L2
  static constexpr int64_t kItems = 2;        // at least, a thread
  static constexpr bool kPrefetch = true;     // fetch the next panel and chunk to L2

  // Where one side is decoded next to the products (gemm_decoded.hpp):
  static constexpr int64_t kMostBlocks = 40;  // k blocks of the decoded side: 80 KB a panel
  static constexpr int64_t kResident = 16;    // panels of the other side in L2, at least
  static constexpr int64_t kMostParts = 2;    // times that the side is decoded
  static constexpr int64_t kNearBlocks = 16;  // a panel of so many blocks stays in L1
};

struct EmulatedTuning {
  static constexpr int64_t kWholeBytes = 3 * 2 * 2048, kLeastWhole = 2, kMostWhole = 3;
  static constexpr int64_t kStayBytes = kWholeBytes;
  static constexpr int64_t kChunk = 3, kRowPanels = 2,
                           kColPanels = 2;  // small, so that tests meet every edge
  static constexpr int64_t kItems = 2;
  static constexpr bool kPrefetch = false;
  static constexpr int64_t kNear = 2, kNearFactors = 4;
  static constexpr int64_t kMostBlocks = 4, kResident = 2, kMostParts = 2, kNearBlocks = 1;
};

template <class Tiles, class SimdWords, class Tuning>
class AmxEngine : public Tuning {
 public:
  using Simd = SimdWords;

  explicit AmxEngine(int64_t) {}

  template <class Work>
  void block(const char* lhs, const char* rhs, int64_t steps, int rows, float* c, bool first,
             Reuse reuse, Work& work) {
    work.begin(steps);
    if (rows <= 16) {
      run<false>(lhs, rhs, steps, c, first, {Reuse::none, 0}, work);
    } else {
      run<true>(lhs, rhs, steps, c, first, reuse, work);
    }
  }

  template <class Work>
  void scaled_block(const char* lhs, const char* rhs, int64_t steps, int rows, float* c, bool first,
                    Reuse reuse, Work& work, const BlockFactors& factors) {
    work.begin(steps);
    if (rows <= 16) {
      scaled<false>(lhs, rhs, steps, c, first, {Reuse::none, 0}, work, factors);
    } else {
      scaled<true>(lhs, rhs, steps, c, first, reuse, work, factors);
    }
  }

 private:
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

  template <bool both, class Work>
  void run(const char* lhs, const char* rhs, int64_t steps, float* c, bool first, Reuse reuse,
           Work& work) {
    first ? zero<both>() : load_sums<both>(c);
    const auto step = [&]() TE_MX_LAMBDA { work.step(); };
    const int64_t near = reuse.side == Reuse::none ? 0 : reuse.steps < steps ? reuse.steps : steps;
    if (reuse.side == Reuse::rhs) {
      multiply<both, Reuse::rhs>(lhs, rhs, near, step);
    } else if (near > 0) {
      multiply<both, Reuse::lhs>(lhs, rhs, near, step);
    }
    const int64_t at = near * kStepBytes;
    multiply<both, Reuse::none>(lhs + at, rhs + at, steps - near, step);
    store_sums<both>(c);
  }

  // The sums of kFactorSteps steps are multiplied by their factors next to the products of those
  // that follow.
  template <bool both, class Work>
  void scaled(const char* lhs, const char* rhs, int64_t steps, float* c, bool first, Reuse reuse,
              Work& work, const BlockFactors& factors) {
    alignas(64) float sums[2][kBlockFloats];  // one is made and one is added
    ScaledSums<Simd, both ? static_cast<int>(kRowBlock) : 16> scaled(c);
    const auto only = [&]() TE_MX_LAMBDA { work.step(); };
    const auto fresh = [&]() TE_MX_LAMBDA {
      work.step();
      scaled.template step<true>();
    };
    const auto more = [&]() TE_MX_LAMBDA {
      work.step();
      scaled.template step<false>();
    };
    for (int64_t s = 0, part = 0; s < steps; s += kFactorSteps, ++part) {
      const char *left = lhs + s * kStepBytes, *right = rhs + s * kStepBytes;
      const int64_t count = steps - s < kFactorSteps ? steps - s : kFactorSteps;
      const bool near = reuse.side == Reuse::rhs && s < reuse.steps;
      zero<both>();
      if (part > 0 && count < kFactorSteps) {
        scaled.all(first && part == 1);
        part_of<both>(left, right, count, near, only);
      } else if (part == 0) {
        part_of<both>(left, right, count, near, only);
      } else if (first && part == 1) {
        part_of<both>(left, right, kFactorSteps, near, fresh);
      } else {
        part_of<both>(left, right, kFactorSteps, near, more);
      }
      store_sums<both>(sums[part % 2]);
      scaled.take(sums[part % 2], factors.from(part));
    }
    scaled.all(first && steps <= kFactorSteps);
  }

  template <bool both, class Step>
  TE_MX_MEMBER void part_of(const char* lhs, const char* rhs, int64_t steps, bool near,
                            const Step& step) {
    near ? multiply<both, Reuse::rhs>(lhs, rhs, steps, step)
         : multiply<both, Reuse::none>(lhs, rhs, steps, step);
  }

  template <bool both, Reuse::Side reuse, class Step>
  TE_MX_MEMBER void multiply(const char* lhs, const char* rhs, int64_t steps, const Step& step) {
    constexpr bool lhs_once = reuse != Reuse::lhs, rhs_once = reuse != Reuse::rhs;
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
      step();
    }
  }

  template <bool both>
  TE_MX_MEMBER void zero() {
    tiles_.template zero<0>();
    tiles_.template zero<1>();
    if constexpr (both) {
      tiles_.template zero<2>();
      tiles_.template zero<3>();
    }
  }

  template <bool both>
  TE_MX_MEMBER void load_sums(const float* c) {
    tiles_.template load<0>(c, kSumsRowBytes);
    tiles_.template load<1>(c + 16, kSumsRowBytes);
    if constexpr (both) {
      tiles_.template load<2>(c + 16 * kRowBlock, kSumsRowBytes);
      tiles_.template load<3>(c + 16 * kRowBlock + 16, kSumsRowBytes);
    }
  }

  template <bool both>
  TE_MX_MEMBER void store_sums(float* c) {
    tiles_.template store<0>(c, kSumsRowBytes);
    tiles_.template store<1>(c + 16, kSumsRowBytes);
    if constexpr (both) {
      tiles_.template store<2>(c + 16 * kRowBlock, kSumsRowBytes);
      tiles_.template store<3>(c + 16 * kRowBlock + 16, kSumsRowBytes);
    }
  }

  Tiles tiles_;
};

}  // namespace te_mx::cpu
