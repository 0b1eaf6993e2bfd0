#include "gemm/gemm_split_launch.cuh"

namespace te_mx::sm90 {

Status launch_split_64x128(const GemmArgs& args, const Device& device) {
  return launch_any<BlockShape<64, 7, 1, 2>, PowerOfTwoScales>(Split{args}, device);
}

}  // namespace te_mx::sm90
