// What the two bf16 streams share. A stream multiplies a few rows of lhs (M <= 16) with rhs codes
// read as they lie; rhs is read once, so its bytes are the cost.
#pragma once

#include "common/isa.h"
#include "common/parallel.h"
#include "gemm/gemm_internal.hpp"
#include "gemm/pack_bf16.hpp"

namespace te_mx::cpu {

// Rows of rhs that one thread takes at a time: consecutive, so that prefetches land in the core
// that uses them.
static inline int64_t stream_item_rows(int64_t n, int threads, int64_t step, int64_t most) {
  const int64_t fair = n / (8 * (threads > 1 ? threads : 1)) / step * step;
  return fair < step ? step : fair > most ? most : fair;
}

// Codes at kb of `rows` rows, zero-filled to 16 x width.
static inline void copy_stream_tail(const StridedOperand& o, int64_t row, int64_t k, int64_t width,
                                    uint8_t* padded) {
  std::memset(padded, 0, static_cast<size_t>(16 * width));
  const int64_t left = o.k - k < width ? o.k - k : width;
  for (int64_t r = 0; r < 16 && row + r < o.rows; ++r) {
    std::memcpy(padded + r * width, o.codes + (row + r) * o.code_row_stride + k,
                static_cast<size_t>(left));
  }
}

}  // namespace te_mx::cpu
