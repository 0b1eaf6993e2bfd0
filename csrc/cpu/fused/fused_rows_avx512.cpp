#include "fused/fused_rows.hpp"
#include "mxtile/simd/avx512.hpp"

namespace te_mx::cpu {

const RowKernels& row_kernels_avx512() { return fused_rows::kKernels<mxtile::simd::Avx512>; }

}  // namespace te_mx::cpu
