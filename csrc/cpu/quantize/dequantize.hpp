// Between dequantize() and the kernels that decode a run of adjacent elements.
#pragma once

#include <cstdint>

#include "te_mx/cpu.h"

namespace te_mx::cpu::dequantize_run {

struct Run {
  const uint8_t* codes;   // of 4 bits, two a byte unless each has a scale
  const uint8_t* scales;  // one for every 32 elements, or one an element when each
  bool each;
  int64_t n;
  void* out;
};

using Kernel = void (*)(const Run& run);

Kernel find_portable(DType dtype, Element element);
Kernel find_avx512(DType dtype, Element element);

}  // namespace te_mx::cpu::dequantize_run
