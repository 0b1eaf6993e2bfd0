// pybind11 module te_mx._native: Python integers in, plain structs out. Addresses travel as
// integers, so the module needs no torch header and one build serves every torch.
#include "bindings.hpp"
#include "bindings_fused.hpp"

namespace py = pybind11;
using namespace te_mx;

namespace {

// Everything gemm() takes besides the operands and the workspace, as one tuple: a call costs one
// cast an entry. (out, out_dtype, ldo, accumulate, bias, bias_dtype, gelu, aux, aux_dtype, gelu_in,
// gelu_in_dtype,
//  bias_grad_kind, bias_grad)
GemmArgs gemm_args(int32_t kernel, const py::tuple& lhs, const py::tuple& rhs, const py::tuple& e,
                   uintptr_t workspace, int64_t workspace_bytes, int threads) {
  GemmArgs a{};
  a.kernel = static_cast<Kernel>(kernel);
  a.lhs = operand(lhs);
  a.rhs = operand(rhs);
  a.out = ptr<void>(e[0].cast<uintptr_t>());
  a.out_dtype = static_cast<DType>(e[1].cast<int32_t>());
  a.ldo = e[2].cast<int64_t>();
  a.accumulate = e[3].cast<bool>();
  a.bias = ptr<const void>(e[4].cast<uintptr_t>());
  a.bias_dtype = static_cast<DType>(e[5].cast<int32_t>());
  a.gelu = static_cast<Gelu>(e[6].cast<int32_t>());
  a.aux = ptr<void>(e[7].cast<uintptr_t>());
  a.aux_dtype = static_cast<DType>(e[8].cast<int32_t>());
  a.gelu_in = ptr<const void>(e[9].cast<uintptr_t>());
  a.gelu_in_dtype = static_cast<DType>(e[10].cast<int32_t>());
  a.bias_grad_kind = static_cast<BiasGrad>(e[11].cast<int32_t>());
  a.bias_grad = ptr<float>(e[12].cast<uintptr_t>());
  a.workspace = ptr<void>(workspace);
  a.workspace_bytes = workspace_bytes;
  a.threads = threads;
  return a;
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "Native CPU kernels of te_mx. Use te_mx.backends.cpu, which checks arguments.";
  m.attr("STREAM_MAX_ROWS") = kStreamMaxRows;
  m.attr("COL_SUM_ROWS") = kColSumRows;
  m.attr("WIDE_SPREAD") = kWideSpread;

  m.def("isa_best", [] { return static_cast<int32_t>(isa_best()); });
  m.def("isa_current", [] { return static_cast<int32_t>(isa_current()); });
  m.def("parallel_team", [] { return parallel_team(); });  // "inline", "openmp" or "threads"
  m.def("isa_env_error", [] { return isa_env_error(); });  // str or None
  m.def("peak_gflops", [](int threads) {
    py::gil_scoped_release release;
    return peak_gflops(threads);
  });
  m.def("isa_available", [](int32_t level) { return isa_available(static_cast<Isa>(level)); });
  m.def("set_isa",
        [](int32_t level) { return static_cast<int32_t>(set_isa(static_cast<Isa>(level))); });
  m.def("kernel_available",
        [](int32_t kernel) { return kernel_available(static_cast<Kernel>(kernel)); });

  m.def("quantize",
        [](uintptr_t x, int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride,
           int32_t x_dtype, int32_t fmt, int32_t rule, uintptr_t row_codes, uintptr_t row_scales,
           uintptr_t col_codes, uintptr_t col_scales, bool col_transposed, uintptr_t col_sum,
           uintptr_t col_sum_ws, int threads) {
          QuantizeArgs a{};
          a.x = ptr<const void>(x);
          a.rows = rows;
          a.cols = cols;
          a.row_stride = row_stride;
          a.col_stride = col_stride;
          a.x_dtype = static_cast<DType>(x_dtype);
          a.fmt = static_cast<Format>(fmt);
          a.rule = static_cast<ScaleRule>(rule);
          a.row_codes = ptr<uint8_t>(row_codes);
          a.row_scales = ptr<uint8_t>(row_scales);
          a.col_codes = ptr<uint8_t>(col_codes);
          a.col_scales = ptr<uint8_t>(col_scales);
          a.col_transposed = col_transposed;
          a.col_sum = ptr<float>(col_sum);
          a.col_sum_ws = ptr<float>(col_sum_ws);
          a.threads = threads;
          py::gil_scoped_release release;
          return static_cast<int32_t>(quantize(a));
        });

  m.def("dequantize",
        [](uintptr_t codes, uintptr_t scales, int64_t rows, int64_t cols, bool blocks_along_rows,
           int32_t fmt, int32_t out_dtype, uintptr_t out, int threads) {
          DequantizeArgs a{};
          a.codes = ptr<const uint8_t>(codes);
          a.scales = ptr<const uint8_t>(scales);
          a.rows = rows;
          a.cols = cols;
          a.blocks_along_rows = blocks_along_rows;
          a.fmt = static_cast<Format>(fmt);
          a.out_dtype = static_cast<DType>(out_dtype);
          a.out = ptr<void>(out);
          a.threads = threads;
          py::gil_scoped_release release;
          return static_cast<int32_t>(dequantize(a));
        });

  m.def("packed_bytes", [](int32_t kernel, int32_t role, int64_t rows, int64_t k) {
    return packed_bytes(static_cast<Kernel>(kernel), static_cast<Role>(role), rows, k);
  });
  m.def("pack",
        [](int32_t kernel, int32_t role, const py::tuple& o, uintptr_t packed, int threads) {
          const Operand source = operand(o);
          py::gil_scoped_release release;
          return static_cast<int32_t>(pack(static_cast<Kernel>(kernel), static_cast<Role>(role),
                                           source, ptr<void>(packed), threads));
        });
  m.def("workspace_bytes",
        [](int32_t kernel, const py::tuple& lhs, const py::tuple& rhs, const py::tuple& epilogue) {
          return workspace_bytes(gemm_args(kernel, lhs, rhs, epilogue, 0, 0, 1));
        });
  bind_fused(m);
  bind_grouped(m);
  // Returns (status, kernel that ran).
  m.def("gemm",
        [](int32_t kernel, const py::tuple& lhs, const py::tuple& rhs, const py::tuple& epilogue,
           uintptr_t workspace, int64_t workspace_bytes, int threads) {
          GemmArgs a = gemm_args(kernel, lhs, rhs, epilogue, workspace, workspace_bytes, threads);
          Status status;
          {
            py::gil_scoped_release release;
            status = gemm(a);
          }
          return py::make_tuple(static_cast<int32_t>(status), static_cast<int32_t>(a.ran));
        });
}
