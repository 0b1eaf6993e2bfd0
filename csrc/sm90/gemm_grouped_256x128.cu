#include "gemm_grouped_launch.cuh"

namespace te_mx::sm90 {

Status launch_grouped_256x128(const GemmArgs& a, const Groups& g, bool along_k,
                              const Device& device) {
  return launch_grouped_any<GemmConfig<256, 4, 1, 1>>(a, g, along_k, device);
}

}  // namespace te_mx::sm90
