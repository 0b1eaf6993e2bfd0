// Row sums of packed bf16 values: the "operand" bias gradient.
#include <cmath>
#include <cstring>

#include "gemm/pack_bf16.hpp"

namespace te_mx::cpu {
namespace {

float to_float(uint16_t word) {
  const uint32_t bits = static_cast<uint32_t>(word) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

float row_sum(const uint16_t* row, const Bf16Layout& layout, int64_t blocks) {
  float lane[kBlock] = {};
  for (int64_t b = 0; b < blocks; ++b) {
    const uint16_t* w = row + b * layout.block_stride;
    if (layout.pair_stride == 2) {
      for (int k = 0; k < kBlock; ++k) lane[k] += to_float(w[k]);
    } else {
      for (int k = 0; k < kBlock; ++k) lane[k] += to_float(w[k / 2 * layout.pair_stride + k % 2]);
    }
  }
  for (int width = kBlock / 2; width > 0; width /= 2) {
    for (int k = 0; k < width; ++k) lane[k] += lane[k + width];
  }
  return lane[0];
}

}  // namespace

void bf16_row_sums(const uint16_t* words, const Bf16Layout& layout, int64_t rows, int64_t blocks,
                   const float* exponents, float* out, int threads) {
  parallel_for(threads, ceil_div(rows, kRowBlock), [&](int64_t item) {
    const int64_t end = (item + 1) * kRowBlock < rows ? (item + 1) * kRowBlock : rows;
    for (int64_t m = item * kRowBlock; m < end; ++m) {
      const uint16_t* row = words + m / layout.panel_rows * layout.panel_stride +
                            m % layout.panel_rows * layout.row_stride;
      out[m] = std::ldexp(row_sum(row, layout, blocks), static_cast<int>(exponents[m]));
    }
  });
}

}  // namespace te_mx::cpu
