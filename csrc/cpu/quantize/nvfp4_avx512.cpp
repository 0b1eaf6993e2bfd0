// NVFP4 on AVX-512.
#include "quantize/nvfp4_loops.hpp"

namespace te_mx::cpu::nvfp4 {

const Level& avx512_level() { return kLevel; }

}  // namespace te_mx::cpu::nvfp4
