#include "fused/fused_rows.hpp"
#include "mxtile/simd/avx2.hpp"

namespace te_mx::cpu {

const RowKernels& row_kernels_avx2() { return fused_rows::kKernels<mxtile::simd::Avx2>; }

}  // namespace te_mx::cpu
