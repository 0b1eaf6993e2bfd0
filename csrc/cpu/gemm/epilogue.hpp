// The block epilogue, written once over the f32 vector words S and built for each instruction set.
//
// In fp32, in this order: v = acc * 2^(row + column exponent); v += bias; aux = v; v = gelu(v) or
// v *= gelu'(gelu_in); bias_grad += v; v += out; out = v. Roundings to aux and out are to nearest
// even.
#pragma once

#include "gemm/gemm_internal.hpp"
#include "mxtile/simd/convert.hpp"
#include "mxtile/simd/math.hpp"

// The parts must become one function a kernel: an out-of-line copy would be paid at every vector.
#define TE_MX_INLINE [[gnu::always_inline]] static inline

namespace te_mx::cpu::block_epilogue {

inline constexpr int kMaxCols = 64;

template <class S, DType D>
TE_MX_INLINE typename S::F load(const void* base, int64_t at, int n) {
  const bool whole = n == S::kLanes;
  if constexpr (D == DType::f32) {
    const float* p = static_cast<const float*>(base) + at;
    return whole ? S::load(p) : S::load_part(p, n);
  } else {
    const uint16_t* p = static_cast<const uint16_t*>(base) + at;
    if constexpr (D == DType::f16) {
      return whole ? S::load_f16(p) : S::load_f16_part(p, n);
    } else {
      return mxtile::simd::bf16_value<S>(whole ? S::load_u16(p) : S::load_u16_part(p, n));
    }
  }
}

template <class S, DType D>
TE_MX_INLINE void store(void* base, int64_t at, typename S::F x, int n) {
  const bool whole = n == S::kLanes;
  if constexpr (D == DType::f32) {
    float* p = static_cast<float*>(base) + at;
    whole ? S::store(p, x) : S::store_part(p, x, n);
  } else {
    uint16_t* p = static_cast<uint16_t*>(base) + at;
    if constexpr (D == DType::f16) {
      whole ? S::store_f16(p, x) : S::store_f16_part(p, x, n);
    } else {
      const auto bits = mxtile::simd::bf16_bits<S>(x);
      whole ? S::store_u16(p, bits) : S::store_u16_part(p, bits, n);
    }
  }
}

// Calls body(j, n) for the vectors [j, j + n) of cols columns; n < lanes only in the last.
template <class S, class Body>
TE_MX_INLINE void each_vector(int cols, Body body) {
  int j = 0;
  for (; j + S::kLanes <= cols; j += S::kLanes) body(j, S::kLanes);
  if (j < cols) body(j, cols - j);
}

template <class S, DType D>
TE_MX_INLINE void load_row_as(const void* base, int64_t at, float* row, int cols) {
  each_vector<S>(cols, [&](int j, int n) { S::store(row + j, load<S, D>(base, at + j, n)); });
}

// row[0..cols) = base[at..at+cols); the rest of the last vector becomes zero.
template <class S>
TE_MX_INLINE void load_row(DType dtype, const void* base, int64_t at, float* row, int cols) {
  if (dtype == DType::f32) return load_row_as<S, DType::f32>(base, at, row, cols);
  if (dtype == DType::bf16) return load_row_as<S, DType::bf16>(base, at, row, cols);
  load_row_as<S, DType::f16>(base, at, row, cols);
}

template <class S, DType D>
TE_MX_INLINE void store_row_as(void* base, int64_t at, const float* row, int cols) {
  each_vector<S>(cols, [&](int j, int n) { store<S, D>(base, at + j, S::load(row + j), n); });
}

template <class S>
TE_MX_INLINE void store_row(DType dtype, void* base, int64_t at, const float* row, int cols) {
  if (dtype == DType::f32) return store_row_as<S, DType::f32>(base, at, row, cols);
  if (dtype == DType::bf16) return store_row_as<S, DType::bf16>(base, at, row, cols);
  store_row_as<S, DType::f16>(base, at, row, cols);
}

// The largest (Sign = 1) or the negated smallest (Sign = -1) of x[0..count), but not below that of
// 0 when count is no multiple of the lanes.
template <class S, int Sign>
TE_MX_INLINE float extreme(const float* x, int count) {
  const auto sign = S::set(static_cast<float>(Sign));
  auto best = S::mul(sign, S::set(x[0]));
  each_vector<S>(count, [&](int j, int n) {
    best = S::max(best, S::mul(sign, load<S, DType::f32>(x, j, n)));
  });
  float lanes[S::kLanes];
  S::store(lanes, best);
  for (int width = S::kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) {
      lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
    }
  }
  return lanes[0];
}

