// Between the loop over tiles (quantize.cpp) and the kernels that quantize one tile.
#pragma once

#include <cstdint>

#include "mxtile/mx/scale.hpp"
#include "te_mx/cpu.h"

namespace te_mx::cpu::quantize_tile {

inline constexpr int kTile = 64;       // a transposed tile writes whole cache lines
inline constexpr int kTileCols = 256;  // of the widest tile: long runs suit memory

// Rows of a tile: as few as its columns' blocks allow.
enum class Columns : int { none = 0, plain = 1, transposed = 2 };
constexpr int tile_rows(Columns columns) { return columns == Columns::transposed ? kTile : 32; }

// Bytes of codes that follow each other along the blocks: rows, and transposed columns. Those of 4
// bits lie two a byte there. static: files with different flags call it.
static constexpr int64_t code_bytes(Element element, int64_t codes) {
  return is_fp4(element) ? (codes + 1) / 2 : codes;
}

struct Hadamard {
  int size = 0;  // 16 or 32; 0: none
  uint32_t signs = 0;
};

// What random rounding and transforms need to know of a matrix; its tiles say where they lie.
struct Special {
  DType dtype;
  bool transposed;  // columns
  bool stochastic;
  uint64_t seed;
  int64_t first;       // number of the matrix's first row
  int64_t rows, cols;  // of the matrix: chunks of a transform that it cuts stay as they are
  Hadamard row, col;
};

// Elements that are read once. Pointers of a direction that is not wanted are null.
struct Tile {
  const void* x;           // elements of a row are adjacent
  int64_t row_stride;      // in elements
  const uint8_t* next;     // the tile that comes next, to prefetch: any readable address will do
  int64_t next_row_bytes;  // from one of its rows to the next
  int rows;                // 32; with transposed columns 64 too
  int cols;                // a multiple of 64 up to kTileCols; with transposed columns 64
  mxtile::mx::Rule rule;
  bool stream;         // outputs are aligned to cache lines and too large to be kept in cache
  bool last;           // stores of this tile and those before it must be complete on return
  uint8_t* row_codes;  // rows row_code_stride apart
  int64_t row_code_stride;
  uint8_t* row_scales;  // cols / 32 bytes a row
  int64_t row_scale_stride;
  uint8_t* col_codes;  // plain: a byte each, like a matrix. Transposed: one run of 64 codes a
                       // column (always written whole)
  int64_t col_code_stride;
  uint8_t* col_scales;  // plain: [rows/32] rows of cols bytes. Transposed: two bytes a column
  int64_t col_scale_stride;
  float* col_sum;          // [cols], running sums
  const Special* special;  // for kernels of find_random()
  int64_t row0, col0;      // in the matrix, likewise
  // Rows from here on are zeros, whose codes nobody reads; without transposed columns they are not
  // read and, if this is even, not written.
  int filled = kTile;
};

constexpr int written_rows(const Tile& tile, Columns columns) {
  return columns == Columns::transposed || tile.filled >= tile.rows ? tile.rows : tile.filled;
}

// The 64 columns of a tile from c on. Internal linkage: files with different flags call it.
template <int ElementBytes, Element E>
static inline Tile part_of(const Tile& tile, int c) {
  Tile part = tile;
  part.cols = kTile;
  if (c == 0) return part;  // transposed columns: always
  part.x = static_cast<const uint8_t*>(tile.x) + c * ElementBytes;
  if (tile.row_codes) {
    part.row_codes += code_bytes(E, c);
    part.row_scales += c / 32;
  }
  if (tile.col_codes) {
    part.col_codes += c;
    part.col_scales += c;
  }
  if (tile.col_sum) part.col_sum += c;
  part.col0 += c;
  return part;
}

using Kernel = void (*)(const Tile& tile);

// The kernel of the level in use. rows false and columns none leaves the column sums.
Kernel find(DType dtype, Element element, bool rows, Columns columns);  // quantize.cpp

// The rows and columns of the elements of 32 rows that follow each other in memory.
struct NarrowOrder {
  alignas(64) uint16_t row[32][32], col[32][32];  // of element 32 i + j
  explicit NarrowOrder(int64_t cols) {
    for (int64_t i = 0; i < 32 * cols; ++i) {
      row[i / 32][i % 32] = static_cast<uint16_t>(i / cols);
      col[i / 32][i % 32] = static_cast<uint16_t>(i % cols);
    }
  }
};

// 32 rows of a compact matrix of at most 32 columns. Pointers of a direction that is not wanted are
// null; codes of 4 bits want an even number of columns for rows.
struct Narrow {
  const void* x;
  int cols;
  mxtile::mx::Rule rule;
  const NarrowOrder* order;
  uint8_t *row_codes, *row_scales, *col_codes, *col_scales;  // compact, columns plain
};

// False: nothing was written, as some block needs the exact path.
using NarrowKernel = bool (*)(const Narrow& rows);

// The kernel of the level in use, or null.
NarrowKernel find_narrow(DType dtype, Element element);  // quantize.cpp

NarrowKernel find_narrow_avx512(DType dtype, Element element);
NarrowKernel find_narrow_avx512_vbmi(DType dtype, Element element);

// The kernel of Tile::special.
Kernel find_random(Element element);  // quantize.cpp

Kernel find_random_portable(Element element);
Kernel find_random_avx2(Element element);
Kernel find_random_avx512(Element element);

Kernel find_portable(DType dtype, Element element, bool rows, Columns columns);
Kernel find_avx2(DType dtype, Element element, bool rows, Columns columns);
Kernel find_avx512(DType dtype, Element element, bool rows, Columns columns);
Kernel find_avx512_vbmi(DType dtype, Element element, bool rows, Columns columns);

}  // namespace te_mx::cpu::quantize_tile
