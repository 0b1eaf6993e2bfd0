// The emulated tiles against the definition of TDPBF16PS, and against the CPU's own tiles where it
// has them: every bit of products that meet denormals, overflow, NaN and rounding ties.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "mxtile/amx/emulated.hpp"
#include "mxtile/simd/cpu.hpp"
#if defined(__AMX_BF16__) || defined(__AMXBF16__)  // gcc and later clang, clang before 15
#define MXTILE_TEST_HARDWARE 1
#include "mxtile/amx/tiles.hpp"
#endif

namespace {

int failures = 0;

void check(bool ok, const char* what, int at) {
  if (ok) return;
  if (++failures <= 20) std::printf("%s fails at %d\n", what, at);
}

uint32_t state = 1;
uint32_t random_bits() {
  state ^= state << 13;
  state ^= state >> 17;
  state ^= state << 5;
  return state;
}

uint16_t to_bf16(float x) {  // exact for the values used here
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>(bits >> 16);
}

struct Problem {
  uint16_t a[16][32];     // rows, k
  uint16_t b[16][16][2];  // k pairs, columns
  float c[16][16];
};

template <class Tiles>
void multiply(Problem& p, int columns) {
  Tiles tiles(columns);
  const int64_t stride = 64;
  tiles.template load<3>(p.c, stride);
  tiles.template load<5>(p.a, stride);
  tiles.template load<7>(p.b, stride);
  tiles.template dot_bf16<3, 5, 7>();
  tiles.template store<3>(p.c, stride);
}

// Integers small enough that every order of summation is exact.
void test_integers() {
  Problem p{};
  for (auto& row : p.a) {
    for (auto& x : row) x = to_bf16(static_cast<float>(static_cast<int>(random_bits() % 17) - 8));
  }
  for (auto& pair : p.b) {
    for (auto& x : pair) {
      for (auto& y : x) y = to_bf16(static_cast<float>(static_cast<int>(random_bits() % 17) - 8));
    }
  }
  for (auto& row : p.c) {
    for (auto& x : row) x = static_cast<float>(random_bits() % 100);
  }
  const Problem before = p;
  multiply<mxtile::amx::EmulatedTiles>(p, 16);
  const auto value = [](uint16_t word) {
    const uint32_t bits = static_cast<uint32_t>(word) << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
  };
  for (int m = 0; m < 16; ++m) {
    for (int n = 0; n < 16; ++n) {
      float sum = before.c[m][n];
      for (int k = 0; k < 32; ++k) sum += value(before.a[m][k]) * value(before.b[k / 2][n][k % 2]);
      check(p.c[m][n] == sum, "integer product", m * 16 + n);
    }
  }
}

// Denormal operands and results count as zeros; even and odd k meet only at the end.
void test_rules() {
  Problem p{};
  p.a[0][0] = 0x0040;  // 2^-127: a denormal bf16
  p.b[0][0][0] = to_bf16(std::ldexp(1.0f, 100));
  p.a[1][0] = to_bf16(std::ldexp(1.0f, -70));
  p.b[0][1][0] = to_bf16(std::ldexp(1.0f, -70));  // product 2^-140
  p.a[2][0] = p.a[2][1] = p.a[2][2] = to_bf16(1.0f);
  p.b[0][2][0] = to_bf16(std::ldexp(1.0f, 60));
  p.b[0][2][1] = to_bf16(1.0f);
  p.b[1][2][0] = to_bf16(std::ldexp(-1.0f, 60));
  p.c[3][3] = std::ldexp(1.0f, -130);
  // Even k: -2^160 overflows, and 2^200, a number, cannot undo that.
  p.a[4][0] = to_bf16(std::ldexp(-1.0f, 80)), p.a[4][2] = to_bf16(std::ldexp(1.0f, 100));
  p.b[0][4][0] = to_bf16(std::ldexp(1.0f, 80)), p.b[1][4][0] = to_bf16(std::ldexp(1.0f, 100));
  multiply<mxtile::amx::EmulatedTiles>(p, 16);
  check(p.c[0][0] == 0.0f, "denormal operand", 0);
  check(p.c[1][1] == 0.0f, "denormal product", 1);
  check(p.c[2][2] == 1.0f, "even and odd sums", 2);
  check(p.c[3][3] == 0.0f, "denormal accumulator", 3);
  check(p.c[4][4] == -HUGE_VALF, "overflow before overflow", 4);
}

void test_narrow_tiles() {
  Problem p{};
  for (auto& row : p.a) row[0] = to_bf16(1.0f);
  for (int n = 0; n < 16; ++n) p.b[0][n][0] = to_bf16(2.0f);
  for (auto& row : p.c) {
    for (auto& x : row) x = 5.0f;
  }
  multiply<mxtile::amx::EmulatedTiles>(p, 3);
  for (int n = 0; n < 16; ++n) check(p.c[7][n] == (n < 3 ? 7.0f : 5.0f), "narrow tile", n);
}

#if defined(MXTILE_TEST_HARDWARE)
void test_against_hardware() {
  if (!mxtile::cpu_features().amx_bf16 || !mxtile::request_amx()) return;
  for (int round = 0; round < 200; ++round) {
    Problem p;
    // Exponents around 1 at first, then all of them, denormals, Inf and NaN included.
    const uint32_t mask = round % 2 == 0 ? 0x83FFu : 0xFFFFu, base = round % 2 == 0 ? 0x3C00u : 0;
    for (auto& row : p.a) {
      for (auto& x : row) x = static_cast<uint16_t>((random_bits() & mask) + base);
    }
    for (auto& pair : p.b) {
      for (auto& x : pair) {
        for (auto& y : x) y = static_cast<uint16_t>((random_bits() & mask) + base);
      }
    }
    for (auto& row : p.c) {
      for (auto& x : row) x = static_cast<float>(random_bits() % 1000);
    }
    Problem q = p;
    const int columns = round % 16 + 1;
    multiply<mxtile::amx::EmulatedTiles>(p, columns);
    multiply<mxtile::amx::Tiles>(q, columns);
    for (int i = 0; i < 256; ++i) {
      const float x = p.c[i / 16][i % 16], y = q.c[i / 16][i % 16];
      const bool same = std::memcmp(&x, &y, 4) == 0 || (std::isnan(x) && std::isnan(y));
      check(same, "hardware tile", round * 256 + i);
    }
  }
}
#endif

}  // namespace

int run() {  // by main.cpp
#if defined(__AVX512F__)
  if (!mxtile::cpu_features().avx512) return 0;  // built for more than this CPU has
#endif
  test_integers();
  test_rules();
  test_narrow_tiles();
#if defined(MXTILE_TEST_HARDWARE)
  test_against_hardware();
#endif
  if (failures != 0) std::printf("%d checks failed\n", failures);
  return failures == 0 ? 0 : 1;
}
