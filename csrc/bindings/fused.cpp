#include "record.hpp"

namespace te_mx::bindings {

void bind_fused_records(py::module_& m) {
  Record<NormArgs>()
      .part("x", &NormArgs::x, "x_")
      .field("rms", &NormArgs::rms)
      .field("eps", &NormArgs::eps)
      .field("inverse", &NormArgs::inverse)
      .field("weight", &NormArgs::weight)
      .field("bias", &NormArgs::bias)
      .field("weight_dtype", &NormArgs::weight_dtype)
      .field("mean", &NormArgs::mean)
      .field("rstd", &NormArgs::rstd)
      .field("z", &NormArgs::z)
      .field("z_dtype", &NormArgs::z_dtype)
      .part("to", &NormArgs::to, "")
      .field("counters", &NormArgs::counters)
      .part("execution", &NormArgs::execution, "")
      .add_to(m, "NormArgs");
  Record<NormGradArgs>()
      .part("dz", &NormGradArgs::dz, "dz_")
      .part("x", &NormGradArgs::x, "x_")
      .field("rms", &NormGradArgs::rms)
      .field("inverse", &NormGradArgs::inverse)
      .field("weight", &NormGradArgs::weight)
      .field("weight_dtype", &NormGradArgs::weight_dtype)
      .field("mean", &NormGradArgs::mean)
      .field("rstd", &NormGradArgs::rstd)
      .field("dx", &NormGradArgs::dx)
      .field("dx_dtype", &NormGradArgs::dx_dtype)
      .field("dweight", &NormGradArgs::dweight)
      .field("dbias", &NormGradArgs::dbias)
      .field("partial", &NormGradArgs::partial)
      .field("row_sums", &NormGradArgs::row_sums)
      .field("counters", &NormGradArgs::counters)
      .part("execution", &NormGradArgs::execution, "")
      .add_to(m, "NormGradArgs");
  Record<ActArgs>()
      .part("h", &ActArgs::h, "h_")
      .part("grad", &ActArgs::grad, "grad_")
      .field("act", &ActArgs::act)
      .field("gated", &ActArgs::gated)
      .field("limit", &ActArgs::limit)
      .field("alpha", &ActArgs::alpha)
      .field("offset", &ActArgs::offset)
      .field("in_pairs", &ActArgs::in_pairs)
      .field("out", &ActArgs::out)
      .field("out_dtype", &ActArgs::out_dtype)
      .part("to", &ActArgs::to, "")
      .part("execution", &ActArgs::execution, "")
      .add_to(m, "ActArgs");
}

}  // namespace te_mx::bindings
