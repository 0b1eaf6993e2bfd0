// NVFP4 on AVX2.
#include "quantize/nvfp4_loops.hpp"

namespace te_mx::cpu::nvfp4 {

const Level& avx2_level() { return kLevel; }

}  // namespace te_mx::cpu::nvfp4
