// The plain-loop tile kernel for any CPU.
#include "quantize/quantize_tile_loops.hpp"

namespace te_mx::cpu::quantize_tile {

Kernel find_portable(DType dtype, Element element, bool rows, Columns columns) {
  return choose<Tiles>(dtype, element, rows, columns);
}

}  // namespace te_mx::cpu::quantize_tile
