#include "record.hpp"

namespace te_mx::bindings {

void bind_gemm_records(py::module_& m) {
  Record<Epilogue>()
      .field("out", &Epilogue::out)
      .field("ldo", &Epilogue::ldo)
      .field("out_dtype", &Epilogue::out_dtype)
      .field("accumulate", &Epilogue::accumulate)
      .field("bias", &Epilogue::bias)
      .field("bias_dtype", &Epilogue::bias_dtype)
      .field("gelu", &Epilogue::gelu)
      .field("aux", &Epilogue::aux)
      .field("aux_dtype", &Epilogue::aux_dtype)
      .field("gelu_in", &Epilogue::gelu_in)
      .field("gelu_in_dtype", &Epilogue::gelu_in_dtype)
      .field("bias_grad_kind", &Epilogue::bias_grad_kind)
      .field("bias_grad", &Epilogue::bias_grad)
      .add_to(m, "Epilogue");
  Record<GemmArgs>()
      .part("lhs", &GemmArgs::lhs, "lhs_")
      .part("rhs", &GemmArgs::rhs, "rhs_")
      .part("values", &GemmArgs::values, "values_")
      .part("epilogue", &GemmArgs::epilogue, "")
      .part("execution", &GemmArgs::execution, "")
      .add_to(m, "GemmArgs");
  Record<GroupedGemmArgs>()
      .part("gemm", &GroupedGemmArgs::gemm, "")
      .part("groups", &GroupedGemmArgs::groups, "groups_")
      .field("along_k", &GroupedGemmArgs::along_k)
      .field("first_rows", &GroupedGemmArgs::first_rows)
      .add_to(m, "GroupedGemmArgs");
}

}  // namespace te_mx::bindings
