#include "gemm/gemm_factors.cuh"
#include "gemm/gemm_launch.cuh"

namespace te_mx::sm90 {

Status launch_tile_factors_192x128_cluster2(const GemmArgs& args, const Device& device) {
  return launch_any<BlockShape<192, 4, 2, 2>, TileFactors<kNoTurns>>(Dense{args}, device);
}

}  // namespace te_mx::sm90
