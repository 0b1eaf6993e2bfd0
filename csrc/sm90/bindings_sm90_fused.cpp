#include "bindings_sm90.hpp"
#include "device.h"
#include "te_mx/sm90_fused.h"

namespace te_mx::bindings {

namespace {

sm90::Matrix matrix(const py::handle& data, const py::handle& stride) {
  return {ptr<const void>(data), stride.cast<int64_t>()};
}

DType dtype_of(const py::handle& h) { return static_cast<DType>(h.cast<int>()); }

// x: (address, stride, dtype); norm: (rms, eps, 1 / cols); out: (mean, rstd, z, scratch);
// quantized: a call of quantize_args() without address and stride.
int norm_quantize(const py::tuple& x, const py::tuple& norm, uintptr_t weight, uintptr_t bias,
                  const py::tuple& out, const py::tuple& quantized, uintptr_t stream, int device) {
  sm90::NormQuantizeArgs a{};
  a.x = matrix(x[0], x[1]), a.x_dtype = dtype_of(x[2]);
  a.rms = norm[0].cast<bool>(), a.eps = norm[1].cast<float>(), a.inverse = norm[2].cast<float>();
  a.weight = reinterpret_cast<const float*>(weight), a.bias = reinterpret_cast<const float*>(bias);
  a.mean = ptr<float>(out[0]), a.rstd = ptr<float>(out[1]), a.z = ptr<void>(out[2]);
  a.ws = ptr<uint32_t>(out[3]);
  a.quantized = quantize_args(quantized, stream);
  const sm90::DeviceScope scope(device);
  return static_cast<int>(sm90::norm_quantize(a));
}

// dz, x: (address, stride, dtype); rows: (mean, rstd); dx: (address, dtype); scratch: (row sums,
// partial sums, words).
int norm_backward(const py::tuple& dz, const py::tuple& x, int64_t rows, int64_t cols,
                  const py::tuple& norm, uintptr_t weight, const py::tuple& stats,
                  const py::tuple& dx, uintptr_t sums, const py::tuple& scratch, uintptr_t stream,
                  int device) {
  sm90::NormBackwardArgs a{};
  a.dz = matrix(dz[0], dz[1]), a.dz_dtype = dtype_of(dz[2]);
  a.x = matrix(x[0], x[1]), a.x_dtype = dtype_of(x[2]);
  a.rows = rows, a.cols = cols;
  a.rms = norm[0].cast<bool>(), a.inverse = norm[1].cast<float>();
  a.weight = reinterpret_cast<const float*>(weight);
  a.mean = ptr<const float>(stats[0]), a.rstd = ptr<const float>(stats[1]);
  a.dx = ptr<void>(dx[0]), a.dx_dtype = dtype_of(dx[1]);
  a.sums = reinterpret_cast<float*>(sums);
  a.row_sums = ptr<float>(scratch[0]), a.partial = ptr<float>(scratch[1]);
  a.ws = ptr<uint32_t>(scratch[2]);
  a.stream = reinterpret_cast<void*>(stream);
  const sm90::DeviceScope scope(device);
  return static_cast<int>(sm90::norm_backward(a));
}

// h: (address, stride), grad: the same or zeros; cols of the activated values; act: (id, gated,
// limit, alpha, offset).
int act_quantize(const py::tuple& h, const py::tuple& grad, int64_t cols, const py::tuple& act,
                 uintptr_t out, const py::tuple& quantized, uintptr_t stream, int device) {
  sm90::ActQuantizeArgs a{};
  a.h = matrix(h[0], h[1]), a.grad = matrix(grad[0], grad[1]), a.cols = cols;
  a.act = static_cast<Act>(act[0].cast<int>()), a.gated = act[1].cast<bool>();
  a.limit = act[2].cast<float>(), a.alpha = act[3].cast<float>(), a.offset = act[4].cast<float>();
  a.out = reinterpret_cast<void*>(out);
  a.quantized = quantize_args(quantized, stream);
  const sm90::DeviceScope scope(device);
  return static_cast<int>(sm90::act_quantize(a));
}

}  // namespace

void bind_sm90_fused(py::module_& m) {
  m.def("norm_ws_words", &sm90::norm_ws_words);
  m.def("norm_partial_sums", &sm90::norm_partial_sums);
  m.def("norm_quantize", &norm_quantize, py::arg("x"), py::arg("norm"), py::arg("weight"),
        py::arg("bias"), py::arg("out"), py::arg("quantized"), py::arg("stream"),
        py::arg("device") = -1);
  m.def("norm_backward", &norm_backward, py::arg("dz"), py::arg("x"), py::arg("rows"),
        py::arg("cols"), py::arg("norm"), py::arg("weight"), py::arg("stats"), py::arg("dx"),
        py::arg("sums"), py::arg("scratch"), py::arg("stream"), py::arg("device") = -1);
  m.def("act_quantize", &act_quantize, py::arg("h"), py::arg("grad"), py::arg("cols"),
        py::arg("act"), py::arg("out"), py::arg("quantized"), py::arg("stream"),
        py::arg("device") = -1);
}

}  // namespace te_mx::bindings
