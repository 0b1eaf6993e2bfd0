// mx/ and the portable quantization words, against arithmetic in double.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "mxtile/mx/code.hpp"
#include "mxtile/mx/round.hpp"
#include "mxtile/mx/scale.hpp"
#include "mxtile/quant/decode_portable.hpp"
#include "mxtile/quant/portable.hpp"

namespace mx = mxtile::mx;
namespace quant = mxtile::quant;

namespace {

int failures = 0;

void check(bool ok, const char* what, uint32_t a, uint32_t b) {
  if (ok) return;
  if (++failures <= 20) std::printf("FAILED %s: %08x %08x\n", what, a, b);
}

// The value of finite fp32 bits, without meeting an fp32 subnormal.
double value(uint32_t bits) {
  const int exponent = static_cast<int>((bits >> 23) & 255);
  const double significand = (bits & 0x7FFFFF) + (exponent ? 8388608.0 : 0.0);
  const double magnitude = std::ldexp(significand, (exponent ? exponent : 1) - 150);
  return bits >> 31 ? -magnitude : magnitude;
}

// The table of elements against the values of its codes.
void elements() {
  const char* const names[] = {"e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz", "e3m2", "e2m3", "e2m1"};
  for (uint32_t i = 0; i < mx::kElements; ++i) {
    const mx::ElementTraits& t = mx::kElementTraits[i];
    const int sign = 1 << (t.exponent_bits + t.mantissa_bits);
    const int field = t.max_code >> t.mantissa_bits,
              mantissa = t.max_code - (field << t.mantissa_bits);
    const double max = std::ldexp(1 + std::ldexp(mantissa, -t.mantissa_bits), field - t.bias);
    check(std::strcmp(t.name, names[i]) == 0 && sign <= 128, "name, bits", i, sign);
    check(field > 0 && max == t.max, "max", i, t.max_code);
    // What is left above the largest value: Inf, then NaNs.
    const int above = sign - 1 - t.max_code;
    check(above >= (t.has_infinity ? 2 : 0), "room for Inf and a NaN", i, above);
    const int nan = above > 0 ? sign - 1 : t.has_negative_zero ? mx::kNoCode : sign;
    check(t.nan_code == nan, "nan", i, t.nan_code);
  }
  static_assert(mx::E4M3::kMaxExponent == 8 && mx::E5M2::kMaxExponent == 15);
  static_assert(mx::E4M3::kBits == 8 && mx::E4M3::kMaxCode == 0x7E && mx::E5M2::kMaxCode == 0x7B);
}

// The definition: exponent of fp32(amax * fp32(1/max)), up.
template <class F>
uint32_t rceil_by_product(uint32_t amax) {
  const float inverse = static_cast<float>(1 / F::kTraits.max);
  const double product = value(amax) * static_cast<double>(inverse);  // exact: 48 bits
  const int unit = product < std::ldexp(1.0, -126) ? -149 : std::ilogb(product) - 23;
  const double q = std::ldexp(std::nearbyint(std::ldexp(product, -unit)), unit);  // fp32
  if (q < std::ldexp(1.0, -126)) return q > std::ldexp(1.0, -127) ? 1 : 0;
  const int exponent = std::ilogb(q);
  return static_cast<uint32_t>(exponent + 127 + (q != std::ldexp(1.0, exponent)));
}

template <class F>
void scales() {
  for (uint32_t exponent = 0; exponent < 255; ++exponent) {
    for (uint32_t top = 0; top < 2048; ++top) {
      const uint32_t around = exponent << 23 | top << 12;
      for (uint32_t amax : {around, around + 1, around + 2, around + 0xFFF}) {
        const uint32_t up = mx::scale_byte<F>(amax, mx::Rule::rceil);
        check(up == rceil_by_product<F>(amax), "rceil", amax, up);
        const double low = value(amax) > 0 ? std::ilogb(value(amax)) - F::kMaxExponent + 127 : 0;
        const uint32_t down = mx::scale_byte<F>(amax, mx::Rule::floor);
        check(down == (low > 0 ? low : 0), "floor", amax, down);
        const double two_bits = std::ldexp(value(amax), 1 - std::ilogb(value(amax)));  // [2, 4)
        const double near = exponent > 0 && two_bits >= 3.5 ? low + 1 : low;
        const uint32_t even = mx::scale_byte<F>(amax, mx::Rule::even);
        check(even == (near > 0 ? near : 0), "even", amax, even);
      }
    }
  }
  for (mx::Rule rule : {mx::Rule::rceil, mx::Rule::floor, mx::Rule::even}) {
    check(mx::scale_byte<F>(mx::kF32Inf, rule) == 255, "inf", 0, 0);
    check(mx::scale_byte<F>(mx::kF32Nan, rule) == 255, "nan", 0, 0);
  }
}

// Decoding against ldexp, and encoding against the nearest of the decoded values, ties to the even
// code.
template <class F>
void codes() {
  double values[128];
  for (uint32_t code = 0; code <= F::kMaxCode; ++code) {
    const uint32_t field = code >> F::kMantissaBits;
    const double mantissa = code & ((1u << F::kMantissaBits) - 1);
    const double significand = mantissa + (field ? 1 << F::kMantissaBits : 0);
    values[code] =
        std::ldexp(significand, static_cast<int>(field ? field : 1) - F::kBias - F::kMantissaBits);
    for (uint32_t byte = 0; byte < 255; ++byte) {
      const double exact = std::ldexp(values[code], static_cast<int>(byte) - 127);
      const uint32_t bits = mx::decode<F>(static_cast<uint8_t>(code), byte);
      const bool overflows = exact >= std::ldexp(1.0, 128);
      check(overflows ? bits == mx::kF32Inf : value(bits) == exact, "decode", code, byte);
      const uint32_t negative = mx::decode<F>(static_cast<uint8_t>(code | F::kSign), byte);
      check(negative == (bits | 0x80000000), "decode sign", code, byte);
      check(quant::decode_any<F>(static_cast<uint8_t>(code), byte) == bits, "decode_any", code,
            byte);
    }
    check(mx::decode<F>(static_cast<uint8_t>(code), 255) == mx::kF32Nan, "decode 255", code, 255);
  }
  for (uint32_t code = F::kMaxCode + 1; code < F::kSign; ++code) {
    const uint32_t want = F::kHasInfinity && code == F::kMaxCode + 1 ? mx::kF32Inf : mx::kF32Nan;
    check(mx::decode<F>(static_cast<uint8_t>(code), 127) == want, "special code", code, want);
  }
  for (uint32_t byte : {0u, 1u, 3u, 20u, 21u, 100u, 127u, 128u, 200u, 247u}) {
    for (uint32_t code = 0; code < F::kMaxCode; ++code) {
      const double middle = (values[code] + values[code + 1]) / 2;
      const double unit = std::ldexp(1.0, static_cast<int>(byte) - 127);
      const uint32_t even = code + (code & 1);
      const struct {
        double y;
        uint32_t want;
      } cases[] = {{values[code], code}, {middle, even}};
      for (const auto& c : cases) {
        const double x = c.y * unit;
        if (x >= std::ldexp(1.0, 128) || (x != 0 && x < std::ldexp(1.0, -126))) continue;
        const uint32_t bits = mx::as_bits(static_cast<float>(x));
        check(mx::encode<F>(bits, byte) == c.want, "encode", bits, byte);
        check(mx::encode<F>(bits | 0x80000000, byte) == (c.want | F::kSign), "encode sign", bits,
              byte);
        if (c.want == even && c.y == middle) {
          check(mx::encode<F>(bits - 1, byte) == code, "below a tie", bits, byte);
          check(mx::encode<F>(bits + 1, byte) == code + 1, "above a tie", bits, byte);
        }
        if (byte < 21) continue;
        for (uint32_t b : {bits - (bits != 0), bits, bits + 1}) {
          check(quant::encode_fast<F>(b, quant::multiplier(byte)) == mx::encode<F>(b, byte),
                "encode_fast", b, byte);
        }
      }
    }
  }
  check(mx::encode<F>(mx::as_bits(3e38f), 100) == F::kMaxCode, "saturation", 0, 0);
  const uint32_t nan = F::kTraits.nan_code == mx::kNoCode ? 0 : F::kNanCode;
  check(mx::encode<F>(0, 255) == nan, "nan block", 0, 0);
}

void halves() {
  for (uint32_t h = 0; h < 65536; ++h) {
    const uint32_t f = mx::f16_to_f32(static_cast<uint16_t>(h));
    const uint32_t exponent = (h >> 10) & 31, mantissa = h & 1023;
    if (exponent == 31) {
      check((f & 0x7FFFFFFF) >= mx::kF32Inf, "fp16 special", h, f);
      check(mx::f32_to_f16(f) == (mantissa ? (h & 0x8000) | 0x7E00 : h), "fp16 special back", h, f);
      continue;
    }
    const double want = std::ldexp(mantissa + (exponent ? 1024.0 : 0.0),
                                   static_cast<int>(exponent ? exponent : 1) - 25);
    check(value(f) == (h >> 15 ? -want : want), "fp16 to fp32", h, f);
    check(mx::f32_to_f16(f) == h, "fp32 to fp16", f, h);
    if (exponent == 30 && mantissa == 1023) continue;
    // Halfway to the next magnitude, and one ulp to either side.
    const double above = value(mx::f16_to_f32(static_cast<uint16_t>((h & 0x7FFF) + 1)));
    const uint32_t tie = mx::as_bits(static_cast<float>((want + above) / 2));
    const uint32_t a = h & 0x7FFF;
    check(mx::f32_to_f16(tie) == a + (a & 1), "fp16 tie", tie, a);
    check(mx::f32_to_f16(tie - 1) == a, "fp16 below", tie, a);
    check(mx::f32_to_f16(tie + 1) == a + 1, "fp16 above", tie, a);
  }
  check(mx::f32_to_f16(0x477FEFFF) == 0x7BFF && mx::f32_to_f16(0x477FF000) == 0x7C00, "fp16 top", 0,
        0);
  for (uint32_t h = 0; h < 65536; ++h) {
    const uint32_t f = h << 16;
    if ((f & 0x7FFFFFFF) > mx::kF32Inf) {
      check(mx::f32_to_bf16(f) == ((h & 0x8000) | 0x7FC0), "bf16 nan", f, h);
      continue;
    }
    check(mx::f32_to_bf16(f) == h, "bf16", f, h);
    if ((f & 0x7FFFFFFF) == mx::kF32Inf) continue;
    check(mx::f32_to_bf16(f + 0x7FFF) == h, "bf16 below", f, h);
    check(mx::f32_to_bf16(f + 0x8000) == h + (h & 1), "bf16 tie", f, h);
    check(mx::f32_to_bf16(f + 0x8001) == h + 1, "bf16 above", f, h);
  }
}

}  // namespace

int run() {  // by main.cpp
  elements();
  scales<mx::E4M3>();
  scales<mx::E5M2>();
  scales<mx::E2M1>();
  codes<mx::E4M3>();
  codes<mx::E5M2>();
  codes<mx::E2M1>();
  halves();
  std::printf(failures ? "%d failures\n" : "mx: all checks passed\n", failures);
  return failures != 0;
}
