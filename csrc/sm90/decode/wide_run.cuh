// The launches of kernels with 128 rows of weights a CTA.
#pragma once

#include <algorithm>

#include "common/launch.h"
#include "decode/aligned_rows.cuh"
#include "decode/decode_run.cuh"

namespace te_mx::sm90 {

// Prepares all rows of x, in so many blocks, for a kernel that follows at once.
Status launch_align(const AlignedInput& x, int blocks, void* stream);
// The same, codes at the start of a workspace and their scales behind them: says where in x.
Status launch_align_beside(AlignedInput& x, void* workspace, int blocks, void* stream);

// Shared memory of a CTA. NOTE: two share an SM: those of a product and of the next.
inline constexpr int kWideSmem = 112 * 1024;

}  // namespace te_mx::sm90
