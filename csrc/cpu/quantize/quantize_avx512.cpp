// The AVX-512 tile kernel for CPUs without VBMI.
#include "quantize/quantize_narrow_avx512.hpp"
#include "quantize/quantize_tile_avx512.hpp"

namespace te_mx::cpu::quantize_tile {

Kernel find_avx512(DType dtype, Element element, bool rows, Columns columns) {
  return choose<Tiles>(dtype, element, rows, columns);
}

NarrowKernel find_narrow_avx512(DType dtype, Element element) {
  return choose_narrow(dtype, element);
}

}  // namespace te_mx::cpu::quantize_tile
