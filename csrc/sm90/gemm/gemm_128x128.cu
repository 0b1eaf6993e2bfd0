#include "gemm/gemm_launch.cuh"

namespace te_mx::sm90 {

Status launch_128x128(const GemmArgs& args, const Device& device) {
  return launch_any<BlockShape<128, 5, 1, 2>, PowerOfTwoScales>(Dense{args}, device);
}

}  // namespace te_mx::sm90
