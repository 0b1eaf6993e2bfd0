// The f32 vector words of every backend this compiler and CPU have, against scalar double
// arithmetic. Built once for each backend: the build passes -DMXTILE_BACKEND=Portable (Avx2,
// Avx512).
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <vector>

#include "mxtile/simd/activation.hpp"
#include "mxtile/simd/avx2.hpp"
#include "mxtile/simd/avx512.hpp"
#include "mxtile/simd/convert.hpp"
#include "mxtile/simd/cpu.hpp"
#include "mxtile/simd/math.hpp"
#include "mxtile/simd/portable.hpp"
#include "mxtile/simd/transpose.hpp"

using S = mxtile::simd::MXTILE_BACKEND;
using F = S::F;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
int failures = 0;

void check(bool ok, const char* what, double at, double got, double expected) {
  if (ok) return;
  if (++failures <= 20) std::printf("%s(%.9g): got %.9g, expected %.9g\n", what, at, got, expected);
}

float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

uint32_t to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

bool same(float a, float b) { return to_bits(a) == to_bits(b) || (std::isnan(a) && std::isnan(b)); }

// Calls word on all of `in`, a vector at a time.
template <class Word>
std::vector<float> map(const std::vector<float>& in, Word word) {
  std::vector<float> out(in.size());
  for (size_t i = 0; i < in.size(); i += S::kLanes) {
    const int n = static_cast<int>(in.size() - i < S::kLanes ? in.size() - i : S::kLanes);
    S::store_part(&out[i], word(S::load_part(&in[i], n)), n);
  }
  return out;
}

// Every 2^16-th pattern and its neighbours, random patterns, and the usual suspects.
std::vector<float> patterns() {
  std::vector<float> all = {0.0f, -0.0f, 1.0f, -1.0f, kInf, -kInf, kNan, 0x1p-149f, -0x1p-126f};
  uint64_t state = 1;
  for (uint32_t i = 0; i < 0x10000u; ++i) {
    for (uint32_t low : {0u, 0x1000u, 0x7fffu, 0x8000u, 0x8001u})
      all.push_back(from_bits(i << 16 | low));
    state = state * 6364136223846793005u + 1442695040888963407u;
    all.push_back(from_bits(static_cast<uint32_t>(state >> 32)));
  }
  return all;
}

float expected_bf16(float x) {  // rounding of a float to 8 significant bits, by hand in double
  if (std::isnan(x) || std::isinf(x) || x == 0.0f) return x;
  int exponent;
  std::frexp(x, &exponent);
  const int last = std::max(exponent - 8, -133);
  const double rounded =
      std::ldexp(std::nearbyint(std::ldexp(static_cast<double>(x), -last)), last);
  return std::fabs(rounded) >= 0x1p128 ? std::copysign(kInf, x)
                                       : std::copysign(static_cast<float>(rounded), x);
}

float expected_f16(float x) {
  if (std::isnan(x) || std::isinf(x) || x == 0.0f) return x;
  int exponent;
  std::frexp(x, &exponent);
  const int last = std::max(exponent - 11, -24);
  const double rounded =
      std::ldexp(std::nearbyint(std::ldexp(static_cast<double>(x), -last)), last);
  return std::fabs(rounded) >= 65536.0 ? std::copysign(kInf, x)
                                       : std::copysign(static_cast<float>(rounded), x);
}

void test_conversions() {
  const auto in = patterns();
  const auto bf16 =
      map(in, [](F x) { return mxtile::simd::bf16_value<S>(mxtile::simd::bf16_bits<S>(x)); });
  const auto f16 = map(in, [](F x) {
    uint16_t half[S::kLanes];
    S::store_f16(half, x);
    return S::load_f16(half);
  });
  for (size_t i = 0; i < in.size(); ++i) {
    check(same(bf16[i], expected_bf16(in[i])), "bf16", in[i], bf16[i], expected_bf16(in[i]));
    check(same(f16[i], expected_f16(in[i])), "f16", in[i], f16[i], expected_f16(in[i]));
  }
  // Two by two: what even and odd words become is what each becomes alone.
  for (size_t i = 0; i + 2 * S::kLanes <= in.size(); i += 2 * S::kLanes) {
    uint16_t pairs[2 * S::kLanes], again[2 * S::kLanes];
    mxtile::simd::Bf16Pairs<S>::store(pairs, S::load(&in[i]), S::load(&in[i + S::kLanes]));
    const auto back = mxtile::simd::Bf16Pairs<S>::load(pairs);
    float even[S::kLanes], odd[S::kLanes];
    S::store(even, back.even);
    S::store(odd, back.odd);
    for (int l = 0; l < S::kLanes; ++l) {
      check(same(even[l], bf16[i + l]), "even", in[i + l], even[l], bf16[i + l]);
      const size_t o = i + S::kLanes + l;
      check(same(odd[l], bf16[o]), "odd", in[o], odd[l], bf16[o]);
      check(to_bits(even[l]) >> 16 == pairs[2 * l], "even word", l, pairs[2 * l], even[l]);
    }
    mxtile::simd::Bf16Pairs<S>::store(again, back.even, back.odd);
    check(std::memcmp(again, pairs, sizeof pairs) == 0, "pairs again", in[i], 0, 0);
  }
  for (uint32_t h = 0; h < 0x10000u;
       ++h) {  // f16 -> f32 -> f16 keeps every code but signalling NaNs
    uint16_t half[S::kLanes] = {static_cast<uint16_t>(h)}, back[S::kLanes];
    S::store_f16(back, S::load_f16(half));
    const bool nan = (h & 0x7fffu) > 0x7c00u;
    check(back[0] == (nan ? h | 0x200u : h), "f16 code", h, back[0], h);
  }
}

