// Few rows to tiles (few_rows.cu).
#pragma once

#include "quantize/quantize_task.h"

namespace te_mx::sm90 {

// The bytes of the quantizer; unsupported where that is to be asked.
Status quantize_few_rows(const QuantizeTask& q);

}  // namespace te_mx::sm90
