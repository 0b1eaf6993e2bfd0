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

// The codes of a row from k on, fewer than 64, as they lie, and zeros up to a whole line.
static inline void copy_last_line(const StridedOperand& o, int64_t row, int64_t k,
                                  uint8_t* padded) {
  std::memset(padded, 0, 64);
  const int64_t left = o.k - k;
  std::memcpy(padded, o.at(row, k), static_cast<size_t>(o.nibbles ? left / 2 : left));
  if (o.nibbles && left % 2 == 1) padded[left / 2] = o.code(row, o.k - 1);
}

}  // namespace te_mx::cpu
