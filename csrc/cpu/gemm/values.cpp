#include "gemm/values.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "mxtile/mx/float_mode.hpp"
#include "mxtile/mx/round.hpp"

namespace te_mx::cpu {
namespace {

namespace mx = mxtile::mx;

constexpr int kLargest = 52;          // exponent of the largest value of a row
constexpr int kSpread = 52 + 62;      // octaves below it that count
constexpr int kLeastExponent = -112;  // so that row exponents are those of scale bytes

template <class T>
const T* row_at(const StridedOperand& o, int64_t row, int64_t k0) {
  return static_cast<const T*>(o.values.data) + row * o.values.row_stride + k0;
}

struct Extremes {
  uint32_t most, least;  // magnitudes as bits of fp32; 0: none
};

// Magnitudes are ordered as their bits are. I: signed, as wide as T.
template <class T, class I>
Extremes extremes(const T* x, int64_t k, I inf) {
  constexpr I kMagnitude = static_cast<I>(static_cast<T>(~T{0}) >> 1);
  I most = 0, least = kMagnitude;
  for (int64_t i = 0; i < k; ++i) {
    const I bits = static_cast<I>(static_cast<I>(x[i]) & kMagnitude);
    const I finite = bits < inf ? bits : I{0};
    most = finite > most ? finite : most;
    const I there = finite == 0 ? kMagnitude : finite;
    least = there < least ? there : least;
  }
  return {static_cast<uint32_t>(most), most == 0 ? 0 : static_cast<uint32_t>(least)};
}

Extremes extremes_of(const StridedOperand& o, int64_t row) {
  if (o.values.dtype == DType::f32) {
    return extremes<uint32_t, int32_t>(row_at<uint32_t>(o, row, 0), o.k, 0x7F800000);
  }
  const uint16_t* x = row_at<uint16_t>(o, row, 0);
  if (o.values.dtype == DType::bf16) {
    const Extremes e = extremes<uint16_t, int16_t>(x, o.k, 0x7F80);
    return {e.most << 16, e.least << 16};
  }
  const Extremes e = extremes<uint16_t, int16_t>(x, o.k, 0x7C00);
  return {mx::f16_to_f32(static_cast<uint16_t>(e.most)),
          mx::f16_to_f32(static_cast<uint16_t>(e.least))};
}

int exponent_of(uint32_t magnitude) {
  const int biased = static_cast<int>(magnitude >> 23);
  return biased > 0 ? biased - 127 : 31 - __builtin_clz(magnitude) - 149;
}

}  // namespace

bool scan_values(const StridedOperand& o, float* exponents, uint8_t* wide_blocks) {
  bool any = false;
  std::memset(wide_blocks, 0, static_cast<size_t>(ceil_div(o.rows, kRowBlock)));
  for (int64_t row = 0; row < o.rows; ++row) {
    const Extremes found = extremes_of(o, row);
    const int most = found.most == 0 ? 0 : exponent_of(found.most);
    const int base = std::max(most, kLeastExponent) - kLargest;
    exponents[row] = static_cast<float>(base);
    if (found.most != 0 && exponent_of(found.least) < base + kLargest - kSpread) {
      wide_blocks[row / kRowBlock] = 1;
      any = true;
    }
  }
  return any;
}

void relative_floats(const StridedOperand& o, int64_t row, int64_t k0, int64_t count,
                     float exponent, float* out) {
  const mx::KeepDenormals keep_denormals;
  const int64_t n = std::clamp<int64_t>(o.k - k0, 0, count);
  if (o.values.dtype == DType::f32) {
    std::memcpy(out, row_at<float>(o, row, k0), static_cast<size_t>(n) * 4);
  } else {
    const uint16_t* x = row_at<uint16_t>(o, row, k0);
    const bool bf16 = o.values.dtype == DType::bf16;
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t bits = bf16 ? mx::bf16_to_f32(x[i]) : mx::f16_to_f32(x[i]);
      std::memcpy(out + i, &bits, 4);
    }
  }
  const int64_t bits = (int64_t{1023} - static_cast<int64_t>(exponent)) << 52;
  double power;
  std::memcpy(&power, &bits, sizeof power);
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(static_cast<double>(out[i]) * power);
  std::fill(out + n, out + count, 0.0f);
}

void relative_words(const StridedOperand& o, int64_t row, int64_t k0, int64_t count, float exponent,
                    uint16_t* out) {
  const int64_t n = std::clamp<int64_t>(o.k - k0, 0, count);
  const uint16_t* x = row_at<uint16_t>(o, row, k0);
  const uint16_t add = static_cast<uint16_t>(-static_cast<int>(exponent) * 128);
  uint16_t denormal = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint16_t e = x[i] & 0x7F80, magnitude = x[i] & 0x7FFF;
    const bool normal = e != 0 && e != 0x7F80;
    denormal |= static_cast<uint16_t>(e == 0 && magnitude != 0);
    out[i] = static_cast<uint16_t>(x[i] + (normal ? add : 0));
  }
  for (int64_t i = 0; denormal != 0 && i < n; ++i) {
    if ((x[i] & 0x7F80) != 0 || (x[i] & 0x7FFF) == 0) continue;
    float value;
    relative_floats(o, row, k0 + i, 1, exponent, &value);
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    out[i] = static_cast<uint16_t>(bits >> 16);
  }
  std::fill(out + n, out + count, uint16_t{0});
}

}  // namespace te_mx::cpu
