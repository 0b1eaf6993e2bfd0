// The fp32 kernels of each instruction set; gemm_f32.cpp names those this build has.
#pragma once

#include "gemm/gemm_internal.hpp"

namespace te_mx::cpu {

const KernelImpl* f32_on_portable();
const KernelImpl* f32_on_avx2();
const KernelImpl* f32_on_avx512();
const KernelImpl* stream_f32_on_portable();
const KernelImpl* stream_f32_on_avx2();
const KernelImpl* stream_f32_on_avx512();

}  // namespace te_mx::cpu
