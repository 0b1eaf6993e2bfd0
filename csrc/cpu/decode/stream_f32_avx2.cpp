#include "decode/stream_f32.hpp"
#include "gemm/gemm_f32_isa.h"
#include "mxtile/simd/avx2.hpp"

namespace te_mx::cpu {

const KernelImpl* stream_f32_on_avx2() { return f32::StreamGemm<mxtile::simd::Avx2>::impl(); }

}  // namespace te_mx::cpu
