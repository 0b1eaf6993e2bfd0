#include "gemm_f32_isa.h"
#include "mxtile/simd/portable.hpp"
#include "stream_f32.hpp"

namespace te_mx::cpu {

const KernelImpl* stream_f32_on_portable() {
  return f32::StreamGemm<mxtile::simd::Portable>::impl();
}

}  // namespace te_mx::cpu
