// The blockwise tile kernels for AVX-512.
#include "quantize/blockwise_words.hpp"

namespace te_mx::cpu::blockwise {

TileKernel find_avx512(DType dtype, Element element) { return choose_words(dtype, element); }

}  // namespace te_mx::cpu::blockwise
