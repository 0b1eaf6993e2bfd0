// pybind11 module te_mx._sm90: Python integers in, plain structs out. It links the CUDA runtime
// statically and the driver not at all, so it imports on a machine without one; available() says
// what is there.
#include <pybind11/pybind11.h>

#include <cstdint>

#include "bindings_sm90.hpp"
#include "device.h"
#include "te_mx/sm90.h"
#include "te_mx/sm90_linear.h"

using namespace te_mx;
using namespace te_mx::bindings;

sm90::GemmArgs te_mx::bindings::gemm_args(const py::tuple& p, const py::tuple& e,
                                          uintptr_t workspace, int64_t workspace_bytes, int config,
                                          uintptr_t stream) {
  sm90::GemmArgs a{};
  a.lhs = packed(p[0]), a.lhs_fmt = static_cast<Format>(p[1].cast<int>());
  a.rhs = packed(p[2]), a.rhs_fmt = static_cast<Format>(p[3].cast<int>());
  a.m = p[4].cast<int64_t>(), a.n = p[5].cast<int64_t>(), a.k = p[6].cast<int64_t>();
  a.out = ptr<void>(e[0]), a.out_dtype = static_cast<DType>(e[1].cast<int>());
  a.ldo = e[2].cast<int64_t>(), a.accumulate = e[3].cast<bool>();
  a.bias = ptr<const void>(e[4]), a.bias_dtype = static_cast<DType>(e[5].cast<int>());
  a.gelu = static_cast<Gelu>(e[6].cast<int>());
  a.aux = ptr<void>(e[7]), a.aux_dtype = static_cast<DType>(e[8].cast<int>());
  a.gelu_in = ptr<const void>(e[9]), a.gelu_in_dtype = static_cast<DType>(e[10].cast<int>());
  a.bias_grad = ptr<float>(e[11]);
  a.workspace = reinterpret_cast<void*>(workspace), a.workspace_bytes = workspace_bytes;
  a.config = config, a.stream = reinterpret_cast<void*>(stream);
  return a;
}

