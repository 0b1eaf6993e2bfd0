// fp32 scales to scale bytes and factors: see gemm_internal.hpp.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "common/parallel.h"
#include "gemm/gemm_internal.hpp"

namespace te_mx::cpu {
namespace {

constexpr int64_t kInlineScales = 16 * 1024;  // below, waking a team costs more than it saves
constexpr int64_t kBytesOfScale = kWideBlock / kBlock;

struct Split {
  uint8_t byte;
  float factor;
};

Split split(float scale) {
  uint32_t bits;
  std::memcpy(&bits, &scale, sizeof bits);
  const uint32_t exponent = bits >> 23 & 0xFF;
  if (std::isnan(scale)) return {255, 1.0f};
  if (exponent == 255) return {254, scale};  // Inf
  if (exponent == 0) return {0, std::ldexp(scale, 127)};
  bits = (bits & 0x807FFFFF) | 127u << 23;
  std::memcpy(&scale, &bits, sizeof scale);
  return {static_cast<uint8_t>(exponent), scale};
}

class Splitter {
 public:
  Splitter(const StridedOperand& operand, void* buffer)
      : o_(operand),
        made_(with_split(operand, buffer, true)),
        bytes_(static_cast<uint8_t*>(buffer)),
        factors_(const_cast<float*>(made_.factors)) {}

  // Rows [begin, begin + 32); whether a factor is not 1.
  bool rows(int64_t begin) {
    const int64_t end = std::min(begin + kRowBlock, o_.rows);
    const bool factors = o_.block_rows % kRowBlock == 0 ? alike(begin, end) : each(begin, end);
    for (int64_t b = 0; b < ceil_div(o_.k, kWideBlock); ++b) {
      float* to = factors_ + b * made_.factor_stride;
      std::fill(to + end, to + begin + kRowBlock, 1.0f);
    }
    return factors;
  }

  const StridedOperand& made() const { return made_; }

 private:
  Split stored(int64_t row, int64_t block) const {
    return split(
        o_.stored[row / o_.block_rows * o_.stored_row_stride + block * o_.stored_block_stride]);
  }

  // Rows with scales of their own.
  bool each(int64_t begin, int64_t end) {
    const int64_t blocks = ceil_div(o_.k, kWideBlock);
    bool factors = false;
    for (int64_t row = begin; row < end; ++row) {
      int least = 255, most = 0;
      for (int64_t b = 0; b < blocks; ++b) {
        const Split s = stored(row, b);
        put(row, b, s);
        factors = factors || s.factor != 1.0f;
        if (s.byte == 255) continue;
        least = std::min<int>(least, s.byte);
        most = std::max<int>(most, s.byte);
      }
      if (most - least > kWideSpread) forget_zeros(row, blocks);
    }
    return factors;
  }

  // Rows that share their scales: those of the first one, copied.
  bool alike(int64_t begin, int64_t end) {
    const int64_t blocks = ceil_div(o_.k, kWideBlock), all = ceil_div(o_.k, kBlock);
    int least = 255, most = 0;
    bool factors = false;
    for (int64_t b = 0; b < blocks; ++b) {
      const Split s = stored(begin, b);
      put(begin, b, s);
      float* to = factors_ + b * made_.factor_stride;
      std::fill(to + begin, to + end, s.factor);
      factors = factors || s.factor != 1.0f;
      if (s.byte == 255) continue;
      least = std::min<int>(least, s.byte);
      most = std::max<int>(most, s.byte);
    }
    if (made_.scale_block_stride == 1) {
      const uint8_t* first = bytes_ + begin * made_.scale_row_stride;
      for (int64_t row = begin + 1; row < end; ++row) {
        std::copy(first, first + all, bytes_ + row * made_.scale_row_stride);
      }
    } else {
      for (int64_t i = 0; i < all; ++i) {
        uint8_t* line = bytes_ + i * made_.scale_block_stride;
        std::fill(line + begin + 1, line + end, line[begin]);
      }
    }
    for (int64_t row = begin; row < end && most - least > kWideSpread; ++row) {
      forget_zeros(row, blocks);
    }
    return factors;
  }

  void put(int64_t row, int64_t block, Split s) {
    const int64_t last = std::min((block + 1) * kBytesOfScale, ceil_div(o_.k, kBlock));
    for (int64_t i = block * kBytesOfScale; i < last; ++i) {
      bytes_[row * made_.scale_row_stride + i * made_.scale_block_stride] = s.byte;
    }
    factors_[block * made_.factor_stride + row] = s.factor;
  }

  // The smallest scale to blocks without values, which may have any.
  void forget_zeros(int64_t row, int64_t blocks) {
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t at =
          row * made_.scale_row_stride + b * kBytesOfScale * made_.scale_block_stride;
      if (bytes_[at] != 255 && all_zero(row, b)) put(row, b, {0, 1.0f});
    }
  }

  bool all_zero(int64_t row, int64_t block) const {
    const uint8_t negative_zero = is_fnuz(o_.element) ? 0 : 0x80;
    const int64_t end = std::min((block + 1) * kWideBlock, o_.k);
    for (int64_t k = block * kWideBlock; k < end; ++k) {
      const uint8_t code = o_.codes[row * o_.code_row_stride + k * o_.code_k_stride];
      if (code != 0 && code != negative_zero) return false;
    }
    return true;
  }

  const StridedOperand& o_;
  StridedOperand made_;
  uint8_t* bytes_;
  float* factors_;
};

}  // namespace

StridedOperand with_split(const StridedOperand& operand, const void* buffer, bool factors) {
  StridedOperand made = operand;
  const bool k_first = operand.code_k_stride != 1;
  made.scales = static_cast<const uint8_t*>(buffer);
  made.scale_row_stride = k_first ? 1 : ceil_div(operand.k, kBlock);
  made.scale_block_stride = k_first ? operand.rows : 1;
  made.factors = nullptr;
  made.factor_stride = round_up(operand.rows, kRowBlock);
  if (factors) {
    const SplitScales parts(operand.rows, operand.k);
    made.factors = reinterpret_cast<const float*>(made.scales + parts.bytes);
  }
  return made;
}

StridedOperand split_scales(const StridedOperand& operand, void* buffer, int threads, bool always) {
  Splitter splitter(operand, buffer);
  const int64_t scales = operand.rows * ceil_div(operand.k, kWideBlock);
  int32_t factors = always ? 1 : 0;
  parallel_for(scales < kInlineScales ? 1 : threads, ceil_div(operand.rows, kRowBlock),
               [&](int64_t item) {
                 if (splitter.rows(item * kRowBlock)) {
                   __atomic_store_n(&factors, 1, __ATOMIC_RELAXED);
                 }
               });
  return with_split(operand, buffer, factors != 0);
}

}  // namespace te_mx::cpu
