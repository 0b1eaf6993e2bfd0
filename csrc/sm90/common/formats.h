// The MX formats of the kernels here: FP8, and FP4, which lies as codes of E4M3 in tiles.
#pragma once

#include "te_mx/types.h"

namespace te_mx::sm90 {

// ok, or what is wrong with an MX format that the kernels here are asked for: FP8 or FP4.
constexpr Status check_mx(Element element, const Scaling& scaling) {
  const Status status = check_format(Element::e4m3, scaling);
  if (!known(element)) return Status::bad_argument;
  if (status != Status::ok) return status;
  return is_fp8(element) || element == Element::e2m1 ? Status::ok : Status::unsupported;
}
constexpr Status check_mx(Element element, const Scaling& scaling, ScaleRule rule) {
  if (!known(rule)) return Status::bad_argument;
  const Status status = check_mx(element, scaling);
  const bool other = is_f32_rule(rule) || is_writer(rule);
  return status == Status::ok && other ? Status::unsupported : status;
}

// What is added to the magnitude of a bf16 number so that it carries into the exponent where a rule
// rounds up: above the mantissa of the element's largest value, or from 1.75 on.
constexpr uint32_t scale_carry(Element element, ScaleRule rule) {
  const uint32_t mantissa = element == Element::e2m1 ? 0x40 : 0x60;
  return rule == ScaleRule::rceil ? 0x7F - mantissa : rule == ScaleRule::even ? 0x20 : 0;
}

// Calls run<kFmt>() for one of these elements.
template <class Run>
Status with_element(Element element, const Run& run) {
  return element == Element::e4m3   ? run.template operator()<Element::e4m3>()
         : element == Element::e5m2 ? run.template operator()<Element::e5m2>()
                                    : run.template operator()<Element::e2m1>();
}

// The same for those of weights: E5M2 is for gradients. Unsupported for others.
constexpr bool is_of_weights(Element element) {
  return element == Element::e4m3 || element == Element::e2m1;
}
template <class Run>
Status with_weights(Element element, const Run& run) {
  return element == Element::e4m3   ? run.template operator()<Element::e4m3>()
         : element == Element::e2m1 ? run.template operator()<Element::e2m1>()
                                    : Status::unsupported;
}

// What the tensor cores read of operands in tiles.
constexpr Element tile_element(Element element) {
  return element == Element::e2m1 ? Element::e4m3 : element;
}

}  // namespace te_mx::sm90
