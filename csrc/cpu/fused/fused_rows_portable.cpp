#include "fused/fused_rows.hpp"
#include "mxtile/simd/portable.hpp"

namespace te_mx::cpu {

const RowKernels& row_kernels_portable() { return fused_rows::kKernels<mxtile::simd::Portable>; }

}  // namespace te_mx::cpu
