#include "gemm/gemm_launch.cuh"

namespace te_mx::sm90 {

Status launch_192x128_cluster2(const GemmArgs& args, const Device& device) {
  return launch_any<BlockShape<192, 4, 2, 2>, PowerOfTwoScales>(Dense{args}, device);
}

}  // namespace te_mx::sm90
