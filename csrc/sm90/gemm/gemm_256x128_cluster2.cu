#include "gemm/gemm_launch.cuh"

namespace te_mx::sm90 {

Status launch_256x128_cluster2(const GemmArgs& args, const Device& device) {
  return launch_any<BlockShape<256, 3, 2, 4>, PowerOfTwoScales>(Dense{args}, device);
}

}  // namespace te_mx::sm90
