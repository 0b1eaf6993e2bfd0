// Decoding codes with fp32 scales with AVX-512.
#include "quantize/dequantize_loops.hpp"

namespace te_mx::cpu::dequantize_wide {

RunKernel find_avx512(DType dtype, Element element) { return choose(dtype, element); }

}  // namespace te_mx::cpu::dequantize_wide
