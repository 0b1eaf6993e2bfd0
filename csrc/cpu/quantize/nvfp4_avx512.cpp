// NVFP4 on AVX-512.
#include "mxtile/simd/avx512.hpp"
#include "quantize/nvfp4_loops.hpp"

namespace te_mx::cpu::nvfp4 {

const Level& avx512_level() { return kLevel<mxtile::simd::Avx512>; }

}  // namespace te_mx::cpu::nvfp4
