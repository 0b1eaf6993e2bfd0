// The blockwise tile kernels for AVX-512 with VBMI.
#include "quantize/blockwise_words.hpp"

namespace te_mx::cpu::blockwise {

TileKernel find_avx512_vbmi(DType dtype, Element element) { return choose_words(dtype, element); }

}  // namespace te_mx::cpu::blockwise
