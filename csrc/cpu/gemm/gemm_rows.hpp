// The epilogue of 32 x 32 blocks, a row or two at a time: an engine spreads it over the products of
// its next block, where it costs little. The steps and bits are those of block_epilogue::run.
#pragma once

#include "gemm/epilogue.hpp"
#include "mxtile/simd/wide.hpp"

#define TE_MX_MEMBER [[gnu::always_inline]] inline

namespace te_mx::cpu {

// Whether every power of two that scales elements of `range` is a normal float.
template <class S>
TE_MX_INLINE bool normal_powers(const EpilogueContext& context, const Range& range) {
  using block_epilogue::extreme;
  const float* rows = context.lhs_exp + range.m0;
  const float* cols = context.rhs_exp + range.n0;
  const int m = static_cast<int>(range.m1 - range.m0), n = static_cast<int>(range.n1 - range.n0);
  return context.lhs_factor == nullptr &&
         extreme<S, 1>(rows, m) + extreme<S, 1>(cols, n) <= 127.0f &&
         extreme<S, -1>(rows, m) + extreme<S, -1>(cols, n) <= 126.0f;
}

template <class S>
class PendingRows {
 public:
  // normal: normal_powers() of all blocks. Not for an exact_scale.
  PendingRows(const EpilogueContext& context, bool normal)
      : context_(context),
        args_(*context.args),
        normal_(normal),
        only_scaled_(normal && args_.aux == nullptr && args_.gelu == Gelu::none &&
                     context.bias_grad_partial == nullptr && !args_.accumulate),
        out_past_caches_(context.past_caches && !args_.accumulate) {}

  // Says which block start() will take next: step() fetches what it reads, lines that lie rows
  // apart.
  TE_MX_MEMBER void expect(int64_t m0, int64_t n0, int rows) {
    if (args_.gelu_in != nullptr) {
      expect(args_.gelu_in, args_.gelu_in_dtype, m0, n0, args_.rhs.rows, rows);
    } else if (!out_past_caches_) {
      expect(args_.out, args_.out_dtype, m0, n0, args_.ldo, rows);
    }
  }

  // Takes the 32-column block c[rows][32] of D[m0.., n0..]; c must stand until the last row is
  // done.
  TE_MX_MEMBER void start(const float* c, int64_t m0, int64_t n0, int rows) {
    c_ = c;
    m_ = m0;
    left_ = rows;
    if (context_.bias_grad_partial != nullptr) __builtin_memset(sums_, 0, sizeof sums_);
    if (n0 == n_) return;
    n_ = n0;
    for (int j = 0; j < kRowBlock; j += S::kLanes) {
      auto exponent = mxtile::simd::nearest_int<S>(S::load(context_.rhs_exp + n0 + j));
      if (normal_) exponent = S::template shl<23>(exponent);
      S::store(col_ + j, S::as_float(exponent));
    }
    if (args_.bias != nullptr) {
      block_epilogue::load_row<S>(args_.bias_dtype, args_.bias, n0, bias_, kRowBlock);
    }
  }

  // Spreads what is pending over so many calls of step().
  TE_MX_MEMBER void begin(int64_t steps) {
    rows_a_step_ = static_cast<int>(ceil_div(left_, steps));
    fetches_a_step_ = static_cast<int>(ceil_div(fetches_, steps));
    due_ = 0;
  }

  TE_MX_MEMBER void step() {
    for (int i = 0; i < fetches_a_step_ && fetches_ > 0; ++i, --fetches_, fetch_ += fetch_stride_) {
      __builtin_prefetch(fetch_, 0, 2);
      if (fetch_lines_ > 1) __builtin_prefetch(fetch_ + 64, 0, 2);
    }
    if (only_scaled_) {
      for (int r = 0; r < rows_a_step_ && left_ > 0; ++r) scaled_row();
      return;
    }
    due_ += rows_a_step_;
    for (; due_ >= kTogether && left_ >= kTogether; due_ -= kTogether) rows<kTogether>();
  }