// Multiplies by 2^(row + column exponent). When every such power in the block is a normal float,
// one multiplication rounds exactly once, like scale2.
template <class S>
struct Scale {
  alignas(64) float col[kMaxCols];  // bits of the exponent as an integer; shifted into place when
                                    // normal
  const float* row_exp;
  const float* row_factor;  // of tensor scales, with those of columns, or null
  const float* col_factor;
  bool normal;

  TE_MX_INLINE void init(Scale& s, const EpilogueContext& context, int64_t m0, int64_t n0, int rows,
                         int cols) {
    s.row_exp = context.lhs_exp + m0;
    const float* col_exp = context.rhs_exp + n0;
    s.row_factor = context.lhs_factor == nullptr ? nullptr : context.lhs_factor + m0;
    s.col_factor = context.rhs_factor + n0;
    s.normal = s.row_factor == nullptr &&
               extreme<S, 1>(s.row_exp, rows) + extreme<S, 1>(col_exp, cols) <= 127.0f &&
               extreme<S, -1>(s.row_exp, rows) + extreme<S, -1>(col_exp, cols) <= 126.0f;
    each_vector<S>(cols, [&](int j, int n) {
      auto bits = mxtile::simd::nearest_int<S>(load<S, DType::f32>(col_exp, j, n));
      if (s.normal) bits = S::template shl<23>(bits);
      S::store(s.col + j, S::as_float(bits));
    });
  }
  // What apply() takes for row i.
  TE_MX_INLINE typename S::I row(const Scale& s, int i) {
    const int32_t exponent = static_cast<int32_t>(s.row_exp[i]);
    return S::iset(s.normal ? (exponent + 127) * (1 << 23) : exponent);
  }
  template <bool Normal>
  TE_MX_INLINE typename S::F apply(const Scale& s, typename S::F x, typename S::I row, int j) {
    const auto exponent = S::iadd(row, S::as_int(S::load(s.col + j)));
    if constexpr (Normal) {
      return S::mul(x, S::as_float(exponent));
    } else {
      return S::scale2(x, exponent);
    }
  }
};

// Nothing but scale, perhaps bias, and one store: a straight convert and store.
template <class S, DType Out, bool Bias>
TE_MX_INLINE void plain_block(const GemmTask& args, const Scale<S>& scale, const float* bias,
                              const float* acc, int64_t ld, int64_t m0, int64_t n0, int rows,
                              int cols) {
  for (int i = 0; i < rows; ++i) {
    const auto row = Scale<S>::row(scale, i);
    const int64_t at = (m0 + i) * args.ldo + n0;
    each_vector<S>(cols, [&](int j, int n) {
      auto x = Scale<S>::template apply<true>(scale, S::load(acc + i * ld + j), row, j);
      if constexpr (Bias) x = S::add(x, S::load(bias + j));
      store<S, Out>(args.out, at + j, x, n);
    });
  }
}

template <class S, bool Bias>
TE_MX_INLINE void plain(const GemmTask& args, const Scale<S>& scale, const float* bias,
                        const float* acc, int64_t ld, int64_t m0, int64_t n0, int rows, int cols) {
  if (args.out_dtype == DType::bf16) {
    plain_block<S, DType::bf16, Bias>(args, scale, bias, acc, ld, m0, n0, rows, cols);
  } else if (args.out_dtype == DType::f32) {
    plain_block<S, DType::f32, Bias>(args, scale, bias, acc, ld, m0, n0, rows, cols);
  } else {
    plain_block<S, DType::f16, Bias>(args, scale, bias, acc, ld, m0, n0, rows, cols);
  }
}

// row = word(row), or row *= word(with) when `with` is given.
template <class S, class Word>
TE_MX_INLINE void map_row(float* row, const float* with, int cols, Word word) {
  for (int j = 0; j < cols; j += S::kLanes) {
    const auto x = S::load(row + j);
    S::store(row + j, with != nullptr ? S::mul(x, word(S::load(with + j))) : word(x));
  }
}