void test_scale2() {
  const auto in = patterns();
  for (int k :
       {-1100, -400, -314, -150, -127, -126, -100, -23, -1, 0, 1, 30, 127, 128, 196, 300, 900}) {
    const auto out = map(in, [k](F x) { return S::scale2(x, S::iset(k)); });
    for (size_t i = 0; i < in.size(); ++i) {
      const float expected = k < -300 ? in[i] * 0.0f
                             : k > 300
                                 ? in[i] * kInf
                                 : static_cast<float>(std::ldexp(static_cast<double>(in[i]), k));
      const bool zero = in[i] == 0.0f;
      check(same(out[i], zero || std::isinf(in[i]) ? in[i] : expected), "scale2", in[i], out[i],
            expected);
    }
  }
}

void test_select() {
  const float values[] = {-1.0f, 0.0f, 2.0f, kNan, kInf};
  for (float a : values) {
    for (float b : values) {
      float out[S::kLanes];
      S::store(out, S::max(S::set(a), S::set(b)));
      check(same(out[0], a > b ? a : b), "max", a, out[0], b);
      S::store(out, S::min(S::set(a), S::set(b)));
      check(same(out[0], a < b ? a : b), "min", a, out[0], b);
      S::store(out, S::select_lt(S::set(a), S::set(b), S::set(3.0f), S::set(4.0f)));
      check(out[0] == (a < b ? 3.0f : 4.0f), "select_lt", a, out[0], b);
    }
  }
}

void test_parts() {
  for (int n = 0; n <= S::kLanes; ++n) {
    float in[S::kLanes + 1], out[S::kLanes + 1];
    uint16_t in16[S::kLanes + 1], out16[S::kLanes + 1];
    for (int i = 0; i <= S::kLanes; ++i) {
      in[i] = i + 1.0f;
      out[i] = -1.0f;
      in16[i] = static_cast<uint16_t>(0x3c00 + i);
      out16[i] = 7;
    }
    S::store(out, S::load_part(in, n));
    for (int i = 0; i < S::kLanes; ++i)
      check(out[i] == (i < n ? in[i] : 0), "load_part", n, out[i], i);
    for (float& x : out) x = -1.0f;
    S::store_part(out, S::load(in), n);
    for (int i = 0; i <= S::kLanes; ++i)
      check(out[i] == (i < n ? in[i] : -1), "store_part", n, out[i], i);
    S::store_u16_part(out16, S::load_u16_part(in16, n), n);
    for (int i = 0; i <= S::kLanes; ++i)
      check(out16[i] == (i < n ? in16[i] : 7), "u16", n, out16[i], i);
    for (uint16_t& x : out16) x = 7;
    S::store_f16_part(out16, S::load_f16_part(in16, n), n);
    for (int i = 0; i <= S::kLanes; ++i)
      check(out16[i] == (i < n ? in16[i] : 7), "f16", n, out16[i], i);
  }
}

double normal_cdf(double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); }

struct Error {
  double worst = 0, at = 0;
  void add(double x, double got, double expected, double allowed) {
    const double error = std::fabs(got - expected) / allowed;
    if (error > worst) worst = error, at = x;
  }
};

// Largest error of word against exact over [low, high], in units of allowed(x, exact(x)).
template <class Word, class Exact, class Allowed>
void sweep(const char* name, float low, float high, Word word, Exact exact, Allowed allowed) {
  std::vector<float> in;
  for (int i = 0; i <= 200000; ++i)
    in.push_back(low + (high - low) * static_cast<float>(i) / 200000.0f);
  for (float x = 0x1p-40f; x < high; x *= 1.37f) in.push_back(x), in.push_back(-x < low ? low : -x);
  const auto out = map(in, word);
  Error error;
  for (size_t i = 0; i < in.size(); ++i) {
    const double e = exact(static_cast<double>(in[i]));
    error.add(in[i], out[i], e, allowed(static_cast<double>(in[i]), e));
  }
  std::printf("  %-18s worst error %.2f of the stated bound, at %.7g\n", name, error.worst,
              error.at);
  check(error.worst <= 1.0, name, error.at, error.worst, 1.0);
}

