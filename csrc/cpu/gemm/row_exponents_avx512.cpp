// The largest and smallest scale byte of rows, 64 bytes at a time.
#include "gemm/row_exponents.hpp"
#include "mxtile/quant/scale_range_avx512.hpp"

namespace te_mx::cpu {

void scan_scales_avx512(const uint8_t* scales, int64_t stride, int64_t rows, int64_t blocks,
                        uint8_t* largest, uint8_t* smallest) {
  for (int64_t r = 0; r < rows; ++r, scales += stride) {
    const auto range = mxtile::quant::avx512::scale_range_of(scales, blocks);
    largest[r] = range.largest_plus_one;
    smallest[r] = range.smallest;
  }
}

void exponents_of_one_block_avx512(const uint8_t* scales, int64_t rows, float* exponents) {
  one_block_exponents(scales, rows, exponents);
}

}  // namespace te_mx::cpu