  TE_MX_MEMBER void finish() {
    if (only_scaled_) {
      while (left_ > 0) scaled_row();
    } else {
      while (left_ >= kTogether) rows<kTogether>();
      while (left_ > 0) rows<1>();
    }
  }

  // After the last block: what was stored past the caches is there for other threads.
  TE_MX_MEMBER void fence() {
    if constexpr (kLines) {
      if (context_.past_caches || context_.aux_past_caches) S::fence_stores();
    }
  }

 private:
  // Two vectors a row: word sets as wide as a cache line can store past the caches, and have
  // registers for two rows whose chains of instructions run side by side.
  static constexpr int kVectors = kRowBlock / S::kLanes;
  static constexpr bool kLines = kVectors == 2;
  static constexpr int kTogether = kLines ? 2 : 1;

  TE_MX_MEMBER void expect(const void* base, DType dtype, int64_t m0, int64_t n0, int64_t ld,
                           int rows) {
    const int64_t bytes = dtype == DType::f32 ? 4 : 2;
    fetch_ = static_cast<const char*>(base) + (m0 * ld + n0) * bytes;
    fetch_stride_ = ld * bytes;
    fetch_lines_ = static_cast<int>(kRowBlock * bytes / 64);
    fetches_ = rows;
  }

  TE_MX_MEMBER void next(int rows) {
    c_ += rows * kRowBlock;
    m_ += rows;
    left_ -= rows;
  }

  // Scaled as block_epilogue::Scale does, and biased.
  template <bool normal>
  TE_MX_MEMBER typename S::F value(int r, int j) const {
    const int32_t row = static_cast<int32_t>(context_.lhs_exp[m_ + r]);
    const auto col = S::as_int(S::load(col_ + j));
    auto x = S::load(c_ + r * kRowBlock + j);
    if constexpr (normal) {
      x = S::mul(x, S::as_float(S::iadd(S::iset((row + 127) * (1 << 23)), col)));
    } else {
      if (context_.lhs_factor != nullptr) {
        const auto factor = S::load(context_.rhs_factor + n_ + j);
        x = S::mul(x, S::mul(S::set(context_.lhs_factor[m_ + r]), factor));
      }
      x = S::scale2(x, S::iadd(S::iset(row), col));
    }
    return args_.bias == nullptr ? x : S::add(x, S::load(bias_ + j));
  }

  TE_MX_MEMBER void scaled_row() {
    typename S::F row[kVectors];
    for (int i = 0; i < kVectors; ++i) row[i] = value<true>(0, i * S::kLanes);
    store(args_.out_dtype, args_.out, m_ * args_.ldo + n_, out_past_caches_, row);
    next(1);
  }

  // Every step on R rows. Out of line: once, and not in every loop of an engine.
  template <int R>
  [[gnu::noinline]] void rows() {
    using W = mxtile::simd::Wide<S, R * kVectors>;
    using Tanh = mxtile::simd::GeluTanh<W>;
    using Erf = mxtile::simd::GeluErf<W>;
    const int64_t N = args_.rhs.rows, at = m_ * N + n_;
    typename W::F v;
    for (int i = 0; i < R * kVectors; ++i) {
      const int r = i / kVectors, j = i % kVectors * S::kLanes;
      v.v[i] = normal_ ? value<true>(r, j) : value<false>(r, j);
    }
    if (args_.aux != nullptr) {
      for (int r = 0; r < R; ++r) {
        store(args_.aux_dtype, args_.aux, at + r * N, context_.aux_past_caches, v.v + r * kVectors);
      }
    }
    if (args_.gelu_in != nullptr) {
      const auto in = load<W>(args_.gelu_in_dtype, args_.gelu_in, at, N);
      v = W::mul(v, args_.gelu == Gelu::erf ? Erf::derivative(in) : Tanh::derivative(in));
    } else if (args_.gelu == Gelu::tanh) {
      v = Tanh::value(v);
    } else if (args_.gelu == Gelu::erf) {
      v = Erf::value(v);
    }
    if (context_.bias_grad_partial != nullptr) {
      for (int i = 0; i < R * kVectors; ++i) {
        float* sum = sums_ + i % kVectors * S::kLanes;
        S::store(sum, S::add(S::load(sum), v.v[i]));
      }
      if (left_ == R) put_sums();
    }
    const int64_t out_at = m_ * args_.ldo + n_;
    if (args_.accumulate) v = W::add(v, load<W>(args_.out_dtype, args_.out, out_at, args_.ldo));
    for (int r = 0; r < R; ++r) {
      store(args_.out_dtype, args_.out, out_at + r * args_.ldo, out_past_caches_,
            v.v + r * kVectors);
    }
    next(R);
  }

