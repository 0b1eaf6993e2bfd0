// The scan for row exponents on vectors.
#pragma once

#include <cstdint>

namespace te_mx::cpu {

// largest[r] and smallest[r] over the scale bytes of rows that lie `stride` bytes apart, the
// largest plus one; 255 (NaN) counts as nothing for both: 0 and 255 where a row holds nothing else.
void scan_scales_avx512(const uint8_t* scales, int64_t stride, int64_t rows, int64_t blocks,
                        uint8_t* largest, uint8_t* smallest);

}  // namespace te_mx::cpu
