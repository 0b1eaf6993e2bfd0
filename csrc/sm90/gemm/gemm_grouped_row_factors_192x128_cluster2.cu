#include "gemm/gemm_factors.cuh"
#include "gemm/gemm_grouped_launch.cuh"

namespace te_mx::sm90 {

Status launch_grouped_row_factors_192x128_cluster2(const GroupedGemmArgs& args,
                                                   const Device& device) {
  return launch_any<BlockShape<192, 4, 2, 2>, RowFactors<0>>(Grouped{args}, device);
}

}  // namespace te_mx::sm90
