// NVFP4 on any CPU.
#include "mxtile/simd/portable.hpp"
#include "quantize/nvfp4_loops.hpp"

namespace te_mx::cpu::nvfp4 {

const Level& portable_level() { return kLevel<mxtile::simd::Portable>; }

float tensor_scale(uint32_t amax, ScaleRule rule, DType dtype) {
  const bool bf16 = dtype == DType::bf16;
  if (rule == ScaleRule::te) return whole_of<ScaleRule::te>(amax, bf16).scale;
  if (rule == ScaleRule::torchao) return whole_of<ScaleRule::torchao>(amax, bf16).scale;
  if (rule == ScaleRule::modelopt) return whole_of<ScaleRule::modelopt>(amax, bf16).scale;
  if (tries_two(rule)) return tried_of(amax, top_of(rule)).scale;
  return whole_of<ScaleRule::compressed_tensors>(amax, bf16).scale;
}

}  // namespace te_mx::cpu::nvfp4
