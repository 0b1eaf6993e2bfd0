// Between the loop over tiles (quantize.cpp) and the kernels that quantize one tile.
#pragma once

#include <cstdint>

#include "te_mx/cpu.h"

namespace te_mx::quantize_tile {

inline constexpr int kTile = 64;  // a transposed tile writes whole cache lines

// kTile x kTile elements, read once. Pointers of a direction that is not wanted are null.
struct Tile {
  const void* x;           // elements of a row are adjacent
  int64_t row_stride;      // in elements
  const uint8_t* next;     // the tile that comes next, to prefetch: any readable address will do
  int64_t next_row_bytes;  // from one of its rows to the next
  int rows;                // 32 or 64; columns are always 64
  bool rceil;
  bool stream;         // outputs are aligned to cache lines and too large to be kept in cache
  uint8_t* row_codes;  // rows row_code_stride apart
  int64_t row_code_stride;
  uint8_t* row_scales;  // two bytes a row
  int64_t row_scale_stride;
  uint8_t* col_codes;  // plain: like row_codes. Transposed: one 64-byte run a column (always
                       // written whole)
  int64_t col_code_stride;
  uint8_t* col_scales;  // plain: [rows/32] rows of 64 bytes. Transposed: two bytes a column
  int64_t col_scale_stride;
  float* col_sum;  // [64], running sums
};

enum class Columns : int { none = 0, plain = 1, transposed = 2 };

using Kernel = void (*)(const Tile& tile);

// rows false and columns none leaves the column sums.
Kernel find_portable(DType dtype, Format fmt, bool rows, Columns columns);
Kernel find_avx2(DType dtype, Format fmt, bool rows, Columns columns);
Kernel find_avx512(DType dtype, Format fmt, bool rows, Columns columns);
Kernel find_avx512_vbmi(DType dtype, Format fmt, bool rows, Columns columns);

}  // namespace te_mx::quantize_tile
