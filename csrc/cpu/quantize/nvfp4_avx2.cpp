// NVFP4 on AVX2.
#include "mxtile/simd/avx2.hpp"
#include "quantize/nvfp4_loops.hpp"

namespace te_mx::cpu::nvfp4 {

const Level& avx2_level() { return kLevel<mxtile::simd::Avx2>; }

}  // namespace te_mx::cpu::nvfp4
