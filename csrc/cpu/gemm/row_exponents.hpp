// The scan for row exponents on vectors.
#pragma once

#include <cstdint>

#include "gemm/gemm_internal.hpp"

namespace te_mx::cpu {

// largest[r] and smallest[r] over the scale bytes of rows that lie `stride` bytes apart, the
// largest plus one; 255 (NaN) counts as nothing for both: 0 and 255 where a row holds nothing else.
void scan_scales_avx512(const uint8_t* scales, int64_t stride, int64_t rows, int64_t blocks,
                        uint8_t* largest, uint8_t* smallest);

// exponents[r] of rows of one block, whose scale bytes follow each other.
void exponents_of_one_block_avx512(const uint8_t* scales, int64_t rows, float* exponents);

// The same in plain loops, compiled for both.
[[gnu::always_inline]] static inline void one_block_exponents(const uint8_t* scales, int64_t rows,
                                                              float* exponents) {
  for (int64_t r = 0; r < rows; ++r) {
    const int byte = scales[r];
    const int nan = byte == 255;  // arithmetic, so that compilers make vectors of it
    exponents[r] = static_cast<float>(byte - nan * 128 - 127 - kRelativeExponent);
  }
}

}  // namespace te_mx::cpu
