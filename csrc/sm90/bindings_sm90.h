// What the parts of the module te_mx._sm90 share.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "te_mx/sm90.h"

namespace te_mx::sm90 {

template <class T>
T* ptr(const pybind11::handle& address) {
  return reinterpret_cast<T*>(address.cast<uintptr_t>());
}

// (codes, scales)
inline Packed packed(const pybind11::handle& h) {
  const auto t = pybind11::reinterpret_borrow<pybind11::tuple>(h);
  return {ptr<uint8_t>(t[0]), ptr<uint32_t>(t[1])};
}

// problem: (lhs, lhs_fmt, rhs, rhs_fmt, m, n, k); epilogue: (out, out_dtype, ldo, accumulate, bias,
// bias_dtype, gelu, aux, aux_dtype, gelu_in, gelu_in_dtype, bias_grad)
GemmArgs gemm_args(const pybind11::tuple& problem, const pybind11::tuple& epilogue,
                   uintptr_t workspace, int64_t workspace_bytes, int config, uintptr_t stream);

void bind_grouped(pybind11::module_& m);

}  // namespace te_mx::sm90