PYBIND11_MODULE(_sm90, m) {
  m.doc() = "Native Hopper kernels of te_mx: addresses and sizes in, unchecked; a status out.";
  m.attr("SCALE_WORDS") = sm90::kScaleWords;
  m.attr("MAX_SPREAD") = sm90::kMaxSpread;
  m.def(
      "available",
      [](int device) {
        const sm90::DeviceScope scope(device);
        return sm90::available();
      },
      py::arg("device") = -1);
  m.def("error_text", &sm90::error_text);
  m.def("config_count", &sm90::config_count);
  m.def("config_full", &sm90::config_full);
  m.def("config_name", &sm90::config_name);
  m.def("packed_ld", &sm90::packed_ld);
  m.def("packed_scale_words", &sm90::packed_scale_words);
  // Bytes of codes and scales in one buffer, and where the scales start.
  m.def("packed_bytes", [](int64_t rows, int64_t k) {
    const sm90::LinearRoom room = sm90::linear_room(0, rows, k);
    return py::make_tuple(room.end, room.scales);
  });

  // Calls are those of quantize_args().
  m.def(
      "quantize",
      [](const py::tuple& call, uintptr_t stream, int device) {
        const sm90::QuantizeArgs a = quantize_args(call, stream);
        const sm90::DeviceScope scope(device);
        return static_cast<int>(sm90::quantize(a));
      },
      py::arg("call"), py::arg("stream"), py::arg("device") = -1);
  m.def(
      "quantize_two",
      [](const py::tuple& first, const py::tuple& second, uintptr_t stream, int device) {
        const sm90::QuantizeArgs a = quantize_args(first, stream),
                                 b = quantize_args(second, stream);
        const sm90::DeviceScope scope(device);
        return static_cast<int>(sm90::quantize_two(a, b));
      },
      py::arg("first"), py::arg("second"), py::arg("stream"), py::arg("device") = -1);

  m.def(
      "pack",
      [](uintptr_t codes, uintptr_t scales, int64_t rows, int64_t k, bool k_first, int fmt,
         int spread, uintptr_t out_codes, uintptr_t out_scales, uintptr_t stream, int device) {
        sm90::PackArgs a{};
        a.codes = reinterpret_cast<const uint8_t*>(codes);
        a.scales = reinterpret_cast<const uint8_t*>(scales);
        a.rows = rows, a.k = k, a.k_first = k_first;
        a.fmt = static_cast<Format>(fmt), a.spread = spread;
        a.out = {reinterpret_cast<uint8_t*>(out_codes), reinterpret_cast<uint32_t*>(out_scales)};
        a.stream = reinterpret_cast<void*>(stream);
        const sm90::DeviceScope scope(device);
        return static_cast<int>(sm90::pack(a));
      },
      py::arg("codes"), py::arg("scales"), py::arg("rows"), py::arg("k"), py::arg("k_first"),
      py::arg("fmt"), py::arg("spread"), py::arg("out_codes"), py::arg("out_scales"),
      py::arg("stream"), py::arg("device") = -1);

  m.def("row_sums_workspace_bytes", &sm90::row_sums_workspace_bytes);
  m.def(
      "row_sums",
      [](uintptr_t codes, uintptr_t scales, int64_t rows, int64_t k, bool k_first, int fmt,
         uintptr_t out, uintptr_t workspace, uintptr_t stream, int device) {
        sm90::RowSumsArgs a{};
        a.codes = reinterpret_cast<const uint8_t*>(codes);
        a.scales = reinterpret_cast<const uint8_t*>(scales);
        a.rows = rows, a.k = k, a.k_first = k_first, a.fmt = static_cast<Format>(fmt);
        a.out = reinterpret_cast<float*>(out), a.workspace = reinterpret_cast<float*>(workspace);
        a.stream = reinterpret_cast<void*>(stream);
        const sm90::DeviceScope scope(device);
        return static_cast<int>(sm90::row_sums(a));
      },
      py::arg("codes"), py::arg("scales"), py::arg("rows"), py::arg("k"), py::arg("k_first"),
      py::arg("fmt"), py::arg("out"), py::arg("workspace"), py::arg("stream"),
      py::arg("device") = -1);

  m.def(
      "dequantize",
      [](uintptr_t codes, uintptr_t scales, int64_t rows, int64_t cols, bool blocks_along_rows,
         int fmt, int out_dtype, uintptr_t out, uintptr_t stream, int device) {
        const sm90::DequantizeArgs a{reinterpret_cast<const uint8_t*>(codes),
                                     reinterpret_cast<const uint8_t*>(scales),
                                     rows,
                                     cols,
                                     blocks_along_rows,
                                     static_cast<Format>(fmt),
                                     static_cast<DType>(out_dtype),
                                     reinterpret_cast<void*>(out),
                                     reinterpret_cast<void*>(stream)};
        const sm90::DeviceScope scope(device);
        return static_cast<int>(sm90::dequantize(a));
      },
      py::arg("codes"), py::arg("scales"), py::arg("rows"), py::arg("cols"),
      py::arg("blocks_along_rows"), py::arg("fmt"), py::arg("out_dtype"), py::arg("out"),
      py::arg("stream"), py::arg("device") = -1);

  m.def(
      "workspace_bytes",
      [](const py::tuple& problem, const py::tuple& epilogue, int config, int device, int parts) {
        const sm90::DeviceScope scope(device);
        sm90::GemmArgs a = gemm_args(problem, epilogue, 0, 0, config, 0);
        a.parts = parts;
        return sm90::workspace_bytes(a);
      },
      py::arg("problem"), py::arg("epilogue"), py::arg("config") = -1, py::arg("device") = -1,
      py::arg("parts") = 1);
  m.def(
      "chosen_config",
      [](const py::tuple& problem, const py::tuple& epilogue, int device) {
        const sm90::DeviceScope scope(device);
        return sm90::chosen_config(gemm_args(problem, epilogue, 0, 0, -1, 0));
      },
      py::arg("problem"), py::arg("epilogue"), py::arg("device") = -1);
  m.def(
      "gemm",
      [](const py::tuple& problem, const py::tuple& epilogue, uintptr_t workspace,
         int64_t workspace_bytes, int config, uintptr_t stream, int device, int parts) {
        const sm90::DeviceScope scope(device);
        sm90::GemmArgs a = gemm_args(problem, epilogue, workspace, workspace_bytes, config, stream);
        a.parts = parts;
        return static_cast<int>(sm90::gemm(a));
      },
      py::arg("problem"), py::arg("epilogue"), py::arg("workspace"), py::arg("workspace_bytes"),
      py::arg("config"), py::arg("stream"), py::arg("device") = -1, py::arg("parts") = 1);
  bind_sm90_fused(m);
  bind_sm90_grouped(m);
  bind_sm90_linear(m);
}
