// The plain-loop tile kernel for any CPU.
#include "quantize_tile_loops.hpp"

namespace te_mx::quantize_tile {

Kernel find_portable(DType dtype, Format fmt, bool rows, Columns columns) {
  return choose<Tiles>(dtype, fmt, rows, columns);
}

}  // namespace te_mx::quantize_tile