// x += y
template <class S>
TE_MX_INLINE void add_row(float* x, const float* y, int cols) {
  for (int j = 0; j < cols; j += S::kLanes) S::store(x + j, S::add(S::load(x + j), S::load(y + j)));
}

template <class S>
TE_MX_INLINE void scale_row(const Scale<S>& scale, const float* acc, int i, float* row, int cols) {
  const auto exponent = Scale<S>::row(scale, i);
  for (int j = 0; j < cols; j += S::kLanes) {
    auto x = S::load(acc + j);
    if (scale.row_factor != nullptr) {
      const int n = cols - j < S::kLanes ? cols - j : S::kLanes;
      const auto col = load<S, DType::f32>(scale.col_factor, j, n);
      x = S::mul(x, S::mul(S::set(scale.row_factor[i]), col));
    }
    S::store(row + j, scale.normal ? Scale<S>::template apply<true>(scale, x, exponent, j)
                                   : Scale<S>::template apply<false>(scale, x, exponent, j));
  }
}

// An EpilogueFn (see gemm_internal.hpp): every step, a row at a time in L1.
template <class S>
void run(const EpilogueContext& context, const float* acc, int64_t ld, int64_t m0, int64_t n0,
         int rows, int cols) {
  using Tanh = mxtile::simd::GeluTanh<S>;
  using Erf = mxtile::simd::GeluErf<S>;
  using F = typename S::F;
  const GemmTask& args = *context.args;
  alignas(64) float bias[kMaxCols];
  Scale<S> scale;
  if (args.bias != nullptr) load_row<S>(args.bias_dtype, args.bias, n0, bias, cols);
  if (!context.exact_scale) {
    Scale<S>::init(scale, context, m0, n0, rows, cols);
    const bool only_store = args.aux == nullptr && args.gelu == Gelu::none &&
                            context.bias_grad_partial == nullptr && !args.accumulate;
    if (only_store && scale.normal) {
      if (args.bias != nullptr) {
        plain<S, true>(args, scale, bias, acc, ld, m0, n0, rows, cols);
      } else {
        plain<S, false>(args, scale, bias, acc, ld, m0, n0, rows, cols);
      }
      return;
    }
  }

  const int64_t N = args.rhs.rows;
  alignas(64) float row[kMaxCols], other[kMaxCols], sums[kMaxCols] = {};
  for (int i = 0; i < rows; ++i) {
    const int64_t at = (m0 + i) * N + n0, out_at = (m0 + i) * args.ldo + n0;
    if (context.exact_scale) {
      load_row_as<S, DType::f32>(acc, i * ld, row, cols);
    } else {
      scale_row<S>(scale, acc + i * ld, i, row, cols);
    }
    if (args.bias != nullptr) add_row<S>(row, bias, cols);
    if (args.aux != nullptr) store_row<S>(args.aux_dtype, args.aux, at, row, cols);
    if (args.gelu_in != nullptr) {
      load_row<S>(args.gelu_in_dtype, args.gelu_in, at, other, cols);
      if (args.gelu == Gelu::erf) {
        map_row<S>(row, other, cols, [](F x) { return Erf::derivative(x); });
      } else {
        map_row<S>(row, other, cols, [](F x) { return Tanh::derivative(x); });
      }
    } else if (args.gelu == Gelu::tanh) {
      map_row<S>(row, nullptr, cols, [](F x) { return Tanh::value(x); });
    } else if (args.gelu == Gelu::erf) {
      map_row<S>(row, nullptr, cols, [](F x) { return Erf::value(x); });
    }
    if (context.bias_grad_partial != nullptr) add_row<S>(sums, row, cols);
    if (args.accumulate) {
      load_row<S>(args.out_dtype, args.out, out_at, other, cols);
      add_row<S>(row, other, cols);
    }
    store_row<S>(args.out_dtype, args.out, out_at, row, cols);
  }
  if (context.bias_grad_partial != nullptr) {
    store_row_as<S, DType::f32>(context.bias_grad_partial, m0 / kRowBlock * N + n0, sums, cols);
  }
}

}  // namespace te_mx::cpu::block_epilogue
