// Decoding codes with fp32 scales in plain loops, compiled once for every instruction set:
// compilers make vectors of them. Everything here has internal linkage: several files compile it
// with different flags.
#pragma once

#include <cstdint>

#include "mxtile/mx/element.hpp"
#include "mxtile/mx/round.hpp"
#include "quantize/dequantize_blockwise.hpp"

namespace te_mx::cpu::dequantize_wide {
namespace {

namespace mx = mxtile::mx;

constexpr int kRun = static_cast<int>(kWideBlock);

// The fp32 value of a code. No operand is subnormal, and no choice is a branch: conditions select
// by masks, for vectors.
template <class F>
inline uint32_t value_of(uint8_t code) {
  constexpr float kSmallest = [] {  // the smallest subnormal
    float step = 1;
    for (int i = 0; i < F::kBias - 1 + F::kMantissaBits; ++i) step /= 2;
    return step;
  }();
  const int32_t a = code & 0x7F;
  const uint32_t normal = (static_cast<uint32_t>(a) << (23 - F::kMantissaBits)) +
                          (static_cast<uint32_t>(127 - F::kBias) << 23);
  const uint32_t small = mx::as_bits(static_cast<float>(a) * kSmallest);
  const uint32_t is_small = static_cast<uint32_t>((a - (1 << F::kMantissaBits)) >> 31);
  uint32_t bits = normal ^ ((normal ^ small) & is_small);
  if constexpr (F::kMaxCode < 0x7F) {
    constexpr int32_t kFirstNan = static_cast<int32_t>(F::kMaxCode) + (F::kHasInfinity ? 2 : 1);
    if constexpr (F::kHasInfinity) {
      const uint32_t above = static_cast<uint32_t>((kFirstNan - 2 - a) >> 31);
      bits = (bits & ~above) | (mx::kF32Inf & above);
    }
    const uint32_t is_nan = static_cast<uint32_t>((kFirstNan - 1 - a) >> 31);
    bits = (bits & ~is_nan) | (mx::kF32Nan & is_nan);
  }
  const uint32_t sign = static_cast<uint32_t>(code & 0x80) << 24;
  if constexpr (!F::kHasNegativeZero) {  // whose code is the NaN
    const uint32_t is_zero = static_cast<uint32_t>((a - 1) >> 31) & (0u - (sign >> 31));
    bits |= mx::kF32Nan & is_zero;
  }
  return bits | sign;
}

// fp32 bits to fp16 without branches; as mx::f32_to_f16.
inline uint16_t to_f16(uint32_t f) {
  constexpr uint32_t kOverflow = 0x477FF000;  // from here on numbers round to Inf
  const uint32_t a = f & 0x7FFFFFFF;
  const uint32_t normal = (a - (112u << 23) + 0xFFF + ((a >> 13) & 1)) >> 13;
  // 2^-14 and less: a sum rounds it to a multiple of 2^-24.
  const uint32_t small = mx::as_bits(mx::as_float(a) + 0.5f) - mx::as_bits(0.5f);
  const uint32_t is_small = static_cast<uint32_t>((static_cast<int32_t>(a) - (113 << 23)) >> 31);
  const uint32_t above =
      static_cast<uint32_t>((static_cast<int32_t>(kOverflow - 1) - static_cast<int32_t>(a)) >> 31);
  const uint32_t is_nan =
      static_cast<uint32_t>((static_cast<int32_t>(mx::kF32Inf) - static_cast<int32_t>(a)) >> 31);
  uint32_t h = normal ^ ((normal ^ small) & is_small);
  h = (h & ~above) | (0x7C00u & above) | (0x200u & is_nan);
  return static_cast<uint16_t>(h | (f >> 16 & 0x8000));
}

inline uint16_t to_bf16(uint32_t f) {
  const uint32_t a = f & 0x7FFFFFFF;
  const uint32_t is_nan =
      static_cast<uint32_t>((static_cast<int32_t>(mx::kF32Inf) - static_cast<int32_t>(a)) >> 31);
  const uint32_t rounded = (f + 0x7FFF + ((f >> 16) & 1)) >> 16;
  const uint32_t nan = (f >> 16 & 0x8000) | 0x7FC0;
  return static_cast<uint16_t>(rounded ^ ((rounded ^ nan) & is_nan));
}

template <DType D>
inline void put(void* out, int64_t i, uint32_t value) {
  if constexpr (D == DType::f32) {
    static_cast<uint32_t*>(out)[i] = value;
  } else {
    static_cast<uint16_t*>(out)[i] = D == DType::bf16 ? to_bf16(value) : to_f16(value);
  }
}

template <DType D, class F, bool kEach>
inline void decode_run(const Run& run, int64_t begin, int n) {
  const float one = run.scales[kEach ? begin : begin / kRun];
  for (int i = 0; i < n; ++i) {
    const float scale = kEach ? run.scales[begin + i] : one;
    const uint32_t value = value_of<F>(run.codes[begin + i]);
    put<D>(run.out, begin + i, mx::as_bits(mx::as_float(value) * scale));
  }
}

template <DType D, class F>
void decode(const Run& run) {
  int64_t begin = 0;
  for (; begin + kRun <= run.n; begin += kRun) {
    run.each ? decode_run<D, F, true>(run, begin, kRun) : decode_run<D, F, false>(run, begin, kRun);
  }
  const int rest = static_cast<int>(run.n - begin);
  if (rest == 0) return;
  run.each ? decode_run<D, F, true>(run, begin, rest) : decode_run<D, F, false>(run, begin, rest);
}

template <DType D>
RunKernel choose(Element element) {
  switch (element) {
    case Element::e4m3:
      return decode<D, mx::E4M3>;
    case Element::e5m2:
      return decode<D, mx::E5M2>;
    case Element::e4m3fnuz:
      return decode<D, mx::E4M3FNUZ>;
    default:
      return decode<D, mx::E5M2FNUZ>;
  }
}

RunKernel choose(DType dtype, Element element) {
  if (dtype == DType::f32) return choose<DType::f32>(element);
  return dtype == DType::bf16 ? choose<DType::bf16>(element) : choose<DType::f16>(element);
}

}  // namespace
}  // namespace te_mx::cpu::dequantize_wide
