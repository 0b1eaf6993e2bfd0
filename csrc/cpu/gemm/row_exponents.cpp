// Row exponents: the largest scale byte of every operand row, and whether a row is too wide for one
// exponent.
#include <cmath>
#include <cstring>

#include "common/isa.h"
#include "common/parallel.h"
#include "gemm/gemm_internal.hpp"
#include "gemm/row_exponents.hpp"
#include "gemm/values.hpp"
#include "mxtile/mx/float_mode.hpp"

namespace te_mx::cpu {
namespace {

constexpr int64_t kRowsPerItem = 256;
static_assert(kRowsPerItem % kRowBlock == 0, "one item owns the flag of a block");
constexpr int64_t kInlineBytes = 32 * 1024;  // scales below this are not worth waking a team

// largest[r] and smallest[r] over the scale bytes of the row, the largest plus one; 255 (NaN)
// counts as nothing for both.
void scan_k_last(const StridedOperand& o, int64_t row, int64_t rows, int64_t blocks,
                 uint8_t* largest, uint8_t* smallest) {
#if defined(TE_MX_HAVE_AVX512)
  if (isa_native() >= Isa::avx512) {
    return scan_scales_avx512(o.scales + row * o.scale_row_stride, o.scale_row_stride, rows, blocks,
                              largest, smallest);
  }
#endif
  for (int64_t r = 0; r < rows; ++r) {
    const uint8_t* s = o.scales + (row + r) * o.scale_row_stride;
    uint8_t high = 0, low = 255;
    for (int64_t b = 0; b < blocks; ++b) {
      const uint8_t next = static_cast<uint8_t>(s[b] + 1);  // 255 becomes 0
      high = next > high ? next : high;
      low = s[b] < low ? s[b] : low;
    }
    largest[r] = high;
    smallest[r] = low;
  }
}

void scan_k_first(const StridedOperand& o, int64_t row, int64_t rows, int64_t blocks,
                  uint8_t* largest, uint8_t* smallest) {
  std::memset(largest, 0, static_cast<size_t>(rows));
  std::memset(smallest, 255, static_cast<size_t>(rows));
  for (int64_t b = 0; b < blocks; ++b) {
    const uint8_t* s = o.scales + b * o.scale_block_stride + row;
    for (int64_t r = 0; r < rows; ++r) {
      const uint8_t next = static_cast<uint8_t>(s[r] + 1);
      largest[r] = next > largest[r] ? next : largest[r];
      smallest[r] = s[r] < smallest[r] ? s[r] : smallest[r];
    }
  }
}

// A block far below the row's largest exponent matters only when a code in it is not zero.
bool row_is_wide(const StridedOperand& o, int64_t row, int64_t blocks, int row_byte) {
  const uint8_t magnitude = is_fp4(o.element) ? 0x07 : 0x7F;
  for (int64_t b = 0; b < blocks; ++b) {
    if (o.scales[row * o.scale_row_stride + b * o.scale_block_stride] >= row_byte - kWideSpread) {
      continue;
    }
    const int64_t end = (b + 1) * kBlock < o.k ? (b + 1) * kBlock : o.k;
    for (int64_t k = b * kBlock; k < end; ++k) {
      if ((o.code(row, k) & magnitude) != 0) return true;
    }
  }
  return false;
}

// Of rows of one block, none of which can be wide.
void scan_one_block(const uint8_t* scales, int64_t rows, float* exponents) {
#if defined(TE_MX_HAVE_AVX512)
  if (isa_native() >= Isa::avx512) return exponents_of_one_block_avx512(scales, rows, exponents);
#endif
  one_block_exponents(scales, rows, exponents);
}

bool scan_rows(const StridedOperand& o, int64_t row, int64_t rows, float* exponents,
               uint8_t* wide_blocks) {
  uint8_t largest[kRowsPerItem], smallest[kRowsPerItem];
  const int64_t blocks = ceil_div(o.k, kBlock);
  for (int64_t r = 0; r < rows; r += kRowBlock) wide_blocks[(row + r) / kRowBlock] = 0;
  if (blocks == 1 && o.scale_row_stride == 1) {
    scan_one_block(o.scales + row, rows, exponents + row);
    return false;
  }
  if (o.scale_row_stride == 1 && o.scale_block_stride != 1) {
    scan_k_first(o, row, rows, blocks, largest, smallest);
  } else {
    scan_k_last(o, row, rows, blocks, largest, smallest);
  }
  int far = 0;  // whether some scale lies far below the largest of its row
  for (int64_t r = 0; r < rows; ++r) {
    const int row_byte = largest[r] == 0 ? 127 : largest[r] - 1;
    exponents[row + r] = static_cast<float>(row_byte - 127 - kRelativeExponent);
    far |= smallest[r] < row_byte - kWideSpread;
  }
  if (far == 0) return false;
  bool any = false;
  for (int64_t r = 0; r < rows; ++r) {
    uint8_t& wide = wide_blocks[(row + r) / kRowBlock];
    const int row_byte = largest[r] == 0 ? 127 : largest[r] - 1;
    if (smallest[r] < row_byte - kWideSpread && wide == 0) {
      wide = row_is_wide(o, row + r, blocks, row_byte) ? 1 : 0;
      any = any || wide != 0;
    }
  }
  return any;
}

}  // namespace

namespace {

// A tensor scale as factor * 2^exponent.
float factor_of(float scale, float* exponent) {
  int power = 0;
  const bool whole = std::isfinite(scale) && scale != 0.0f;
  const float half = whole ? std::frexp(scale, &power) : scale;
  if (exponent != nullptr) *exponent = static_cast<float>(power);
  return half;
}

}  // namespace

void row_factors(const StridedOperand& o, float* factors) {
  const mxtile::mx::KeepDenormals keep_denormals;
  for (int64_t r = 0; r < round_up(o.rows, kRowBlock); ++r) {
    factors[r] = o.e4m3 && r < o.rows ? factor_of(o.whole[r * o.whole_row_stride], nullptr) : 1.0f;
  }
}

bool row_is_wide(const StridedOperand& o, int64_t row) {
  uint8_t largest, smallest;
  const int64_t blocks = ceil_div(o.k, kBlock);
  if (o.scale_block_stride == 1) {
    scan_k_last(o, row, 1, blocks, &largest, &smallest);
  } else {
    scan_k_first(o, row, 1, blocks, &largest, &smallest);
  }
  const int row_byte = largest == 0 ? 127 : largest - 1;
  return smallest < row_byte - kWideSpread && row_is_wide(o, row, blocks, row_byte);
}

bool scan_row_exponents(const StridedOperand& operand, float* exponents, uint8_t* wide_blocks,
                        int threads) {
  for (int64_t r = operand.rows; r < round_up(operand.rows, kRowBlock); ++r) exponents[r] = 0.0f;
  if (operand.as_values()) return scan_values(operand, exponents, wide_blocks);
  if (operand.e4m3) {  // whose values reach from 2^-10 to 2688
    const mxtile::mx::KeepDenormals keep_denormals;
    std::memset(wide_blocks, 0, static_cast<size_t>(ceil_div(operand.rows, kRowBlock)));
    for (int64_t r = 0; r < operand.rows; ++r) {
      factor_of(operand.whole[r * operand.whole_row_stride], exponents + r);
    }
    return false;
  }
  const int64_t bytes = operand.rows * ceil_div(operand.k, kBlock);
  // Every item writes its own flag's worth of truth: any of them may set it, none clears it.
  int32_t wide = 0;
  parallel_for(bytes < kInlineBytes ? 1 : threads, ceil_div(operand.rows, kRowsPerItem),
               [&](int64_t item) {
                 const int64_t row = item * kRowsPerItem;
                 const int64_t left = operand.rows - row;
                 if (scan_rows(operand, row, left < kRowsPerItem ? left : kRowsPerItem, exponents,
                               wide_blocks)) {
                   __atomic_store_n(&wide, 1, __ATOMIC_RELAXED);
                 }
               });
  return wide != 0;
}

}  // namespace te_mx::cpu
