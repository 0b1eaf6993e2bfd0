// The AMX tile words in portable C++, bit for bit: kernels written for Tiles run on any CPU.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace mxtile::amx {

class EmulatedTiles {
 public:
  explicit EmulatedTiles(int columns = 16) : columns_(columns) {}

  template <int T>
  void zero() {
    std::memset(tile_[T], 0, sizeof tile_[T]);
  }
  template <int T>
  void load(const void* p, int64_t stride) {
    zero<T>();
    for (int r = 0; r < 16; ++r) {
      std::memcpy(tile_[T][r], static_cast<const char*>(p) + r * stride, row_bytes<T>());
    }
  }
  template <int T>
  void load_once(const void* p, int64_t stride) {
    load<T>(p, stride);
  }
  template <int T>
  void store(void* p, int64_t stride) {
    for (int r = 0; r < 16; ++r) {
      std::memcpy(static_cast<char*>(p) + r * stride, tile_[T][r], row_bytes<T>());
    }
  }
  template <int C, int A, int B>
  void dot_bf16() {
    dot(tile_[C], tile_[A], tile_[B]);
  }

 private:
  using Tile = uint32_t[16][16];

  template <int T>
  size_t row_bytes() const {
    return T == 4 || T == 5 ? 64 : 4 * static_cast<size_t>(columns_);
  }

  // TDPBF16PS: even and odd k sum apart over the tile's k pairs, then their sum joins C. Every step
  // rounds to nearest even, reads denormals as zeros and writes denormal results as zeros.
  static void dot(Tile& c, const Tile& a, const Tile& b) {
    for (int m = 0; m < 16; ++m) {
      float even[16] = {}, odd[16] = {};
      for (int k = 0; k < 16; ++k) {
        const float a_even = value(a[m][k] << 16), a_odd = value(a[m][k] & 0xFFFF0000u);
        for (int n = 0; n < 16; ++n) {
          even[n] = multiply_add(a_even, value(b[k][n] << 16), even[n]);
          odd[n] = multiply_add(a_odd, value(b[k][n] & 0xFFFF0000u), odd[n]);
        }
      }
      for (int n = 0; n < 16; ++n) {
        const float sum = flush(value(c[m][n]) + flush(even[n] + odd[n]));
        std::memcpy(&c[m][n], &sum, 4);
      }
    }
  }

  static float flush(float x) { return std::fabs(x) < FLT_MIN ? std::copysign(0.0f, x) : x; }

  static float value(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return flush(x);
  }

  static float multiply_add(float a, float b, float c) {
    // The product of two bf16 is exact in fp32 unless it is denormal or overflows, so multiply and
    // add round once.
    const float product = a * b, size = std::fabs(product);
    const bool exact = size >= FLT_MIN && size <= FLT_MAX;
    if (!exact && a != 0.0f && b != 0.0f) return flush(std::fma(a, b, c));
    return flush(product + c);
  }

  alignas(64) Tile tile_[8];
  int columns_;
};

}  // namespace mxtile::amx
