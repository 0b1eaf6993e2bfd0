#include "record.hpp"

namespace te_mx::bindings {

void bind_types(py::module_& m) {
  using py::arg;
  // Names of enumerators, as the records take their numbers.
  m.attr("LAYOUTS") = py::dict(arg("k_last") = 0, arg("k_first") = 1, arg("tiles") = 2,
                               arg("group_rows") = 3, arg("group_k") = 4, arg("standing") = 7);
  m.attr("SCALE_TYPES") = py::dict(arg("e8m0") = 0, arg("f32") = 1, arg("e4m3") = 2);
  m.attr("SCALE_RULES") =
      py::dict(arg("rceil") = 0, arg("floor") = 1, arg("even") = 2, arg("fp32") = 3,
               arg("pow2") = 4, arg("te") = 5, arg("torchao") = 6, arg("modelopt") = 7,
               arg("compressed_tensors") = 8, arg("te_4over6") = 9, arg("te_4over6_448") = 10,
               arg("te_4over6_mse") = 11, arg("te_4over6_mse_448") = 12);
  m.attr("TENSOR_SCALES") = py::dict(arg("all") = 0, arg("rows") = 1, arg("groups") = 2);

  // Of mxtile's table, by number.
  m.def("elements", [] {
    py::list all;
    for (int id = 0; id < kElements; ++id) {
      const mxtile::mx::ElementTraits& t = mxtile::mx::kElementTraits[id];
      const bool has_nan = t.nan_code != mxtile::mx::kNoCode;
      all.append(py::dict(
          arg("id") = id, arg("name") = t.name, arg("bits") = 1 + t.exponent_bits + t.mantissa_bits,
          arg("exponent_bits") = t.exponent_bits, arg("mantissa_bits") = t.mantissa_bits,
          arg("bias") = t.bias, arg("max") = t.max, arg("max_code") = t.max_code,
          arg("nan_code") = has_nan ? py::object(py::int_(t.nan_code)) : py::object(py::none()),
          arg("has_inf") = t.has_infinity, arg("has_negative_zero") = t.has_negative_zero));
    }
    return all;
  });

  Record<Matrix>()
      .field("data", &Matrix::data)
      .field("rows", &Matrix::rows)
      .field("cols", &Matrix::cols)
      .field("row_stride", &Matrix::row_stride)
      .field("col_stride", &Matrix::col_stride)
      .field("dtype", &Matrix::dtype)
      .add_to(m, "Matrix");
  Record<Scaling>()
      .field("scale_type", &Scaling::type)
      .field("block_rows", &Scaling::block_rows)
      .field("block_k", &Scaling::block_k)
      .add_to(m, "Scaling");
  Record<Operand>()
      .field("codes", &Operand::codes)
      .field("scales", &Operand::scales)
      .field("rows", &Operand::rows)
      .field("k", &Operand::k)
      .field("element", &Operand::element)
      .field("layout", &Operand::layout)
      .part("scaling", &Operand::scaling, "")
      .field("packed", &Operand::packed)
      .field("packed_stride", &Operand::packed_stride)
      .field("tensor_scale", &Operand::tensor_scale)
      .field("tensor_scales", &Operand::tensor_scales)
      .add_to(m, "Operand");
  Record<Groups>()
      .field("count", &Groups::count)
      .field("rows", &Groups::rows)
      .field("starts", &Groups::starts)
      .field("ends", &Groups::ends)
      .field("ends_int32", &Groups::ends_int32)
      .field("capacity", &Groups::capacity)
      .add_to(m, "Groups");
  Record<Execution>()
      .field("threads", &Execution::threads)
      .field("device", &Execution::device)
      .field("stream", &Execution::stream)
      .field("workspace", &Execution::workspace)
      .field("workspace_bytes", &Execution::workspace_bytes)
      .field("kernel", &Execution::kernel)
      .field("few_rows_kernel", &Execution::few_rows_kernel)
      .field("invariant", &Execution::invariant)
      .field("parts", &Execution::parts)
      .add_to(m, "Execution");
}

}  // namespace te_mx::bindings
