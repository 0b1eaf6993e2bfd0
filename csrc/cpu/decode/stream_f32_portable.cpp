#include "decode/stream_f32.hpp"
#include "gemm/gemm_f32_isa.h"
#include "mxtile/simd/portable.hpp"

namespace te_mx::cpu {

const KernelImpl* stream_f32_on_portable() {
  return f32::StreamGemm<mxtile::simd::Portable>::impl();
}

}  // namespace te_mx::cpu
