// What the kernels of this backend take of formats and layouts.
#pragma once

#include "te_mx/quantize.h"

namespace te_mx::cpu {

// Of a plain operand to read.
inline Status check_operand(const Operand& o) {
  if (o.layout != Layout::k_last && o.layout != Layout::k_first) return Status::unsupported;
  return check_format(o.element, o.scaling);
}

// The same of a GEMM, which takes fp32 scales too.
inline Status check_factor(const Operand& o) {
  if (!is_blockwise(o.scaling)) return check_operand(o);
  if (o.layout != Layout::k_last && o.layout != Layout::k_first) return Status::unsupported;
  if (!known(o.element)) return Status::bad_argument;
  return is_fp8(o.element) || is_fnuz(o.element) ? Status::ok : Status::unsupported;
}

// Of what a quantizer makes, whatever its format.
inline Status check_places(const QuantizeOut& out) {
  const Layout col = out.col.layout;
  const bool layouts =
      out.row.layout == Layout::k_last && (col == Layout::k_last || col == Layout::k_first);
  const bool sums = out.col_sum == nullptr || out.col_sum_dtype == DType::f32;
  return layouts && sums && rounds_plainly(out) ? Status::ok : Status::unsupported;
}

// Of what the MX quantizer makes.
inline Status check_out(const QuantizeOut& out) {
  const Status status = check_format(out.element, out.scaling, out.rule);
  return status == Status::ok ? check_places(out) : status;
}

// Of what the blockwise quantizer makes.
inline Status check_blockwise_out(const QuantizeOut& out) {
  if (!known(out.element) || !known(out.rule) || !(out.amax_epsilon >= 0))
    return Status::bad_argument;
  if (!is_blockwise(out.scaling) || !is_f32_rule(out.rule)) return Status::unsupported;
  if (!is_fp8(out.element) && !is_fnuz(out.element)) return Status::unsupported;
  return check_places(out);
}

}  // namespace te_mx::cpu
