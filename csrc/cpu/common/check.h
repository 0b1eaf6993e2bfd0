// What the kernels of this backend take of formats and layouts.
#pragma once

#include <initializer_list>

#include "te_mx/quantize.h"

namespace te_mx::cpu {

// Of an MX format: codes of 8 and of 4 bits.
inline Status check_mx(Element element, const Scaling& scaling) {
  const bool fp4 = is_fp4(element) && is_mx(scaling);
  return fp4 ? Status::ok : check_format(element, scaling);
}

// Of a plain operand to read.
inline Status check_operand(const Operand& o) {
  if (o.layout != Layout::k_last && o.layout != Layout::k_first) return Status::unsupported;
  return check_mx(o.element, o.scaling);
}

// Of NVFP4 to read.
inline Status check_nvfp4(const Operand& o) {
  if (o.layout != Layout::k_last && o.layout != Layout::k_first) return Status::unsupported;
  if (!known(o.element) || (o.tensor_scale == nullptr && o.rows > 0)) return Status::bad_argument;
  return is_fp4(o.element) ? Status::ok : Status::unsupported;
}

// The same of a GEMM, which takes fp32 scales and NVFP4 too.
inline Status check_factor(const Operand& o) {
  if (is_nvfp4(o.scaling)) return check_nvfp4(o);
  if (!is_blockwise(o.scaling)) return check_operand(o);
  if (o.layout != Layout::k_last && o.layout != Layout::k_first) return Status::unsupported;
  if (!known(o.element)) return Status::bad_argument;
  return is_fp8(o.element) || is_fnuz(o.element) ? Status::ok : Status::unsupported;
}

// The same of dequantize() with fp32 scales, which takes blocks that stand upright too.
inline Status check_wide(const Operand& o) {
  const auto side = [](int32_t n) { return n == 1 || n == kWideBlock; };
  if (o.layout != Layout::k_last && o.layout != Layout::k_first) return Status::unsupported;
  if (!known(o.element)) return Status::bad_argument;
  const bool blocks = side(o.scaling.block_rows) && side(o.scaling.block_k);
  return blocks && (is_fp8(o.element) || is_fnuz(o.element)) ? Status::ok : Status::unsupported;
}

// Of what a quantizer makes, whatever its format.
inline Status check_places(const QuantizeOut& out) {
  const Layout col = out.col.layout;
  const bool layouts =
      out.row.layout == Layout::k_last && (col == Layout::k_last || col == Layout::k_first);
  const bool sums = out.col_sum == nullptr || out.col_sum_dtype == DType::f32;
  return layouts && sums ? Status::ok : Status::unsupported;
}

// Of what the MX quantizer makes.
inline Status check_out(const QuantizeOut& out) {
  if (!known(out.rule)) return Status::bad_argument;
  const Status status = check_mx(out.element, out.scaling);
  if (status != Status::ok) return status;
  for (const int32_t size : {out.row.hadamard, out.col.hadamard}) {
    if (size != 0 && size != 16 && size != 32) return Status::bad_argument;
  }
  const bool other = is_f32_rule(out.rule) || is_writer(out.rule);
  return other ? Status::unsupported : check_places(out);
}

// Of what the blockwise quantizer makes.
inline Status check_blockwise_out(const QuantizeOut& out) {
  if (!known(out.element) || !known(out.rule) || !(out.amax_epsilon >= 0))
    return Status::bad_argument;
  if (!is_blockwise(out.scaling) || !is_f32_rule(out.rule)) return Status::unsupported;
  if (!rounds_plainly(out)) return Status::unsupported;
  if (!is_fp8(out.element) && !is_fnuz(out.element)) return Status::unsupported;
  return check_places(out);
}

}  // namespace te_mx::cpu
