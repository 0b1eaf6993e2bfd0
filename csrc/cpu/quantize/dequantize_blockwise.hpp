// Between dequantize() of fp32 scales and the kernels that decode a run of adjacent elements.
#pragma once

#include <cstdint>

#include "te_mx/cpu.h"

namespace te_mx::cpu {

// dequantize() of fp32 scales.
Status dequantize_blockwise(const DequantizeArgs& args);

namespace dequantize_wide {

struct Run {
  const uint8_t* codes;
  const float* scales;  // one for every 128 elements, or one an element when each
  bool each;
  int64_t n;
  void* out;
};

using RunKernel = void (*)(const Run& run);

RunKernel find_portable(DType dtype, Element element);
RunKernel find_avx2(DType dtype, Element element);
RunKernel find_avx512(DType dtype, Element element);

}  // namespace dequantize_wide
}  // namespace te_mx::cpu
