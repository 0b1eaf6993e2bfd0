// Forward and backward of a linear layer as one call each.
#include "bindings_sm90.hpp"
#include "device.h"
#include "te_mx/sm90_linear.h"

using namespace te_mx;
using namespace te_mx::bindings;

namespace {

// (m, n, k, x_columns, w_columns)
sm90::LinearShape shape_of(const py::tuple& t) {
  return {t[0].cast<int64_t>(), t[1].cast<int64_t>(), t[2].cast<int64_t>(), t[3].cast<bool>(),
          t[4].cast<bool>()};
}

// (rule, spread, forward, backward)
sm90::LinearFormat format_of(const py::tuple& t) {
  return {static_cast<ScaleRule>(t[0].cast<int>()), t[1].cast<int>(),
          static_cast<Format>(t[2].cast<int>()), static_cast<Format>(t[3].cast<int>())};
}

// (address, stride, dtype)
sm90::LinearMatrix matrix_of(const py::tuple& t) {
  return {ptr<const void>(t[0]), t[1].cast<int64_t>(), static_cast<DType>(t[2].cast<int>())};
}

// (address, dtype)
sm90::LinearResult result_of(const py::tuple& t) {
  return {ptr<void>(t[0]), static_cast<DType>(t[1].cast<int>())};
}

uint8_t* bytes(uintptr_t address) { return reinterpret_cast<uint8_t*>(address); }

}  // namespace

void te_mx::bindings::bind_sm90_linear(py::module_& m) {
  // ((codes, scales, end) of x_row, w_row, x_col, w_col), bytes of backward's temp.
  m.def("linear_rooms", [](const py::tuple& shape) {
    const sm90::LinearRooms r = sm90::linear_rooms(shape_of(shape));
    const auto room = [](const sm90::LinearRoom& at) {
      return py::make_tuple(at.codes, at.scales, at.end);
    };
    return py::make_tuple(room(r.x_row), room(r.w_row), room(r.x_col), room(r.w_col),
                          r.backward_bytes);
  });
  m.def(
      "linear_forward",
      [](const py::tuple& shape, const py::tuple& format, const py::tuple& x, const py::tuple& w,
         const py::tuple& bias, const py::tuple& y, uintptr_t temp, uintptr_t saved,
         uintptr_t stream, int device) {
        const sm90::LinearForward a{shape_of(shape),
                                    format_of(format),
                                    matrix_of(x),
                                    matrix_of(w),
                                    ptr<const void>(bias[0]),
                                    static_cast<DType>(bias[1].cast<int>()),
                                    result_of(y),
                                    bytes(temp),
                                    bytes(saved),
                                    reinterpret_cast<void*>(stream)};
        const sm90::DeviceScope scope(device);
        return static_cast<int>(sm90::linear_forward(a));
      },
      py::arg("shape"), py::arg("format"), py::arg("x"), py::arg("w"), py::arg("bias"),
      py::arg("y"), py::arg("temp"), py::arg("saved"), py::arg("stream"), py::arg("device") = -1);
  m.def(
      "linear_backward",
      [](const py::tuple& shape, const py::tuple& format, const py::tuple& g, uintptr_t saved,
         const py::tuple& dx, const py::tuple& dw, const py::tuple& db, uintptr_t temp,
         uintptr_t stream, int device) {
        const sm90::LinearBackward a{
            shape_of(shape), format_of(format), matrix_of(g),
            bytes(saved),    result_of(dx),     result_of(dw),
            result_of(db),   bytes(temp),       reinterpret_cast<void*>(stream)};
        const sm90::DeviceScope scope(device);
        return static_cast<int>(sm90::linear_backward(a));
      },
      py::arg("shape"), py::arg("format"), py::arg("g"), py::arg("saved"), py::arg("dx"),
      py::arg("dw"), py::arg("db"), py::arg("temp"), py::arg("stream"), py::arg("device") = -1);
}
