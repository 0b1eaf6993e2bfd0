// The blockwise tile kernel for AVX2.
#include "quantize/blockwise_loops.hpp"

namespace te_mx::cpu::blockwise {

TileKernel find_avx2(DType dtype, Element element) { return choose(dtype, element); }

}  // namespace te_mx::cpu::blockwise
