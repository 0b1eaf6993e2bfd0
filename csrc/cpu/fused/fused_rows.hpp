// The row kernels, written once over the f32 vector words S and built for each instruction set.
#pragma once

#include "common/room.h"
#include "fused/fused_rows.h"
#include "gemm/epilogue.hpp"
#include "mxtile/simd/activation.hpp"
#include "mxtile/simd/wide.hpp"

namespace te_mx::cpu::fused_rows {

namespace simd = mxtile::simd;
using block_epilogue::each_vector;
using block_epilogue::load_row;
using block_epilogue::store_row;

// Running sums of a row in kNormLanes lanes (see fused.h).
template <class S>
struct LaneSums {
  static constexpr int kVectors = kNormLanes / S::kLanes;
  typename S::F lane[kVectors];

  TE_MX_INLINE void clear(LaneSums& s) {
    for (int v = 0; v < kVectors; ++v) s.lane[v] = S::set(0.0f);
  }
  TE_MX_INLINE float fold(LaneSums& s) {
#pragma GCC unroll 8
    for (int half = kVectors / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
      for (int v = 0; v < half; ++v) s.lane[v] = S::add(s.lane[v], s.lane[v + half]);
    }
    float last[S::kLanes];
    S::store(last, s.lane[0]);
    for (int half = S::kLanes / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) last[i] += last[i + half];
    }
    return last[0];
  }
};

// Adds elements [0, n) to the lanes, starting at lane 0; word(c) gives those of the vector at c.
template <class S, class Word>
TE_MX_INLINE void add_lanes(LaneSums<S>& sums, int64_t n, Word word) {
  int64_t c = 0;
  for (; c + kNormLanes <= n; c += kNormLanes) {
#pragma GCC unroll 16
    for (int v = 0; v < LaneSums<S>::kVectors; ++v) {  // in registers where there are 16 or more
      sums.lane[v] = S::add(sums.lane[v], word(c + v * S::kLanes));
    }
  }
  for (int v = 0; c < n; c += S::kLanes, ++v) {
    auto x = word(c);
    if (n - c < S::kLanes) {
      float lanes[S::kLanes];
      S::store(lanes, x);
      x = S::load_part(lanes, static_cast<int>(n - c));
    }
    sums.lane[v] = S::add(sums.lane[v], x);
  }
}

template <class S, class Word>
TE_MX_INLINE float lane_sum(int64_t n, Word word) {
  LaneSums<S> sums;
  LaneSums<S>::clear(sums);
  add_lanes<S>(sums, n, word);
  return LaneSums<S>::fold(sums);
}

// Elements of a row that fit the buffer of stats(): a multiple of kNormLanes.
inline constexpr int64_t kRowBuffer = 16384;

template <class S>
void stats(const NormArgs& args, int64_t row, float* mean, float* rstd) {
  using F = typename S::F;
  const Room room(sizeof(float) * kRowBuffer);
  float* const x = static_cast<float*>(room.get());
  const int64_t first = row * args.x.row_stride;
  const bool fits = args.x.cols <= kRowBuffer;
  if (fits) load_row<S>(args.x.dtype, args.x.data, first, x, static_cast<int>(args.x.cols));
  const auto sum = [&](auto word) {
    if (fits) return lane_sum<S>(args.x.cols, [&](int64_t c) { return word(S::load(x + c)); });
    LaneSums<S> sums;
    LaneSums<S>::clear(sums);
    for (int64_t c0 = 0; c0 < args.x.cols; c0 += kRowBuffer) {
      const int64_t n = args.x.cols - c0 < kRowBuffer ? args.x.cols - c0 : kRowBuffer;
      load_row<S>(args.x.dtype, args.x.data, first + c0, x, static_cast<int>(n));
      add_lanes<S>(sums, n, [&](int64_t c) { return word(S::load(x + c)); });
    }
    return LaneSums<S>::fold(sums);
  };
  float middle = 0.0f, squares;
  if (args.rms) {
    squares = sum([](F v) { return S::mul(v, v); });
  } else {
    middle = sum([](F v) { return v; }) * args.inverse;
    const F center = S::set(middle);
    squares = sum([center](F v) {
      const F d = S::sub(v, center);
      return S::mul(d, d);
    });
  }
  *mean = middle;
  *rstd = 1.0f / __builtin_sqrtf(squares * args.inverse + args.eps);
}

