#include "record.hpp"

namespace te_mx::bindings {

py::dict as_dict(const LinearOffsets& o) {
  py::dict all;
  const auto operand = [&](const char* name, const OperandOffsets& at) {
    all[name] = py::make_tuple(at.codes, at.scales, at.end);
  };
  operand("x_row", o.x_row), operand("w_row", o.w_row), operand("x_col", o.x_col);
  operand("w_col", o.w_col), operand("g_row", o.g_row), operand("g_col", o.g_col);
  operand("w_again", o.w_again), operand("g_kept", o.g_kept);
  all["forward_bytes"] = o.forward_bytes;
  all["backward_bytes"] = o.backward_bytes;
  return all;
}

void bind_linear_records(py::module_& m) {
  Record<LinearArgs>()
      .field("m", &LinearArgs::m)
      .field("n", &LinearArgs::n)
      .field("k", &LinearArgs::k)
      .field("x_columns", &LinearArgs::x_columns)
      .field("w_columns", &LinearArgs::w_columns)
      .field("forward", &LinearArgs::forward)
      .field("backward", &LinearArgs::backward)
      .part("scaling", &LinearArgs::scaling, "")
      .part("w_scaling", &LinearArgs::w_scaling, "w_")
      .field("rule", &LinearArgs::rule)
      .field("amax_epsilon", &LinearArgs::amax_epsilon)
      .field("spread", &LinearArgs::spread)
      .part("x", &LinearArgs::x, "x_")
      .part("w", &LinearArgs::w, "w_")
      .part("x_row", &LinearArgs::x_row, "x_row_")
      .part("x_col", &LinearArgs::x_col, "x_col_")
      .part("w_col", &LinearArgs::w_col, "w_col_")
      .field("x_given", &LinearArgs::x_given)
      .field("w_kept", &LinearArgs::w_kept)
      .field("w_given", &LinearArgs::w_given)
      .part("w_row", &LinearArgs::w_row, "w_row_")
      .field("bias", &LinearArgs::bias)
      .field("bias_dtype", &LinearArgs::bias_dtype)
      .field("y", &LinearArgs::y)
      .field("y_dtype", &LinearArgs::y_dtype)
      .part("g", &LinearArgs::g, "g_")
      .field("dx", &LinearArgs::dx)
      .field("dx_dtype", &LinearArgs::dx_dtype)
      .field("dx_accumulate", &LinearArgs::dx_accumulate)
      .field("dw", &LinearArgs::dw)
      .field("dw_dtype", &LinearArgs::dw_dtype)
      .field("dw_accumulate", &LinearArgs::dw_accumulate)
      .part("g_col", &LinearArgs::g_col, "g_col_")
      .field("db", &LinearArgs::db)
      .field("db_dtype", &LinearArgs::db_dtype)
      .part("execution", &LinearArgs::execution, "")
      .add_to(m, "LinearArgs");
}

}  // namespace te_mx::bindings