double ulp(double exact) {
  int exponent;
  std::frexp(exact, &exponent);
  return std::ldexp(1.0, std::max(exponent - 24, -149));
}

void test_math() {
  namespace simd = mxtile::simd;
  const auto two_ulp = [](double, double e) { return 2 * ulp(e); };
  const auto tail = [](double x, double e) {
    return 16 * ulp(e) + (x < -2 ? 4 * x * x * 0x1p-24 * std::fabs(e) : 0.0) + 0x1p-140;
  };
  const auto slope_tail = [](double x, double e) {  // the derivative crosses zero near -0.75
    return 16 * ulp(e) + 4 * 0x1p-24 * std::exp(-x * x / 2) * (1 + x * x * x * x) + 0x1p-140;
  };
  sweep(
      "exp", -103.0f, 88.7f, [](F x) { return simd::exp<S>(x); },
      [](double x) { return std::exp(x); }, two_ulp);
  const double root = std::sqrt(2.0 / 3.14159265358979323846);
  const auto u = [=](double x) { return root * (x + 0.044715 * x * x * x); };
  const auto du = [=](double x) { return root * (1 + 3 * 0.044715 * x * x); };
  sweep(
      "gelu tanh", -20.0f, 20.0f, [](F x) { return simd::GeluTanh<S>::value(x); },
      [=](double x) { return x / (1 + std::exp(-2 * u(x))); }, tail);
  sweep(
      "gelu erf", -20.0f, 20.0f, [](F x) { return simd::GeluErf<S>::value(x); },
      [](double x) { return x * normal_cdf(x); }, tail);
  sweep(
      "dgelu tanh", -20.0f, 20.0f, [](F x) { return simd::GeluTanh<S>::derivative(x); },
      [=](double x) {
        const double s = 1 / (1 + std::exp(-2 * u(x)));
        return s + x * s / (1 + std::exp(2 * u(x))) * 2 * du(x);
      },
      slope_tail);
  sweep(
      "dgelu erf", -20.0f, 20.0f, [](F x) { return simd::GeluErf<S>::derivative(x); },
      [](double x) { return normal_cdf(x) + x * std::exp(-x * x / 2) * 0.39894228040143268; },
      slope_tail);
  const std::vector<float> ends = {kNan, kInf, 1e30f, -1e30f, 0.0f, -0.0f};
  const auto exps = map(ends, [](F x) { return simd::exp<S>(x); });
  const auto tanh = map(ends, [](F x) { return simd::GeluTanh<S>::value(x); });
  const auto erf = map(ends, [](F x) { return simd::GeluErf<S>::value(x); });
  const auto slope = map(ends, [](F x) { return simd::GeluTanh<S>::derivative(x); });
  const float exp_ends[] = {kNan, kInf, kInf, 0.0f, 1.0f, 1.0f};
  const float gelu_ends[] = {kNan, kInf, 1e30f, -0.0f, 0.0f, -0.0f};
  const float slope_ends[] = {kNan, 1.0f, 1.0f, 0.0f, 0.5f, 0.5f};
  for (size_t i = 0; i < ends.size(); ++i) {
    check(same(exps[i], exp_ends[i]), "exp end", ends[i], exps[i], exp_ends[i]);
    check(same(tanh[i], gelu_ends[i]), "gelu tanh end", ends[i], tanh[i], gelu_ends[i]);
    check(same(erf[i], gelu_ends[i]), "gelu erf end", ends[i], erf[i], gelu_ends[i]);
    check(slope[i] == slope_ends[i] || std::isnan(ends[i]), "slope end", ends[i], slope[i],
          slope_ends[i]);
  }
}