template <class S>
void normalize(const NormArgs& args, int64_t row, float mean, float rstd, int64_t c, int n,
               void* out) {
  using F = typename S::F;
  alignas(64) float x[kFusedCols];
  load_row<S>(args.x.dtype, args.x.data, row * args.x.row_stride + c, x, n);
  const F center = S::set(mean), factor = S::set(rstd);
  const float* weight = static_cast<const float*>(args.weight) + c;
  const float* bias = args.bias == nullptr ? nullptr : static_cast<const float*>(args.bias) + c;
  const bool rms = args.rms;
  each_vector<S>(n, [&](int j, int count) {
    F v = S::load(x + j);
    if (!rms) v = S::sub(v, center);
    v = S::mul(S::mul(v, factor), S::load_part(weight + j, count));
    if (bias != nullptr) v = S::add(v, S::load_part(bias + j, count));
    S::store(x + j, v);
  });
  store_row<S>(args.z_dtype, out, 0, x, n);
}

template <class S>
void normalize_backward(const NormGradArgs& args, int64_t row, float* dweight, float* dbias,
                        float* v, float* h) {
  using F = typename S::F;
  const int cols = static_cast<int>(args.x.cols);
  load_row<S>(args.dz.dtype, args.dz.data, row * args.dz.row_stride, v, cols);
  load_row<S>(args.x.dtype, args.x.data, row * args.x.row_stride, h, cols);
  const bool rms = args.rms;
  const float* const weight = static_cast<const float*>(args.weight);
  const F center = S::set(rms ? 0.0f : args.mean[row]), factor = S::set(args.rstd[row]);
  each_vector<S>(cols, [&](int j, int n) {
    const F dz = S::load(v + j);
    F x = S::load(h + j);
    if (!rms) x = S::sub(x, center);
    x = S::mul(x, factor);
    S::store(h + j, x);
    S::store(v + j, S::mul(dz, S::load_part(weight + j, n)));
    S::store_part(dweight + j, S::add(S::load_part(dweight + j, n), S::mul(dz, x)), n);
    if (dbias != nullptr) S::store_part(dbias + j, S::add(S::load_part(dbias + j, n), dz), n);
  });
  const auto value = [&](int64_t c) { return S::load(v + c); };
  const auto product = [&](int64_t c) { return S::mul(S::load(v + c), S::load(h + c)); };
  const F shift = S::set(rms ? 0.0f : lane_sum<S>(cols, value) * args.inverse);
  const F second = S::set(lane_sum<S>(cols, product) * args.inverse);
  each_vector<S>(cols, [&](int j, int) {
    F drift = S::mul(S::load(h + j), second);
    if (!rms) drift = S::add(shift, drift);
    S::store(v + j, S::mul(S::sub(S::load(v + j), drift), factor));
  });
  store_row<S>(args.dx_dtype, args.dx, row * args.x.cols, v, cols);
}

// ------------------------------------------------------------------------------------ activations
// Rows are worked on in whole wide words, whatever n is: buffers have kFusedCols, a multiple.
template <class W>
struct Floats {
  using Words = W;
  using Element = float;
  TE_MX_INLINE typename W::F load(const float* p) { return W::load(p); }
  TE_MX_INLINE void store(float* p, typename W::F x) { W::store(p, x); }
};

