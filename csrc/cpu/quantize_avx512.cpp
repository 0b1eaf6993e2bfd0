// The AVX-512 tile kernel for CPUs without VBMI.
#include "quantize_tile_avx512.hpp"

namespace te_mx::quantize_tile {

Kernel find_avx512(DType dtype, Format fmt, bool rows, Columns columns) {
  return choose<Tiles>(dtype, fmt, rows, columns);
}

}  // namespace te_mx::quantize_tile
