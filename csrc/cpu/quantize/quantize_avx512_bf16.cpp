// The AVX-512 tile kernel with VBMI, which the avx512_bf16 level includes.
#include "quantize/quantize_narrow_avx512.hpp"
#include "quantize/quantize_tile_avx512.hpp"

namespace te_mx::cpu::quantize_tile {

Kernel find_avx512_vbmi(DType dtype, Element element, bool rows, Columns columns) {
  return choose<Tiles>(dtype, element, rows, columns);
}

NarrowKernel find_narrow_avx512_vbmi(DType dtype, Element element) {
  return choose_narrow(dtype, element);
}

}  // namespace te_mx::cpu::quantize_tile
