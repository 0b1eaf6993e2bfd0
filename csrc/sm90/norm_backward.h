// The backward pass of a normalization where a cluster keeps rows in shared memory
// (norm_backward_strips.cu), for the matrices that suit it.
#pragma once

#include "te_mx/sm90_fused.h"

namespace te_mx::sm90 {

// Whether norm_backward_strips() takes it.
bool fits_strips(const NormBackwardArgs& args);
Status norm_backward_strips(const NormBackwardArgs& args);

}  // namespace te_mx::sm90
