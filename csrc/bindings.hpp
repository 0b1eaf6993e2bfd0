// What the parts of the module te_mx._native share: addresses and operands from Python integers.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "te_mx/cpu.h"

namespace te_mx {

template <class T>
T* ptr(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// (codes, scales, rows, k, k_first, fmt, packed) -> Operand with compact strides.
inline Operand operand(const pybind11::tuple& t) {
  Operand o{};
  o.codes = ptr<const uint8_t>(t[0].cast<uintptr_t>());
  o.scales = ptr<const uint8_t>(t[1].cast<uintptr_t>());
  o.rows = t[2].cast<int64_t>();
  o.k = t[3].cast<int64_t>();
  const bool k_first = t[4].cast<bool>();
  const int64_t blocks = (o.k + kBlock - 1) / kBlock;
  o.code_row_stride = k_first ? 1 : o.k;
  o.code_k_stride = k_first ? o.rows : 1;
  o.scale_row_stride = k_first ? 1 : blocks;
  o.scale_block_stride = k_first ? o.rows : 1;
  o.fmt = static_cast<Format>(t[5].cast<int32_t>());
  o.packed = ptr<const void>(t[6].cast<uintptr_t>());
  return o;
}

void bind_grouped(pybind11::module_& m);  // bindings_grouped.cpp

}  // namespace te_mx
