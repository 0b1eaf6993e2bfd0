#include "decode/stream_f32.hpp"
#include "gemm/gemm_f32_isa.h"
#include "mxtile/simd/avx512.hpp"

namespace te_mx::cpu {

const KernelImpl* stream_f32_on_avx512() { return f32::StreamGemm<mxtile::simd::Avx512>::impl(); }

}  // namespace te_mx::cpu
