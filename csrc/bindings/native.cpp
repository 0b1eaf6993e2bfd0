// The module te_mx._native: the CPU backend (te_mx/cpu.h) on records. Addresses travel as integers,
// so it needs no torch header and one build serves every torch.
#include <vector>

#include "prepared.hpp"
#include "te_mx/cpu.h"

namespace te_mx::bindings {
namespace {

using namespace te_mx::cpu;

int32_t number(Status status) { return static_cast<int32_t>(status); }

// A call without the GIL, on a copy that no other thread can change meanwhile.
template <class Args>
void bind_call(py::module_& m, const char* name, Status (*run)(const Args&)) {
  m.def(name, [run](const Args& given) {
    const Args args = given;
    py::gil_scoped_release release;
    return number(run(args));
  });
}

// The same, for (status, what ran).
template <class Args, class Ran>
void bind_call(py::module_& m, const char* name, Status (*run)(const Args&, Ran&)) {
  m.def(name, [run](const Args& given) {
    const Args args = given;
    Status status;
    Ran ran{};
    {
      py::gil_scoped_release release;
      status = run(args, ran);
    }
    return py::make_tuple(number(status), static_cast<int64_t>(ran));
  });
}

// The same as one that can be prepared: what ran, or the status below zero.
template <class Ran, Status (*kRun)(const LinearArgs&, Ran&)>
void bind_prepared(const char* name) {
  prepared::add<LinearArgs>(name, [](const LinearArgs& args) -> int64_t {
    const py::gil_scoped_release release;
    Ran ran{};
    const Status status = kRun(args, ran);
    return status == Status::ok ? static_cast<int64_t>(ran) : -number(status);
  });
}

void bind_machine(py::module_& m) {
  m.attr("STREAM_MAX_ROWS") = kStreamMaxRows;
  m.attr("COL_SUM_ROWS") = kColSumRows;
  m.attr("WIDE_SPREAD") = kWideSpread;
  m.def("isa_best", [] { return static_cast<int32_t>(isa_best()); });
  m.def("isa_current", [] { return static_cast<int32_t>(isa_current()); });
  m.def("parallel_team", [] { return parallel_team(); });  // "inline", "openmp" or "threads"
  m.def("parallel_regions", [] { return parallel_regions(); });
  m.def("late_steps", [] { return late_steps(); });
  m.def("isa_env_error", [] { return isa_env_error(); });  // str or None
  m.def("peak_gflops", [](int threads) {
    if (threads < 1 || threads > 4096) throw py::value_error("threads must be 1 to 4096");
    py::gil_scoped_release release;
    return peak_gflops(threads);
  });
  m.def("isa_available", [](int32_t level) { return isa_available(static_cast<Isa>(level)); });
  m.def("set_isa", [](int32_t level) { return number(set_isa(static_cast<Isa>(level))); });
  m.def("kernel_available",
        [](int32_t kernel) { return kernel_available(static_cast<Kernel>(kernel)); });
  m.def("stream_pays", [](int32_t kernel, int64_t m, int64_t n, int64_t k) {
    return stream_pays(static_cast<Kernel>(kernel), m, n, k);
  });
}

void bind_calls(py::module_& m) {
  bind_call(m, "quantize", quantize);
  bind_call(m, "dequantize", dequantize);
  m.def(
      "packed_bytes",
      [](int32_t kernel, int32_t role, int64_t rows, int64_t k, bool blockwise) {
        return packed_bytes(static_cast<Kernel>(kernel), static_cast<Role>(role), rows, k,
                            blockwise);
      },
      py::arg("kernel"), py::arg("role"), py::arg("rows"), py::arg("k"),
      py::arg("blockwise") = false);
  bind_call(m, "pack", pack);
  m.def("workspace_bytes", [](const GemmArgs& args) { return workspace_bytes(args); });
  bind_call(m, "gemm", gemm);
  m.def("linear_offsets", [](const LinearArgs& args) { return as_dict(linear_offsets(args)); });
  bind_call(m, "linear_forward", linear_forward);
  bind_call(m, "linear_backward", linear_backward);
  bind_call(m, "linear_wgrad", linear_wgrad);
  bind_prepared<Kernel, linear_forward>("linear_forward");
  bind_prepared<uint32_t, linear_backward>("linear_backward");
  bind_prepared<Kernel, linear_wgrad>("linear_wgrad");
  prepared::add_to(m);

  bind_call(m, "normalize", normalize);
  bind_call(m, "normalize_backward", normalize_backward);
  bind_call(m, "activate", activate);

  bind_call(m, "quantize_grouped", quantize_grouped);
  m.def("quantize_many", [](const py::list& problems, int threads) {
    std::vector<QuantizeArgs> args;
    for (const auto& problem : problems) args.push_back(record<QuantizeArgs>(problem));
    py::gil_scoped_release release;
    return number(quantize_many(args.data(), static_cast<int64_t>(args.size()), threads));
  });
  bind_call(m, "pack_many", pack_many);
  m.def("workspace_bytes_grouped",
        [](const GroupedGemmArgs& args) { return workspace_bytes_grouped(args); });
  bind_call(m, "gemm_grouped", gemm_grouped);
  m.def("moe_workspace_bytes", [](const MoeGemmArgs& args) { return workspace_bytes(args); });
  bind_call(m, "moe_gemm", moe_gemm);
}

}  // namespace
}  // namespace te_mx::bindings

PYBIND11_MODULE(_native, m) {
  m.doc() = "Native CPU kernels of te_mx. Use te_mx.backends.cpu, which checks arguments.";
  te_mx::bindings::bind_common(m);
  te_mx::bindings::bind_machine(m);
  te_mx::bindings::bind_calls(m);
}
