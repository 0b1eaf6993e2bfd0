// What the kernels of this backend take of formats and layouts.
#pragma once

#include "te_mx/quantize.h"

namespace te_mx::cpu {

// Of a plain operand to read.
inline Status check_operand(const Operand& o) {
  if (o.layout != Layout::k_last && o.layout != Layout::k_first) return Status::unsupported;
  return check_format(o.element, o.scaling);
}

// Of what a quantizer makes.
inline Status check_out(const QuantizeOut& out) {
  const Status status = check_format(out.element, out.scaling, out.rule);
  if (status != Status::ok) return status;
  const Layout col = out.col.layout;
  const bool layouts =
      out.row.layout == Layout::k_last && (col == Layout::k_last || col == Layout::k_first);
  const bool sums = out.col_sum == nullptr || out.col_sum_dtype == DType::f32;
  return layouts && sums ? Status::ok : Status::unsupported;
}

}  // namespace te_mx::cpu
