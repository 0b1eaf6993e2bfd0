#include "record.hpp"

namespace te_mx::bindings {

void bind_quantize_records(py::module_& m) {
  Record<OperandOut>()
      .field("codes", &OperandOut::codes)
      .field("scales", &OperandOut::scales)
      .field("layout", &OperandOut::layout)
      .field("hadamard", &OperandOut::hadamard)
      .field("signs", &OperandOut::signs)
      .field("tensor_scale", &OperandOut::tensor_scale)
      .field("tensor_scales", &OperandOut::tensor_scales)
      .add_to(m, "OperandOut");
  Record<QuantizeOut>()
      .field("element", &QuantizeOut::element)
      .part("scaling", &QuantizeOut::scaling, "")
      .field("rule", &QuantizeOut::rule)
      .field("amax_epsilon", &QuantizeOut::amax_epsilon)
      .field("spread", &QuantizeOut::spread)
      .part("row", &QuantizeOut::row, "row_")
      .part("col", &QuantizeOut::col, "col_")
      .field("col_sum", &QuantizeOut::col_sum)
      .field("col_sum_dtype", &QuantizeOut::col_sum_dtype)
      .field("col_sum_ws", &QuantizeOut::col_sum_ws)
      .field("seed", &QuantizeOut::seed)
      .field("first", &QuantizeOut::first)
      .add_to(m, "QuantizeOut");
  Record<QuantizeArgs>()
      .part("x", &QuantizeArgs::x, "x_")
      .part("to", &QuantizeArgs::to, "")
      .part("execution", &QuantizeArgs::execution, "")
      .add_to(m, "QuantizeArgs");
  Record<GroupedQuantizeArgs>()
      .part("all", &GroupedQuantizeArgs::all, "")
      .part("groups", &GroupedQuantizeArgs::groups, "groups_")
      .field("gather", &GroupedQuantizeArgs::gather)
      .add_to(m, "GroupedQuantizeArgs");
  Record<DequantizeArgs>()
      .part("operand", &DequantizeArgs::operand, "")
      .field("out", &DequantizeArgs::out)
      .field("out_dtype", &DequantizeArgs::out_dtype)
      .part("execution", &DequantizeArgs::execution, "")
      .add_to(m, "DequantizeArgs");
  Record<PackArgs>()
      .part("operand", &PackArgs::operand, "")
      .field("role", &PackArgs::role)
      .part("out", &PackArgs::out, "out_")
      .field("spread", &PackArgs::spread)
      .part("groups", &PackArgs::groups, "groups_")
      .field("out_stride", &PackArgs::out_stride)
      .field("rule", &PackArgs::rule)
      .part("execution", &PackArgs::execution, "")
      .add_to(m, "PackArgs");
  Record<RowSumsArgs>()
      .part("operand", &RowSumsArgs::operand, "")
      .field("out", &RowSumsArgs::out)
      .part("execution", &RowSumsArgs::execution, "")
      .add_to(m, "RowSumsArgs");
}

}  // namespace te_mx::bindings
