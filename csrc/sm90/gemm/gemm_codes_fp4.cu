#include "gemm/gemm_codes_launch.cuh"

namespace te_mx::sm90 {

Status launch_codes_fp4(const GemmArgs& args, const Device& device) {
  return launch_codes<CodesOperands<tile::Fp8::e4m3, true>>(args, device);
}

}  // namespace te_mx::sm90
