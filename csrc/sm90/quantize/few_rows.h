// Few rows to tiles (few_rows.cu).
#pragma once

#include "quantize/quantize_task.h"

namespace te_mx::sm90 {

// The bytes of the quantizer; unsupported where that is to be asked. To MXFP8, and to FP8 with
// factors of 1 x 128.
Status quantize_few_rows(const QuantizeTask& q);
Status quantize_few_factors(const QuantizeTask& q, float epsilon);

}  // namespace te_mx::sm90
