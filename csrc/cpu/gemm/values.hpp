// lhs that was not quantized: rows of fp32, bf16 or fp16, each taken relative to a power of two as
// codes are (kRelativeExponent), which rounds nothing.
#pragma once

#include "gemm/gemm_internal.hpp"

namespace te_mx::cpu {

// As scan_row_exponents(). The largest value of a row lies in [2^52, 2^53); a row is wide when its
// smallest other than zero lies below 2^-62. NaN and Inf count as nothing.
bool scan_values(const StridedOperand& operand, float* exponents, uint8_t* wide_blocks);

// out[i] = value(row, k0 + i) * 2^-exponent for i < count, zeros past the end of the row.
void relative_floats(const StridedOperand& operand, int64_t row, int64_t k0, int64_t count,
                     float exponent, float* out);
// The same as bf16, of bf16.
void relative_words(const StridedOperand& operand, int64_t row, int64_t k0, int64_t count,
                    float exponent, uint16_t* out);

}  // namespace te_mx::cpu
