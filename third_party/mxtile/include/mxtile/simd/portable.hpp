// The f32 vector words in plain C++ for any CPU: four lanes, which compilers map to SSE2 or NEON.
//
// Every backend (Portable, Avx2, Avx512) is a struct of static words with one interface:
//   kLanes, F (floats), I (32-bit integers), load/store[_part], arithmetic, integer bits, select,
//   scale2.
// x_part(p, n) touches only the first n elements; lanes past them read as zero.
#pragma once

#include <cstdint>
#include <cstring>

#define MXTILE_WORD [[gnu::always_inline]] static inline
#define MXTILE_MEMBER [[gnu::always_inline]] inline

namespace mxtile::simd {

struct Portable {
  static constexpr int kLanes = 4;
  using F = float __attribute__((vector_size(16)));
  using I = int32_t __attribute__((vector_size(16)));
  using U = uint32_t __attribute__((vector_size(16)));

  MXTILE_WORD F set(float x) { return F{x, x, x, x}; }
  MXTILE_WORD I iset(int32_t x) { return I{x, x, x, x}; }
  MXTILE_WORD F as_float(I x) { return reinterpret_cast<F>(x); }
  MXTILE_WORD I as_int(F x) { return reinterpret_cast<I>(x); }

  MXTILE_WORD F load(const float* p) { return load_part(p, kLanes); }
  MXTILE_WORD void store(float* p, F x) { std::memcpy(p, &x, sizeof x); }
  MXTILE_WORD F load_part(const float* p, int n) {
    F x{};
    std::memcpy(&x, p, static_cast<size_t>(n) * sizeof(float));
    return x;
  }
  MXTILE_WORD void store_part(float* p, F x, int n) {
    std::memcpy(p, &x, static_cast<size_t>(n) * sizeof(float));
  }

  MXTILE_WORD F add(F a, F b) { return a + b; }
  MXTILE_WORD F sub(F a, F b) { return a - b; }
  MXTILE_WORD F mul(F a, F b) { return a * b; }
  MXTILE_WORD F div(F a, F b) { return a / b; }
  // 1 / x of 2^-100 < |x| < 2^100 within an ulp.
  MXTILE_WORD F reciprocal(F x) { return div(set(1.0f), x); }
  // a * b + c; rounded once where the CPU has such an instruction.
  MXTILE_WORD F fma(F a, F b, F c) {
#if defined(__FP_FAST_FMAF)
    for (int i = 0; i < kLanes; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
  }
  // a > b ? a : b, so b when either is NaN (what maxps does); min likewise.
  MXTILE_WORD F max(F a, F b) { return select_lt(b, a, a, b); }
  MXTILE_WORD F min(F a, F b) { return select_lt(a, b, a, b); }
  MXTILE_WORD F select_lt(F a, F b, F x, F y) {
    return as_float(pick(a < b, as_int(x), as_int(y)));
  }

  // Wrapping around, as the instructions do: signed overflow is undefined in C++.
  MXTILE_WORD I iadd(I a, I b) {
    return reinterpret_cast<I>(reinterpret_cast<U>(a) + reinterpret_cast<U>(b));
  }
  MXTILE_WORD I isub(I a, I b) {
    return reinterpret_cast<I>(reinterpret_cast<U>(a) - reinterpret_cast<U>(b));
  }
  MXTILE_WORD I iand(I a, I b) { return a & b; }
  MXTILE_WORD I ior(I a, I b) { return a | b; }
  template <int N>
  MXTILE_WORD I shl(I a) {
    return a << N;
  }
  template <int N>
  MXTILE_WORD I shr(I a) {  // logical
    return reinterpret_cast<I>(reinterpret_cast<U>(a) >> N);
  }
  template <int N>
  MXTILE_WORD I sar(I a) {  // arithmetic
    return a >> N;
  }
  // a > b ? x : y on signed integers.
  MXTILE_WORD I select_gt(I a, I b, I x, I y) { return pick(a > b, x, y); }

  MXTILE_WORD I load_u8(const uint8_t* p) { return I{p[0], p[1], p[2], p[3]}; }
  MXTILE_WORD I load_u16(const uint16_t* p) { return I{p[0], p[1], p[2], p[3]}; }
  MXTILE_WORD I load_u16_part(const uint16_t* p, int n) {
    I x{};
    for (int i = 0; i < n; ++i) x[i] = p[i];
    return x;
  }
  // The low 16 bits of each lane.
  MXTILE_WORD void store_u16(uint16_t* p, I x) { store_u16_part(p, x, kLanes); }
  MXTILE_WORD void store_u16_part(uint16_t* p, I x, int n) {
    for (int i = 0; i < n; ++i) p[i] = static_cast<uint16_t>(x[i]);
  }
  MXTILE_WORD F load_f16(const uint16_t* p) { return load_f16_part(p, kLanes); }
  MXTILE_WORD F load_f16_part(const uint16_t* p, int n) {
    F x{};
    for (int i = 0; i < n; ++i) x[i] = half_to_float(p[i]);
    return x;
  }
  MXTILE_WORD void store_f16(uint16_t* p, F x) { store_f16_part(p, x, kLanes); }
  MXTILE_WORD void store_f16_part(uint16_t* p, F x, int n) {
    for (int i = 0; i < n; ++i) p[i] = float_to_half(x[i]);
  }

  // low = a0 b0 a1 b1 .., high = the same of the upper halves.
  MXTILE_WORD void zip(F a, F b, F& low, F& high) {
    low = F{a[0], b[0], a[1], b[1]};
    high = F{a[2], b[2], a[3], b[3]};
  }

  // x * 2^k rounded once, for every k: a double holds every x * 2^k with |k| <= 800 exactly, and
  // beyond that any x has long left the range of floats.
  MXTILE_WORD F scale2(F x, I k) {
    for (int i = 0; i < kLanes; ++i) {
      const int64_t limited = k[i] < -800 ? -800 : k[i] > 800 ? 800 : k[i];
      const int64_t bits = (limited + 1023) << 52;
      double power;
      std::memcpy(&power, &bits, sizeof power);
      x[i] = static_cast<float>(static_cast<double>(x[i]) * power);
    }
    return x;
  }

 private:
  MXTILE_WORD I pick(I mask, I x, I y) { return (mask & x) | (~mask & y); }
  MXTILE_WORD float half_to_float(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
    const uint32_t magnitude = h & 0x7fffu;
    uint32_t bits;
    if (magnitude < 0x400u) {
      const float subnormal = static_cast<float>(magnitude) * 0x1p-24f;
      std::memcpy(&bits, &subnormal, sizeof bits);
    } else {
      bits = (magnitude << 13) + (112u << 23);
      if (magnitude >= 0x7c00u) bits |= 0x7f800000u;
      if (magnitude > 0x7c00u) bits |= 0x400000u;
    }
    bits |= sign;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
  }
  MXTILE_WORD uint16_t float_to_half(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
      magnitude = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
    } else if (magnitude >= 0x477ff000u) {  // 65520 and more round to infinity
      magnitude = 0x7c00u;
    } else if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 rounds to a multiple of 2^-24
      float y;
      std::memcpy(&y, &magnitude, sizeof y);
      y += 0.5f;
      std::memcpy(&magnitude, &y, sizeof y);
      magnitude -= 0x3f000000u;
    } else {
      magnitude += 0xfffu + ((magnitude >> 13) & 1u);
      magnitude = (magnitude - (112u << 23)) >> 13;
    }
    return static_cast<uint16_t>(sign | magnitude);
  }
};

}  // namespace mxtile::simd
