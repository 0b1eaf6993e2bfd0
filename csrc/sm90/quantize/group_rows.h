// Rows of groups, quantized along them alone (group_rows.cu).
#pragma once

#include "quantize/quantize_task.h"
#include "te_mx/fused.h"

namespace te_mx::sm90 {

// Of a matrix, whose rows may be `gather` others; act: its gated activation, without groups where
// there are few tiles. The bytes of the quantizer and of act_kernel; unsupported where these are
// needed.
Status quantize_group_rows(const QuantizeTask& q, const Groups& groups, const int32_t* gather);
Status activate_group_rows(const ActArgs& a, const QuantizeTask& q, const Groups* groups);

}  // namespace te_mx::sm90