  void put_sums() const {
    float* to = context_.bias_grad_partial + m_ / kRowBlock * args_.rhs.rows + n_;
    for (int j = 0; j < kRowBlock; j += S::kLanes) S::store(to + j, S::load(sums_ + j));
  }

  template <class W>
  TE_MX_MEMBER typename W::F load(DType dtype, const void* base, int64_t at, int64_t ld) const {
    if (dtype == DType::bf16) return load_as<W, DType::bf16>(base, at, ld);
    if (dtype == DType::f32) return load_as<W, DType::f32>(base, at, ld);
    return load_as<W, DType::f16>(base, at, ld);
  }

  template <class W, DType D>
  TE_MX_MEMBER typename W::F load_as(const void* base, int64_t at, int64_t ld) const {
    typename W::F x;
    for (int i = 0; i < W::kLanes / S::kLanes; ++i) {
      const int64_t from = at + i / kVectors * ld + i % kVectors * S::kLanes;
      x.v[i] = block_epilogue::load<S, D>(base, from, S::kLanes);
    }
    return x;
  }

  // One row.
  TE_MX_MEMBER static void store(DType dtype, void* base, int64_t at, bool past_caches,
                                 const typename S::F* x) {
    if (dtype == DType::bf16) {
      store_as<DType::bf16>(base, at, past_caches, x);
    } else if (dtype == DType::f32) {
      store_as<DType::f32>(base, at, past_caches, x);
    } else {
      store_as<DType::f16>(base, at, past_caches, x);
    }
  }

  template <DType D>
  TE_MX_MEMBER static void store_as(void* base, int64_t at, bool past_caches,
                                    const typename S::F* x) {
    if constexpr (kLines && D == DType::bf16) {
      uint16_t* out = static_cast<uint16_t*>(base) + at;
      const auto low = mxtile::simd::bf16_bits<S>(x[0]), high = mxtile::simd::bf16_bits<S>(x[1]);
      past_caches ? S::store_u16_past_caches(out, low, high) : S::store_u16_line(out, low, high);
      return;
    }
    if constexpr (kLines && D == DType::f32) {
      if (past_caches) {
        float* out = static_cast<float*>(base) + at;
        S::store_past_caches(out, x[0]);
        S::store_past_caches(out + S::kLanes, x[1]);
        return;
      }
    }
    for (int i = 0; i < kVectors; ++i) {
      block_epilogue::store<S, D>(base, at + i * S::kLanes, x[i], S::kLanes);
    }
  }

  const EpilogueContext& context_;
  const GemmTask& args_;
  const bool normal_, only_scaled_, out_past_caches_;
  const float* c_ = nullptr;
  const char* fetch_ = nullptr;
  int64_t fetch_stride_ = 0, m_ = 0, n_ = -1;
  int left_ = 0, fetches_ = 0, fetch_lines_ = 0, rows_a_step_ = 0, fetches_a_step_ = 0, due_ = 0;
  alignas(64) float col_[kRowBlock], bias_[kRowBlock], sums_[kRowBlock];
};

}  // namespace te_mx::cpu
