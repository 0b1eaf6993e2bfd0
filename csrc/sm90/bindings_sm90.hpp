// What the binding files of te_mx._sm90 share.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "te_mx/sm90.h"

namespace te_mx::bindings {

namespace py = pybind11;

template <class T>
T* ptr(const py::handle& address) {
  return reinterpret_cast<T*>(address.cast<uintptr_t>());
}

// (codes, scales)
inline sm90::Packed packed(const py::handle& h) {
  const auto t = py::reinterpret_borrow<py::tuple>(h);
  return {ptr<uint8_t>(t[0]), ptr<uint32_t>(t[1])};
}

// A call is (x, fmt, rule, row, col, spread, col_sum, col_sum_dtype, col_sum_ws).
// x: (address, rows, cols, stride, dtype); row, col: (codes, scales, form). Forms: 0 plain, columns
// transposed; 1 packed; 2, of col only, plain columns that lie like x. Another form makes the call
// a bad one.
inline sm90::QuantizeArgs quantize_args(const py::tuple& call, uintptr_t stream) {
  const auto side = [&](int i) { return py::reinterpret_borrow<py::tuple>(call[i]); };
  const py::tuple x = side(0), row = side(3), col = side(4);
  sm90::QuantizeArgs a{};
  a.x = ptr<const void>(x[0]);
  a.rows = x[1].cast<int64_t>(), a.cols = x[2].cast<int64_t>();
  a.x_stride = x[3].cast<int64_t>(), a.x_dtype = static_cast<DType>(x[4].cast<int>());
  a.fmt = static_cast<Format>(call[1].cast<int>());
  a.rule = static_cast<ScaleRule>(call[2].cast<int>());
  a.spread = call[5].cast<int>();
  const int row_form = row[2].cast<int>(), col_form = col[2].cast<int>();
  if (row_form < 0 || row_form > 1 || col_form < 0 || col_form > 2) a.spread = -1;
  if (row_form == 1) {
    a.row_packed = packed(row);
  } else {
    a.row_codes = ptr<uint8_t>(row[0]), a.row_scales = ptr<uint8_t>(row[1]);
  }
  if (col_form == 1) {
    a.col_packed = packed(col);
  } else {
    a.col_codes = ptr<uint8_t>(col[0]), a.col_scales = ptr<uint8_t>(col[1]);
    a.col_lies_as_x = col_form == 2;
  }
  a.col_sum = ptr<void>(call[6]), a.col_sum_dtype = static_cast<DType>(call[7].cast<int>());
  a.col_sum_ws = ptr<float>(call[8]);
  a.stream = reinterpret_cast<void*>(stream);
  return a;
}

// problem: (lhs, lhs_fmt, rhs, rhs_fmt, m, n, k); epilogue: (out, out_dtype, ldo, accumulate, bias,
// bias_dtype, gelu, aux, aux_dtype, gelu_in, gelu_in_dtype, bias_grad)
sm90::GemmArgs gemm_args(const py::tuple& problem, const py::tuple& epilogue, uintptr_t workspace,
                         int64_t workspace_bytes, int config, uintptr_t stream);

// The steps that end in a quantizer.
void bind_sm90_fused(py::module_& m);

// Groups of rows.
void bind_sm90_grouped(py::module_& m);

// Linear layers.
void bind_sm90_linear(py::module_& m);

}  // namespace te_mx::bindings