// bf16 two by two: even elements in one vector, odd ones in the next, which no shuffle made.
template <class S, int N>
struct Pairs {
  using Words = simd::Wide<S, N>;
  using Element = uint16_t;
  static_assert(N % 2 == 0);
  TE_MX_INLINE typename Words::F load(const uint16_t* p) {
    typename Words::F x;
#pragma GCC unroll 4
    for (int i = 0; i < N; i += 2) {
      const auto pair = simd::Bf16Pairs<S>::load(p + i * S::kLanes);
      x.v[i] = pair.even;
      x.v[i + 1] = pair.odd;
    }
    return x;
  }
  TE_MX_INLINE void store(uint16_t* p, typename Words::F x) {
#pragma GCC unroll 4
    for (int i = 0; i < N; i += 2) {
      simd::Bf16Pairs<S>::store(p + i * S::kLanes, x.v[i], x.v[i + 1]);
    }
  }
};

// What a row chunk is made of and where it goes; gate, gradient and out_gate may be null.
template <class T>
struct ActRow {
  const T *x, *gate, *gradient;
  T *out, *out_gate;
};

// out = value(x) * gate, or with a gradient out = (gradient * gate) * derivative(x) and out_gate =
// gradient * value(x).
template <class Io, class Word>
TE_MX_INLINE void apply(const Word& word, const ActRow<typename Io::Element>& row, int n) {
  using W = typename Io::Words;
  static_assert(kFusedCols % W::kLanes == 0);
  const auto [x, gate, gradient, out, out_gate] = row;
  if (gradient == nullptr && gate == nullptr) {
    for (int j = 0; j < n; j += W::kLanes) Io::store(out + j, word.value(Io::load(x + j)));
  } else if (gradient == nullptr) {
    for (int j = 0; j < n; j += W::kLanes) {
      Io::store(out + j, W::mul(word.value(Io::load(x + j)), Io::load(gate + j)));
    }
  } else if (gate == nullptr) {
    for (int j = 0; j < n; j += W::kLanes) {
      Io::store(out + j, W::mul(Io::load(gradient + j), word.derivative(Io::load(x + j))));
    }
  } else {
    for (int j = 0; j < n; j += W::kLanes) {
      const auto in = Io::load(x + j), g = Io::load(gradient + j);
      const auto d = W::mul(W::mul(g, Io::load(gate + j)), word.derivative(in));
      Io::store(out_gate + j, W::mul(g, word.value(in)));
      Io::store(out + j, d);
    }
  }
}

// Every activation but clamped_silu.
template <class Io>
TE_MX_INLINE void apply_act(Act act, const ActRow<typename Io::Element>& row, int n) {
  using W = typename Io::Words;
  switch (act) {
    case Act::gelu:
      return apply<Io>(simd::GeluTanhWord<W>{}, row, n);
    case Act::gelu_erf:
      return apply<Io>(simd::GeluErfWord<W>{}, row, n);
    case Act::relu:
      return apply<Io>(simd::Relu<W>{}, row, n);
    case Act::squared_relu:
      return apply<Io>(simd::SquaredRelu<W>{}, row, n);
    case Act::silu:
      return apply<Io>(simd::Swish<W>{W::set(1.0f)}, row, n);
    case Act::quick_gelu:
      return apply<Io>(simd::Swish<W>{W::set(1.702f)}, row, n);
    case Act::sigmoid:
      return apply<Io>(simd::SigmoidWord<W>{}, row, n);
    case Act::clamped_silu:
      break;
  }
}

// What lies at (row, c) of a matrix of bf16: itself where whole words may be read, else a copy.
template <int kWords>
TE_MX_INLINE const uint16_t* whole_words(const void* base, int64_t at, int n, uint16_t* copy) {
  const uint16_t* p = static_cast<const uint16_t*>(base) + at;
  if (n % kWords == 0) return p;
  __builtin_memcpy(copy, p, static_cast<size_t>(n) * 2);
  return copy;
}

