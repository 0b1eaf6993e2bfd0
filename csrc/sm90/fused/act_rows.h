// Activations of rows by themselves (act_rows.cu).
#pragma once

#include "quantize/quantize_task.h"
#include "te_mx/fused.h"

namespace te_mx::sm90 {

// Of a call without groups; unsupported where act_kernel is needed.
Status act_rows(const ActArgs& a, const QuantizeTask& q);

}  // namespace te_mx::sm90
