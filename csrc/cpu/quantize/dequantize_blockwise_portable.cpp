// Decoding codes with fp32 scales on any CPU.
#include "quantize/dequantize_loops.hpp"

namespace te_mx::cpu::dequantize_wide {

RunKernel find_portable(DType dtype, Element element) { return choose(dtype, element); }

}  // namespace te_mx::cpu::dequantize_wide
