// Kernel::avx512_bf16: the panel GEMM on 512-bit bf16 dot products.
//
// Sixteen accumulators hold 8 rows x 32 columns. A k pair costs two loads of rhs and, for every
// row, one broadcast of the row's pair that feeds two products.
#include "gemm/gemm_thin.hpp"
#include "mxtile/simd/avx512.hpp"

namespace te_mx::cpu {
namespace {

struct Avx512Tuning {
  using Simd = mxtile::simd::Avx512;
  static constexpr int64_t kChunk = 8, kRowPanels = 8, kColPanels = 4, kItems = 4;
  static constexpr int64_t kWholeBytes = 128 * 1024, kLeastWhole = 8, kMostWhole = 8;
  static constexpr int64_t kStayBytes = kWholeBytes, kNear = 0, kNearFactors = 0;
  static constexpr bool kPrefetch = false;
  static constexpr int kRows = 8;
};

class Avx512Engine : public Avx512Tuning {
 public:
  explicit Avx512Engine(int64_t k) : Avx512Engine(static_cast<int>(used_of_one_block(k) / 2)) {}
  explicit Avx512Engine(int pairs) : pairs_(pairs) {}

  template <class Work>
  void block(const char* lhs, const char* rhs, int64_t steps, int rows, float* c, bool first, Reuse,
             Work& work) const {
    work.begin(ceil_div(rows, kRows));
    for (int r = 0; r < rows; r += kRows) {
      work.step();
      const uint16_t* a = reinterpret_cast<const uint16_t*>(lhs) + r * kBlock;
      const uint16_t* b = reinterpret_cast<const uint16_t*>(rhs);
      if (pairs_ == 16) {
        rows_block(a, b, steps, c + r * kRowBlock, first);
      } else {
        rows_block(a, b, steps, c + r * kRowBlock, first, nullptr, pairs_);
      }
    }
  }

  template <class Work>
  void scaled_block(const char* lhs, const char* rhs, int64_t steps, int rows, float* c, bool first,
                    Reuse, Work& work, const BlockFactors& all) const {
    work.begin(ceil_div(rows, kRows));
    for (int r = 0; r < rows; r += kRows) {
      work.step();
      const uint16_t* a = reinterpret_cast<const uint16_t*>(lhs) + r * kBlock;
      const uint16_t* b = reinterpret_cast<const uint16_t*>(rhs);
      for (int64_t s = 0; s < steps; s += kFactorSteps) {
        BlockFactors factors = all.from(s / kFactorSteps);
        if (factors.lhs != nullptr) factors.lhs += r;
        rows_block(a + s * 2 * kTileWords, b + s * 2 * kTileWords,
                   steps - s < kFactorSteps ? steps - s : kFactorSteps, c + r * kRowBlock,
                   first && s == 0, &factors, pairs_);
      }
    }
  }

 private:
  // With factors, those multiply the sums before c is added.
  [[gnu::always_inline]] static void rows_block(const uint16_t* lhs, const uint16_t* rhs,
                                                int64_t steps, float* c, bool first,
                                                const BlockFactors* factors = nullptr,
                                                int pairs = 16) {
    bf16::Vec acc[kRows][2];
    const bool fresh = first || factors != nullptr;
    for (int r = 0; r < kRows; ++r) {
      acc[r][0] = fresh ? bf16::zero() : bf16::load(c + r * kRowBlock);
      acc[r][1] = fresh ? bf16::zero() : bf16::load(c + r * kRowBlock + 16);
    }
    for (int64_t s = 0; s < steps; ++s, lhs += 2 * kTileWords, rhs += 2 * kTileWords) {
#pragma GCC unroll 2
      for (int pair = 0; pair < pairs; ++pair) {
        const bf16::Words left = bf16::load_words(rhs + pair * kBlock);
        const bf16::Words right = bf16::load_words(rhs + kTileWords + pair * kBlock);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const bf16::Words x = bf16::broadcast_pair(lhs + r * kBlock + 2 * pair);
          acc[r][0] = bf16::dot(acc[r][0], left, x);
          acc[r][1] = bf16::dot(acc[r][1], right, x);
        }
      }
    }
    if (factors != nullptr) {
      const ColumnFactors<Simd> cols(factors->rhs);
      for (int r = 0; r < kRows; ++r) {
        const auto row = Simd::set(factors->lhs == nullptr ? 1.0f : factors->lhs[r]);
        for (int v = 0; v < 2; ++v) {
          const auto sum = first ? bf16::zero() : bf16::load(c + r * kRowBlock + 16 * v);
          acc[r][v] = Simd::fma(acc[r][v], Simd::mul(row, cols.of[v]), sum);
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      bf16::store(c + r * kRowBlock, acc[r][0]);
      bf16::store(c + r * kRowBlock + 16, acc[r][1]);
    }
  }

  const int pairs_;  // of the only block of k; 16 where there are more
};

using Thin = ThinGemm<Avx512Engine, bf16::Avx512Decoder, bf16::Avx512BlockDecoder>;

}  // namespace

const KernelImpl* avx512_bf16_impl() {
  static constexpr KernelImpl impl{bf16_panel_bytes,
                                   pack_bf16_panels<bf16::Avx512Decoder>,
                                   nullptr,
                                   Thin::run,
                                   bf16_panel_row_sums,
                                   Thin::decodes,
                                   pack_bf16_panels<bf16::Avx512Decoder, true>};
  return &impl;
}

}  // namespace te_mx::cpu
