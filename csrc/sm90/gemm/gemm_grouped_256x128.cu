#include "gemm/gemm_grouped_launch.cuh"

namespace te_mx::sm90 {

Status launch_grouped_256x128(const GroupedGemmArgs& args, const Device& device) {
  return launch_any<BlockShape<256, 4, 1, 1>, PowerOfTwoScales>(Grouped{args}, device);
}

}  // namespace te_mx::sm90
