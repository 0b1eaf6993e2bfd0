// The quantizer of two matrices in one launch.
#pragma once

#include "quantize/quantize_task.h"

namespace te_mx::sm90 {

// Both matrices, the first without col_sum; or `one` alone where `two` is null. `zeros`, if there
// are any, are words that become 0. Unsupported where that has no instance: nothing happened.
Status quantize_at_once(const QuantizeTask& one, const QuantizeTask* two, uint32_t* zeros,
                        int64_t words);

}  // namespace te_mx::sm90
