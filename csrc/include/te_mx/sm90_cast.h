// Numbers from one dtype to another, in sequences: the weights of a normalization, which its
// kernels read in fp32, and their gradients.
#pragma once

#include "te_mx/types.h"

namespace te_mx::sm90 {

// out[i] = first[i], and out[count + i] = second[i] if there is one, for i < count.
struct CastArgs {
  const void* first = nullptr;
  const void* second = nullptr;  // or null
  int64_t count = 0;
  DType from = DType::f32, to = DType::f32;
  void* out = nullptr;
  Execution execution;
};

Status cast(const CastArgs& args);

}  // namespace te_mx::sm90
