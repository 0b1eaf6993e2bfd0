// Blockwise FP8: between the loop over tiles of 128 x 128 (blockwise.cpp) and the kernels that
// quantize one.
#pragma once

#include <cstdint>

#include "te_mx/cpu.h"

namespace te_mx::cpu {

// quantize() of fp32 scales.
Status quantize_blockwise(const QuantizeArgs& args);

namespace blockwise {

inline constexpr int kTile = static_cast<int>(kWideBlock);

// Up to 128 x 128 elements, read once from memory. Pointers of a direction that is not wanted are
// null.
struct Tile {
  const void* x;
  int64_t row_stride, col_stride;  // in elements
  int rows, cols;
  const uint8_t* next;  // the tile that comes next, to prefetch: any readable address will do
  bool square;          // one scale for all, else one a row and one a column
  bool pow2;            // the scale rule
  bool stream;          // codes are aligned to cache lines and too many to be kept in a cache
  bool last;            // stores of this tile and those before it must be complete on return
  uint32_t epsilon;     // bits of the amax epsilon
  uint8_t* row_codes;   // rows row_code_stride apart
  int64_t row_code_stride;
  float* row_scales;  // one a row, row_scale_stride apart; one when square
  int64_t row_scale_stride;
  bool transposed;     // columns
  uint8_t* col_codes;  // rows col_code_stride apart; transposed: columns
  int64_t col_code_stride;
  float* col_scales;  // one a column, col_scale_stride apart; one when square
  int64_t col_scale_stride;
  float* col_sum;  // [cols], running sums
};

using TileKernel = void (*)(const Tile& tile);

// blockwise.cpp
TileKernel find(DType dtype, Element element);  // of the level in use
// Where the tile at (r0, c0) of a matrix [rows, cols] goes, and how it is quantized.
Tile tile_to(const QuantizeOut& to, int64_t rows, int64_t cols, int64_t r0, int64_t c0);
// As of the MX quantizer: whether the codes are aligned and would not stay in a cache anyway.
bool wants_stream(const QuantizeOut& to, int64_t rows, int64_t cols);

TileKernel find_portable(DType dtype, Element element);
TileKernel find_avx2(DType dtype, Element element);
TileKernel find_avx512(DType dtype, Element element);
TileKernel find_avx512_vbmi(DType dtype, Element element);

}  // namespace blockwise
}  // namespace te_mx::cpu
