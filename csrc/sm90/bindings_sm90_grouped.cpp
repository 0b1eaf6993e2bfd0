// The grouped calls of te_mx._sm90 (te_mx/sm90_grouped.h).
#include "te_mx/sm90_grouped.h"

#include <pybind11/stl.h>

#include <vector>

#include "bindings_sm90.hpp"
#include "device.h"

namespace te_mx::bindings {

using namespace te_mx::sm90;

namespace {

// (address, whether int64, count, rows, capacity)
Groups groups_of(const py::tuple& t) {
  return {ptr<const void>(t[0]), t[1].cast<bool>(), t[2].cast<int64_t>(), t[3].cast<int64_t>(),
          t[4].cast<int64_t>()};
}

// x: (address, rows, cols, stride, dtype); row, col: (codes, scales) or zeros.
sm90::QuantizeArgs packed_args(const py::tuple& x, int fmt, int rule, const py::tuple& row,
                               const py::tuple& col, int spread, uintptr_t stream) {
  sm90::QuantizeArgs a{};
  a.x = ptr<const void>(x[0]);
  a.rows = x[1].cast<int64_t>(), a.cols = x[2].cast<int64_t>();
  a.x_stride = x[3].cast<int64_t>(), a.x_dtype = static_cast<DType>(x[4].cast<int>());
  a.fmt = static_cast<Format>(fmt), a.rule = static_cast<ScaleRule>(rule), a.spread = spread;
  a.row_packed = packed(row), a.col_packed = packed(col);
  a.stream = reinterpret_cast<void*>(stream);
  return a;
}

// weights: (codes, scales, fmt, k_first); out: (codes, scales).
sm90::PackArgs plain_args(const py::tuple& weights, int64_t rows, int64_t k, int spread,
                          const py::tuple& out, uintptr_t stream) {
  sm90::PackArgs a{};
  a.codes = ptr<const uint8_t>(weights[0]), a.scales = ptr<const uint8_t>(weights[1]);
  a.fmt = static_cast<Format>(weights[2].cast<int>()), a.k_first = weights[3].cast<bool>();
  a.rows = rows, a.k = k, a.spread = spread, a.out = packed(out);
  a.stream = reinterpret_cast<void*>(stream);
  return a;
}

}  // namespace

void bind_sm90_grouped(py::module_& m) {
  m.def("group_tiles", &group_tiles);
  m.def("grouped_config_count", &grouped_config_count);
  m.def("grouped_config_name", &grouped_config_name);

  m.def(
      "upload_ends",
      [](const std::vector<int64_t>& ends, uintptr_t to, uintptr_t stream, int device) {
        const DeviceScope scope(device);
        return static_cast<int>(upload_ends(ends.data(), static_cast<int64_t>(ends.size()),
                                            reinterpret_cast<int32_t*>(to),
                                            reinterpret_cast<void*>(stream)));
      },
      py::arg("ends"), py::arg("to"), py::arg("stream"), py::arg("device") = -1);
  m.def(
      "quantize_grouped",
      [](const py::tuple& x, const py::tuple& groups, int fmt, int rule, const py::tuple& row,
         const py::tuple& col, int spread, uintptr_t col_sum, uintptr_t col_sum_ws,
         uintptr_t stream, int device) {
        sm90::QuantizeArgs a = packed_args(x, fmt, rule, row, col, spread, stream);
        a.col_sum = reinterpret_cast<void*>(col_sum), a.col_sum_dtype = DType::f32;
        a.col_sum_ws = reinterpret_cast<float*>(col_sum_ws);
        const DeviceScope scope(device);
        return static_cast<int>(quantize_grouped(a, groups_of(groups)));
      },
      py::arg("x"), py::arg("groups"), py::arg("fmt"), py::arg("rule"), py::arg("row"),
      py::arg("col"), py::arg("spread"), py::arg("col_sum"), py::arg("col_sum_ws"),
      py::arg("stream"), py::arg("device") = -1);

  // x as above, its address unused; xs: an address for each matrix. A spread below 0 asks for plain
  // codes and scales, columns as they lie.
  m.def(
      "quantize_stacked",
      [](const py::tuple& x, const std::vector<uintptr_t>& xs, int fmt, int rule,
         const py::tuple& row, const py::tuple& col, int spread, uintptr_t stream, int device) {
        std::vector<const void*> from;
        for (const uintptr_t address : xs) from.push_back(reinterpret_cast<const void*>(address));
        sm90::QuantizeArgs a = packed_args(x, fmt, rule, row, col, spread, stream);
        if (spread < 0) {
          a.row_packed = a.col_packed = {}, a.spread = 0, a.col_lies_as_x = true;
          a.row_codes = ptr<uint8_t>(row[0]), a.row_scales = ptr<uint8_t>(row[1]);
          a.col_codes = ptr<uint8_t>(col[0]), a.col_scales = ptr<uint8_t>(col[1]);
        }
        const DeviceScope scope(device);
        return static_cast<int>(
            quantize_stacked(a, from.data(), static_cast<int64_t>(from.size())));
      },
      py::arg("x"), py::arg("xs"), py::arg("fmt"), py::arg("rule"), py::arg("row"), py::arg("col"),
      py::arg("spread"), py::arg("stream"), py::arg("device") = -1);

  // weights: (codes, scales, fmt, k_first), plain, each [rows, k].
  m.def(
      "pack_stacked",
      [](const py::tuple& weights, int64_t rows, int64_t k, const py::tuple& groups, int spread,
         const py::tuple& out, uintptr_t stream, int device) {
        const DeviceScope scope(device);
        return static_cast<int>(
            pack_stacked(plain_args(weights, rows, k, spread, out, stream), groups_of(groups)));
      },
      py::arg("weights"), py::arg("rows"), py::arg("k"), py::arg("groups"), py::arg("spread"),
      py::arg("out"), py::arg("stream"), py::arg("device") = -1);
  m.def(
      "columns_of_stacked",
      [](const py::tuple& weights, int64_t rows, int64_t k, int64_t count, int rule, int spread,
         const py::tuple& out, uintptr_t stream, int device) {
        const DeviceScope scope(device);
        return static_cast<int>(
            columns_of_stacked(plain_args(weights, rows, k, spread, out, stream),
                               static_cast<ScaleRule>(rule), count));
      },
      py::arg("weights"), py::arg("rows"), py::arg("k"), py::arg("count"), py::arg("rule"),
      py::arg("spread"), py::arg("out"), py::arg("stream"), py::arg("device") = -1);

  m.def(
      "gemm_rows",
      [](const py::tuple& problem, const py::tuple& epilogue, const py::tuple& groups, int config,
         uintptr_t stream, int device) {
        const DeviceScope scope(device);
        return static_cast<int>(
            gemm_rows(gemm_args(problem, epilogue, 0, 0, config, stream), groups_of(groups)));
      },
      py::arg("problem"), py::arg("epilogue"), py::arg("groups"), py::arg("config"),
      py::arg("stream"), py::arg("device") = -1);
  // first_rows: where D of every group begins, or nothing.
  m.def(
      "gemm_k",
      [](const py::tuple& problem, const py::tuple& epilogue, const py::tuple& groups, int config,
         uintptr_t stream, int device, const std::vector<int32_t>& first_rows) {
        const Groups g = groups_of(groups);
        if (!first_rows.empty() && static_cast<int64_t>(first_rows.size()) != g.count)
          return static_cast<int>(Status::bad_argument);
        const DeviceScope scope(device);
        return static_cast<int>(gemm_k(gemm_args(problem, epilogue, 0, 0, config, stream), g,
                                       first_rows.empty() ? nullptr : first_rows.data()));
      },
      py::arg("problem"), py::arg("epilogue"), py::arg("groups"), py::arg("config"),
      py::arg("stream"), py::arg("device") = -1, py::arg("first_rows") = std::vector<int32_t>{});
}

}  // namespace te_mx::bindings
