// Decoding codes with fp32 scales with AVX2.
#include "quantize/dequantize_loops.hpp"

namespace te_mx::cpu::dequantize_wide {

RunKernel find_avx2(DType dtype, Element element) { return choose(dtype, element); }

}  // namespace te_mx::cpu::dequantize_wide
