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

// What to quantize to. row, col: (codes, scales, form). Forms: 0 plain, columns transposed; 1
// packed; 2, of col only, plain columns that lie like x. False for forms that do not exist.
inline bool set_outputs(sm90::QuantizeArgs& a, int fmt, int rule, const py::tuple& row,
                        const py::tuple& col, int spread, uintptr_t col_sum, uintptr_t col_sum_ws) {
  a.fmt = static_cast<Format>(fmt), a.rule = static_cast<ScaleRule>(rule), a.spread = spread;
  const int row_form = row[2].cast<int>(), col_form = col[2].cast<int>();
  if (row_form < 0 || row_form > 1 || col_form < 0 || col_form > 2) return false;
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
  a.col_sum = reinterpret_cast<float*>(col_sum);
  a.col_sum_ws = reinterpret_cast<float*>(col_sum_ws);
  return true;
}

// The steps that end in a quantizer.
void bind_sm90_fused(py::module_& m);

}  // namespace te_mx::bindings