void test_activations() {
  namespace simd = mxtile::simd;
  const auto four_ulp = [](double, double e) { return 4 * ulp(e) + 0x1p-140; };
  const auto sigmoid = [](double x) { return 1 / (1 + std::exp(-x)); };
  sweep(
      "sigmoid", -80.0f, 80.0f, [](F x) { return simd::SigmoidWord<S>{}.value(x); }, sigmoid,
      four_ulp);
  sweep(
      "dsigmoid", -40.0f, 40.0f, [](F x) { return simd::SigmoidWord<S>{}.derivative(x); },
      [=](double x) { return sigmoid(x) * sigmoid(-x); },
      [](double, double e) { return 6 * ulp(e); });
  const float alpha = 1.702f;
  // alpha x is rounded before the exponential, which makes x * alpha ulp of it.
  const auto product = [=](double x, double e) {
    return (6 + std::fabs(alpha * x)) * ulp(e) + 0x1p-140;
  };
  sweep(
      "swish", -40.0f, 40.0f, [=](F x) { return simd::Swish<S>{S::set(alpha)}.value(x); },
      [=](double x) { return x * sigmoid(alpha * x); }, product);
  sweep(
      "dswish", -20.0f, 20.0f, [=](F x) { return simd::Swish<S>{S::set(alpha)}.derivative(x); },
      [=](double x) {
        const double u = alpha * x, s = sigmoid(u);
        return s + u * s * sigmoid(-u);
      },
      [=](double x, double e) {  // crosses zero near -0.75
        return 8 * ulp(e) + 16 * 0x1p-24 * sigmoid(alpha * x) * (1 + x * x);
      });

  const std::vector<float> ends = {kNan, kInf, 2.0f, -2.0f, 1.5f, 0.0f};
  const simd::ClampedSwish<S> clamped{S::set(1.5f), {S::set(1.0f)}};
  const auto relu = map(ends, [](F x) { return simd::Relu<S>{}.value(x); });
  const auto step = map(ends, [](F x) { return simd::Relu<S>{}.derivative(x); });
  const auto square = map(ends, [](F x) { return simd::SquaredRelu<S>{}.value(x); });
  const auto twice = map(ends, [](F x) { return simd::SquaredRelu<S>{}.derivative(x); });
  const auto limited = map(ends, [&](F x) { return clamped.value(x); });
  const auto slope = map(ends, [&](F x) { return clamped.derivative(x); });
  const float relus[] = {kNan, kInf, 2.0f, 0.0f, 1.5f, 0.0f};
  const float steps[] = {0.0f, 1.0f, 1.0f, 0.0f, 1.0f, 0.0f};
  const float squares[] = {kNan, kInf, 4.0f, 0.0f, 2.25f, 0.0f};
  const float twices[] = {kNan, kInf, 4.0f, 0.0f, 3.0f, 0.0f};
  for (size_t i = 0; i < ends.size(); ++i) {
    check(same(relu[i], relus[i]), "relu", ends[i], relu[i], relus[i]);
    check(same(step[i], steps[i]), "drelu", ends[i], step[i], steps[i]);
    check(same(square[i], squares[i]), "relu^2", ends[i], square[i], squares[i]);
    check(same(twice[i], twices[i]), "drelu^2", ends[i], twice[i], twices[i]);
  }
  check(std::isnan(limited[0]), "clamped swish", ends[0], limited[0], kNan);
  check(limited[1] == limited[4] && limited[2] == limited[4], "clamped swish", 2, limited[2],
        limited[4]);
  check(slope[1] == 0.0f && slope[2] == 0.0f && slope[4] > 1.0f, "dclamped swish", 2, slope[2], 0);
}

// Numbers of many sizes, so that another order of additions has other bits.
void test_squares() {
  constexpr int kLanes = S::kLanes;
  float in[kLanes][kLanes], out[kLanes];
  uint32_t state = 1;
  F x[kLanes], turned[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    for (int j = 0; j < kLanes; ++j) {
      state = state * 1664525u + 1013904223u;
      in[i][j] = std::ldexp(static_cast<float>(static_cast<int32_t>(state)),
                            -static_cast<int>(state >> 8) % 40);
    }
    x[i] = turned[i] = S::load_part(in[i], kLanes);
  }
  mxtile::simd::transpose<S>(turned);
  for (int i = 0; i < kLanes; ++i) {
    S::store_part(out, turned[i], kLanes);
    for (int j = 0; j < kLanes; ++j)
      check(same(out[j], in[j][i]), "transpose", i, out[j], in[j][i]);
  }
  S::store_part(out, mxtile::simd::row_sums<S>(x), kLanes);
  for (int i = 0; i < kLanes; ++i) {
    for (int half = kLanes / 2; half > 0; half /= 2) {
      for (int j = 0; j < half; ++j) in[i][j] += in[i][j + half];
    }
    check(same(out[i], in[i][0]), "row_sums", i, out[i], in[i][0]);
  }
}

}  // namespace

int run() {  // by main.cpp
  const mxtile::CpuFeatures cpu = mxtile::cpu_features();
  if ((S::kLanes == 8 && !cpu.avx2) || (S::kLanes == 16 && !cpu.avx512)) {
    std::printf("skipped: this CPU has no such vectors\n");
    return 0;
  }
  test_conversions();
  test_scale2();
  test_select();
  test_parts();
  test_math();
  test_activations();
  test_squares();
  std::printf(failures == 0 ? "ok\n" : "%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
