#pragma once

#include <pybind11/pybind11.h>

namespace te_mx {

void bind_fused(pybind11::module_& m);  // bindings_fused.cpp

}  // namespace te_mx
