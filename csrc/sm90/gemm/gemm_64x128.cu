#include "gemm/gemm_launch.cuh"

namespace te_mx::sm90 {

Status launch_64x128(const GemmArgs& args, const Device& device) {
  return launch_any<BlockShape<64, 7, 1, 2>, PowerOfTwoScales>(Dense{args}, device);
}

}  // namespace te_mx::sm90
