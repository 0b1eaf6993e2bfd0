#include "gemm/gemm_split_launch.cuh"

namespace te_mx::sm90 {

Status launch_split_64x128(const GemmArgs& a, const Device& device) {
  return launch_split_any<GemmConfig<64, 7, 1, 2>>(a, device);
}

}  // namespace te_mx::sm90
