// NVFP4: between the loops over tiles (nvfp4.cpp) and the plain loops that every level compiles.
#pragma once

#include <cstdint>

#include "te_mx/cpu.h"

namespace te_mx::cpu {

// quantize() and dequantize() of E4M3 scales and a tensor scale. te_mx/formats/nvfp4.py says what
// the bytes are.
Status quantize_nvfp4(const QuantizeArgs& args);
Status dequantize_nvfp4(const DequantizeArgs& args);

namespace nvfp4 {

inline constexpr int kRows = 16, kCols = 256;  // of a tile
inline constexpr int kBlocks = kCols / static_cast<int>(kSmallBlock);

// Up to 16 x 256 elements. Pointers of a direction that is not wanted are null.
struct Tile {
  const void* x;
  int64_t row_stride, col_stride;  // in elements
  DType dtype;
  int rows, cols;
  bool square;
  const uint32_t *row_amax, *col_amax;  // magnitudes, so many apart: 0 (of the tensor) or 1
  int64_t row_amax_stride, col_amax_stride;
  uint8_t* row_codes;  // two a byte, rows row_code_stride bytes apart
  int64_t row_code_stride;
  uint8_t* row_scales;  // rows row_scale_stride apart; one row when square
  int64_t row_scale_stride;
  bool transposed;  // columns: two a byte, columns col_code_stride apart; else as the matrix
  uint8_t* col_codes;
  int64_t col_code_stride;
  uint8_t* col_scales;  // of column c (when square of block c / 16) at c * col_scale_stride
  int64_t col_scale_stride;
  float* col_sum;  // [cols], running sums, or null
  // How many of a row, or of rows, are transformed together first, 0, 16 or 32, and with which
  // signs: those of bits c % 32 and r % 32. Of 32 rows these are a half, and `other` are the rest.
  int row_transform, col_transform;
  uint32_t row_signs, col_signs;
  const void* other;
  uint32_t other_signs;
  bool upper;  // these are the second half
  bool stochastic;
  uint64_t seed;
  uint32_t row0;  // number of the first row
  int64_t col0;
  float top;     // the largest magnitude of a code times a block scale
  bool squares;  // of two scales that are tried
};

constexpr bool tries_two(ScaleRule rule) { return rule >= ScaleRule::te_4over6; }
constexpr float top_of(ScaleRule rule) {
  const bool narrow = rule == ScaleRule::te_4over6 || rule == ScaleRule::te_4over6_mse;
  return (narrow ? 256.0f : 448.0f) * 6.0f;
}

// What a magnitude is of.
enum class Of : int { elements, row_chunks, col_chunks };

// A run of adjacent codes to decode.
struct Run {
  const uint8_t* codes;
  bool packs;             // two a byte along the run, whose blocks of 16 have one scale each;
  const uint8_t* scales;  // else code i has scales[i / scale_span]
  int64_t scale_span;
  const float* whole;  // tensor scales, so many apart
  int64_t whole_stride;
  int64_t n;
  DType dtype;
  void* out;
};

struct Level {
  // Raises magnitudes (bits of fp32, NaN and Inf left out), `rows` apart 0 or 1 and `cols`
  // likewise, to those of a tile, or of what transforming it makes.
  void (*raise)(const Tile& tile, Of of, uint32_t* largest, int64_t rows, int64_t cols);
  void (*quantize)(const Tile& tile, ScaleRule rule);
  void (*decode)(const Run& run);
};
// Of a magnitude of 0: 1.
float tensor_scale(uint32_t amax, ScaleRule rule, DType dtype);

const Level& portable_level();
const Level& avx2_level();
const Level& avx512_level();

}  // namespace nvfp4
}  // namespace te_mx::cpu
