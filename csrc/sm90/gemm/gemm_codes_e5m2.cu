#include "gemm/gemm_codes_launch.cuh"

namespace te_mx::sm90 {

Status launch_codes_e5m2(const GemmArgs& args, bool lhs_comes, const Device& device) {
  return launch_codes<tile::Fp8::e5m2>(args, lhs_comes, device);
}

}  // namespace te_mx::sm90