template <class S>
TE_MX_INLINE void activate_bf16(const ActArgs& args, int64_t row, int64_t c, int n, void* out,
                                void* out_gate) {
  // Four exponentials at a time where there are registers for them.
  using Io = Pairs<S, S::kLanes == 16 ? 4 : 2>;
  constexpr int kWords = Io::Words::kLanes;
  alignas(64) uint16_t x[kFusedCols], gate[kFusedCols], gradient[kFusedCols];
  const int64_t at = row * args.h.row_stride + c, gate_at = at + act_cols(args);
  const int64_t grad_at = row * args.grad.row_stride + c;
  const ActRow<uint16_t> words{
      whole_words<kWords>(args.h.data, at, n, x),
      args.gated ? whole_words<kWords>(args.h.data, gate_at, n, gate) : nullptr,
      args.grad.data ? whole_words<kWords>(args.grad.data, grad_at, n, gradient) : nullptr,
      static_cast<uint16_t*>(out), static_cast<uint16_t*>(out_gate)};
  apply_act<Io>(args.act, words, n);
}

// A gate clamped and shifted; passes[j] is the derivative of the clamp.
template <class S>
TE_MX_INLINE void clamp_gate(const ActArgs& args, float* gate, float* passes, int n) {
  using F = typename S::F;
  const F limit = S::set(args.limit), low = S::set(-args.limit), offset = S::set(args.offset);
  for (int j = 0; j < n; j += S::kLanes) {
    const F in = S::load(gate + j);
    const F clamped = S::max(low, S::min(limit, in));
    const F below = S::select_lt(limit, in, S::set(0.0f), S::set(1.0f));
    S::store(passes + j, S::select_lt(in, low, S::set(0.0f), below));
    S::store(gate + j, S::add(clamped, offset));
  }
}

template <class S>
void activate(const ActArgs& args, int64_t row, int64_t c, int n, void* out, void* out_gate) {
  const bool gradients = args.grad.data != nullptr, bf16 = DType::bf16 == args.h.dtype;
  if (bf16 && args.out_dtype == DType::bf16 && args.act != Act::clamped_silu &&
      (!gradients || args.grad.dtype == DType::bf16)) {
    return activate_bf16<S>(args, row, c, n, out, out_gate);
  }
  using Io = Floats<simd::Wide<S, S::kLanes == 16 ? 4 : 1>>;
  alignas(64) float x[kFusedCols], gate[kFusedCols], gradient[kFusedCols], passes[kFusedCols];
  const int64_t at = row * args.h.row_stride + c;
  load_row<S>(args.h.dtype, args.h.data, at, x, n);
  if (args.gated) load_row<S>(args.h.dtype, args.h.data, at + act_cols(args), gate, n);
  if (gradients)
    load_row<S>(args.grad.dtype, args.grad.data, row * args.grad.row_stride + c, gradient, n);
  const bool clamps = args.act == Act::clamped_silu;
  if (clamps && args.gated) clamp_gate<S>(args, gate, passes, n);
  const ActRow<float> words{x, args.gated ? gate : nullptr, gradients ? gradient : nullptr, x,
                            gate};
  if (clamps) {
    const simd::ClampedSwish<S> word{S::set(args.limit), {S::set(args.alpha)}};
    apply<Floats<S>>(word, words, n);
  } else {
    apply_act<Io>(args.act, words, n);
  }
  if (clamps && args.gated && gradients) {
    for (int j = 0; j < n; j += S::kLanes) {
      S::store(gate + j, S::mul(S::load(gate + j), S::load(passes + j)));
    }
  }
  store_row<S>(args.out_dtype, out, 0, x, n);
  if (out_gate != nullptr) store_row<S>(args.out_dtype, out_gate, 0, gate, n);
}

template <class S>
inline constexpr RowKernels kKernels{stats<S>, normalize<S>, normalize_backward<S>, activate<S>};

}  // namespace te_mx::cpu::fused_rows
