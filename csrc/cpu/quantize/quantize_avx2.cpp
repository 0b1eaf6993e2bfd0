// The plain-loop tile kernel, compiled for AVX2.
#include "quantize/quantize_tile_loops.hpp"

namespace te_mx::cpu::quantize_tile {

Kernel find_avx2(DType dtype, Element element, bool rows, Columns columns) {
  return choose<Tiles>(dtype, element, rows, columns);
}

}  // namespace te_mx::cpu::quantize_tile
