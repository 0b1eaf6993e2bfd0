// The grouped entry points of te_mx._native.
#include <vector>

#include "bindings.hpp"
#include "te_mx/cpu_grouped.h"

namespace py = pybind11;

namespace te_mx {
namespace {

// (count, starts, ends)
Groups groups(const py::tuple& t) {
  return {t[0].cast<int64_t>(), ptr<const int64_t>(t[1].cast<uintptr_t>()),
          ptr<const int64_t>(t[2].cast<uintptr_t>())};
}

// (x, rows, cols, row_stride, col_stride, x_dtype, fmt, rule, row_codes, row_scales, col_codes,
//  col_scales, col_sum, col_sum_ws)
QuantizeArgs quantize_args(const py::tuple& t, int threads) {
  QuantizeArgs a{};
  a.x = ptr<const void>(t[0].cast<uintptr_t>());
  a.rows = t[1].cast<int64_t>();
  a.cols = t[2].cast<int64_t>();
  a.row_stride = t[3].cast<int64_t>();
  a.col_stride = t[4].cast<int64_t>();
  a.x_dtype = static_cast<DType>(t[5].cast<int32_t>());
  a.fmt = static_cast<Format>(t[6].cast<int32_t>());
  a.rule = static_cast<ScaleRule>(t[7].cast<int32_t>());
  a.row_codes = ptr<uint8_t>(t[8].cast<uintptr_t>());
  a.row_scales = ptr<uint8_t>(t[9].cast<uintptr_t>());
  a.col_codes = ptr<uint8_t>(t[10].cast<uintptr_t>());
  a.col_scales = ptr<uint8_t>(t[11].cast<uintptr_t>());
  a.col_sum = ptr<float>(t[12].cast<uintptr_t>());
  a.col_sum_ws = ptr<float>(t[13].cast<uintptr_t>());
  a.threads = threads;
  return a;
}

// (many_rows kernel, few_rows kernel, ragged_k, packed_stride, out, out_dtype, accumulate, bias,
//  bias_dtype)
GroupedGemmArgs gemm_args(const py::tuple& g, const py::tuple& lhs, const py::tuple& rhs,
                          const py::tuple& rest, int threads) {
  GroupedGemmArgs a{};
  a.groups = groups(g);
  a.lhs = operand(lhs);
  a.rhs = operand(rhs);
  a.kernels.many_rows = static_cast<Kernel>(rest[0].cast<int32_t>());
  a.kernels.few_rows = static_cast<Kernel>(rest[1].cast<int32_t>());
  a.ragged_k = rest[2].cast<bool>();
  a.packed_stride = rest[3].cast<int64_t>();
  a.out = ptr<void>(rest[4].cast<uintptr_t>());
  a.out_dtype = static_cast<DType>(rest[5].cast<int32_t>());
  a.accumulate = rest[6].cast<bool>();
  a.bias = ptr<const void>(rest[7].cast<uintptr_t>());
  a.bias_dtype = static_cast<DType>(rest[8].cast<int32_t>());
  a.threads = threads;
  return a;
}

}  // namespace

void bind_grouped(py::module_& m) {
  m.def("quantize_grouped", [](const py::tuple& g, const py::tuple& all, int threads) {
    const GroupedQuantizeArgs args{quantize_args(all, threads), groups(g)};
    py::gil_scoped_release release;
    return static_cast<int32_t>(quantize_grouped(args));
  });
  m.def("quantize_many", [](const py::list& problems, int threads) {
    std::vector<QuantizeArgs> args;
    for (const auto& problem : problems) {
      args.push_back(quantize_args(problem.cast<py::tuple>(), threads));
    }
    py::gil_scoped_release release;
    return static_cast<int32_t>(
        quantize_many(args.data(), static_cast<int64_t>(args.size()), threads));
  });
  m.def("pack_many", [](int32_t kernel, int32_t role, const py::tuple& first, int64_t count,
                        uintptr_t packed, int64_t stride, int threads) {
    const Operand source = operand(first);
    py::gil_scoped_release release;
    return static_cast<int32_t>(pack_many(static_cast<Kernel>(kernel), static_cast<Role>(role),
                                          source, count, ptr<void>(packed), stride, threads));
  });
  m.def("workspace_bytes_grouped",
        [](const py::tuple& g, const py::tuple& lhs, const py::tuple& rhs, const py::tuple& rest,
           int threads) { return workspace_bytes_grouped(gemm_args(g, lhs, rhs, rest, threads)); });
  // Returns (status, bit mask of the kernels that ran).
  m.def("gemm_grouped",
        [](const py::tuple& g, const py::tuple& lhs, const py::tuple& rhs, const py::tuple& rest,
           uintptr_t workspace, int64_t workspace_bytes, int threads) {
          GroupedGemmArgs a = gemm_args(g, lhs, rhs, rest, threads);
          a.workspace = ptr<void>(workspace);
          a.workspace_bytes = workspace_bytes;
          Status status;
          {
            py::gil_scoped_release release;
            status = gemm_grouped(a);
          }
          return py::make_tuple(static_cast<int32_t>(status), a.ran);
        });
}

}  // namespace te_mx
