// Bytes of a matrix, turned.
#pragma once

#include <cstdint>

namespace te_mx::cpu {

// out[cols, rows] = in[rows, cols]^T, both compact.
void transpose_bytes(const uint8_t* in, int64_t rows, int64_t cols, uint8_t* out, int threads);

}  // namespace te_mx::cpu
