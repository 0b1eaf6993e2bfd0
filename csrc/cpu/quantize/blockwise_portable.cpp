// The blockwise tile kernel for any CPU.
#include "quantize/blockwise_loops.hpp"

namespace te_mx::cpu::blockwise {

TileKernel find_portable(DType dtype, Element element) { return choose(dtype, element); }

}  // namespace te_mx::cpu::blockwise
