// The part of te_mx._native for steps that end in a quantizer (te_mx/cpu_fused.h).
#include "bindings_fused.hpp"

#include <cstdint>

#include "te_mx/cpu_fused.h"

namespace py = pybind11;

namespace te_mx {
namespace {

template <class T>
T* address(const py::handle& value) {
  return reinterpret_cast<T*>(value.cast<uintptr_t>());
}

template <class T>
T number(const py::handle& value) {
  return static_cast<T>(value.cast<int32_t>());
}

// (fmt, rule, row_codes, row_scales, col_codes, col_scales, col_sum, col_sum_ws)
QuantizeOut quantize_out(const py::tuple& t) {
  return {number<Format>(t[0]),   number<ScaleRule>(t[1]), address<uint8_t>(t[2]),
          address<uint8_t>(t[3]), address<uint8_t>(t[4]),  address<uint8_t>(t[5]),
          address<float>(t[6]),   address<float>(t[7])};
}

template <class Run>
int32_t without_gil(Run run) {
  py::gil_scoped_release release;
  return static_cast<int32_t>(run());
}

// x: (address, rows, cols, row stride, dtype)
int32_t bound_normalize(const py::tuple& x, bool rms, float eps, float inverse,
                        const py::tuple& parameters, const py::tuple& sums, const py::tuple& z,
                        const py::tuple& out, int threads) {
  NormArgs a{};
  a.x = address<const void>(x[0]);
  a.rows = x[1].cast<int64_t>();
  a.cols = x[2].cast<int64_t>();
  a.row_stride = x[3].cast<int64_t>();
  a.x_dtype = number<DType>(x[4]);
  a.rms = rms;
  a.eps = eps;
  a.inverse = inverse;
  a.weight = address<const float>(parameters[0]);
  a.bias = address<const float>(parameters[1]);
  a.mean = address<float>(sums[0]);
  a.rstd = address<float>(sums[1]);
  a.z = address<void>(z[0]);
  a.z_dtype = number<DType>(z[1]);
  a.quantized = quantize_out(out);
  a.threads = threads;
  return without_gil([&a] { return normalize(a); });
}

// dz, dx: (address, dtype); grads: (dweight, dbias, workspace)
int32_t bound_normalize_backward(const py::tuple& dz, const py::tuple& x, bool rms, float inverse,
                                 uintptr_t weight, const py::tuple& sums, const py::tuple& dx,
                                 const py::tuple& grads, int threads) {
  NormGradArgs a{};
  a.dz = address<const void>(dz[0]);
  a.dz_dtype = number<DType>(dz[1]);
  a.x = address<const void>(x[0]);
  a.rows = x[1].cast<int64_t>();
  a.cols = x[2].cast<int64_t>();
  a.row_stride = x[3].cast<int64_t>();
  a.x_dtype = number<DType>(x[4]);
  a.rms = rms;
  a.inverse = inverse;
  a.weight = reinterpret_cast<const float*>(weight);
  a.mean = address<const float>(sums[0]);
  a.rstd = address<const float>(sums[1]);
  a.dx = address<void>(dx[0]);
  a.dx_dtype = number<DType>(dx[1]);
  a.dweight = address<float>(grads[0]);
  a.dbias = address<float>(grads[1]);
  a.ws = address<float>(grads[2]);
  a.threads = threads;
  return without_gil([&a] { return normalize_backward(a); });
}

// h: (address, dtype, rows, cols); grad: (address, dtype); act: (id, gated, limit, alpha, offset)
int32_t bound_activate(const py::tuple& h, const py::tuple& grad, const py::tuple& act,
                       const py::tuple& to, const py::tuple& out, int threads) {
  ActArgs a{};
  a.h = address<const void>(h[0]);
  a.h_dtype = number<DType>(h[1]);
  a.rows = h[2].cast<int64_t>();
  a.cols = h[3].cast<int64_t>();
  a.grad = address<const void>(grad[0]);
  a.grad_dtype = number<DType>(grad[1]);
  a.act = number<Act>(act[0]);
  a.gated = act[1].cast<bool>();
  a.limit = act[2].cast<float>();
  a.alpha = act[3].cast<float>();
  a.offset = act[4].cast<float>();
  a.out = address<void>(to[0]);
  a.out_dtype = number<DType>(to[1]);
  a.quantized = quantize_out(out);
  a.threads = threads;
  return without_gil([&a] { return activate(a); });
}

}  // namespace

void bind_fused(py::module_& m) {
  m.def("normalize", &bound_normalize);
  m.def("normalize_backward", &bound_normalize_backward);
  m.def("activate", &bound_activate);
}

}  // namespace te_mx
