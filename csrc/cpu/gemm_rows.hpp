// The epilogue of blocks that are only scaled, biased, rounded and stored, one row at a time: an
// engine spreads it over the products of its next block, where it costs nothing.
#pragma once

#include "epilogue.hpp"

#define TE_MX_MEMBER [[gnu::always_inline]] inline

namespace te_mx {

// Whether the rows of `range` need nothing else and every power of two among them is a normal
// float.
template <class S>
TE_MX_INLINE bool only_scaled_rows(const EpilogueContext& context, const Range& range) {
  using block_epilogue::extreme;
  const GemmArgs& args = *context.args;
  if (context.exact_scale || args.aux != nullptr || args.gelu != Gelu::none || args.accumulate ||
      context.bias_grad_partial != nullptr) {
    return false;
  }
  const float* rows = context.lhs_exp + range.m0;
  const float* cols = context.rhs_exp + range.n0;
  const int m = static_cast<int>(range.m1 - range.m0), n = static_cast<int>(range.n1 - range.n0);
  return extreme<S, 1>(rows, m) + extreme<S, 1>(cols, n) <= 127.0f &&
         extreme<S, -1>(rows, m) + extreme<S, -1>(cols, n) <= 126.0f;
}

template <class S>
class PendingRows {
 public:
  explicit PendingRows(const EpilogueContext& context) : context_(context), args_(*context.args) {}

  // Takes the 32-column block c[rows][32] of D[m0.., n0..]; c must stand until the last row is
  // done.
  TE_MX_MEMBER void start(const float* c, int64_t m0, int64_t n0, int rows) {
    c_ = c;
    row_exp_ = context_.lhs_exp + m0;
    out_ = m0 * args_.ldo + n0;
    left_ = rows;
    if (n0 == n0_) return;
    n0_ = n0;
    for (int j = 0; j < kRowBlock; j += S::kLanes) {
      const auto exponent = mxtile::simd::nearest_int<S>(S::load(context_.rhs_exp + n0 + j));
      S::store(col_ + j, S::as_float(S::template shl<23>(exponent)));
    }
    if (args_.bias != nullptr) {
      block_epilogue::load_row<S>(args_.bias_dtype, args_.bias, n0, bias_, kRowBlock);
    }
  }

  int left() const { return left_; }

  TE_MX_MEMBER void row() {
    if (args_.out_dtype == DType::bf16) {
      store_row<DType::bf16>();
    } else if (args_.out_dtype == DType::f32) {
      store_row<DType::f32>();
    } else {
      store_row<DType::f16>();
    }
  }

  TE_MX_MEMBER void finish() {
    while (left_ > 0) row();
  }

  // After the last block: what was stored past the caches is there for other threads.
  TE_MX_MEMBER void fence() {
    if constexpr (kLines) {
      if (context_.past_caches) S::fence_stores();
    }
  }

 private:
  // Two vectors a row: word sets as wide as a cache line can store past the caches.
  static constexpr bool kLines = 2 * S::kLanes == kRowBlock;

  template <DType D>
  TE_MX_MEMBER void store_row() {
    if constexpr (kLines && D != DType::f16) {
      if (context_.past_caches) {
        store_lines<D>();
      } else {
        store_vectors<D>();
      }
    } else {
      store_vectors<D>();
    }
    c_ += kRowBlock;
    out_ += args_.ldo;
    ++row_exp_;
    --left_;
  }

  TE_MX_MEMBER typename S::F value(typename S::I exponent, int j) const {
    const auto power = S::iadd(exponent, S::as_int(S::load(col_ + j)));
    const auto x = S::mul(S::load(c_ + j), S::as_float(power));
    return args_.bias == nullptr ? x : S::add(x, S::load(bias_ + j));
  }

  TE_MX_MEMBER typename S::I row_exponent() const {
    return S::iset((static_cast<int32_t>(*row_exp_) + 127) * (1 << 23));
  }

  template <DType D>
  TE_MX_MEMBER void store_vectors() const {
    const auto exponent = row_exponent();
    for (int j = 0; j < kRowBlock; j += S::kLanes) {
      block_epilogue::store<S, D>(args_.out, out_ + j, value(exponent, j), S::kLanes);
    }
  }

  template <DType D>
  TE_MX_MEMBER void store_lines() const {
    const auto exponent = row_exponent();
    const auto low = value(exponent, 0), high = value(exponent, S::kLanes);
    if constexpr (D == DType::f32) {
      float* out = static_cast<float*>(args_.out) + out_;
      S::store_past_caches(out, low);
      S::store_past_caches(out + S::kLanes, high);
    } else {
      S::store_u16_past_caches(static_cast<uint16_t*>(args_.out) + out_,
                               mxtile::simd::bf16_bits<S>(low), mxtile::simd::bf16_bits<S>(high));
    }
  }

  const EpilogueContext& context_;
  const GemmArgs& args_;
  const float* c_ = nullptr;
  const float* row_exp_ = nullptr;
  int64_t out_ = 0, n0_ = -1;
  int left_ = 0;
  alignas(64) float col_[kRowBlock], bias_[kRowBlock];
};

}  // namespace te_mx
