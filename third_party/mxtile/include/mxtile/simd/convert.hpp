// bfloat16 on f32 vectors: rounding to nearest even by integer arithmetic, so that no mode of the
// CPU (flush to zero, denormals are zero) and no instruction that implies one changes a bit.
#pragma once

#include "mxtile/simd/portable.hpp"

namespace mxtile::simd {

// The bfloat16 of each lane in its low 16 bits. NaN stays NaN (made quiet).
template <class S>
MXTILE_WORD typename S::I bf16_bits(typename S::F x) {
  const auto bits = S::as_int(x);
  const auto magnitude = S::iand(bits, S::iset(0x7fffffff));
  const auto odd = S::iand(S::template shr<16>(bits), S::iset(1));
  const auto rounded = S::iadd(bits, S::iadd(odd, S::iset(0x7fff)));
  const auto quiet = S::ior(bits, S::iset(0x400000));
  return S::template shr<16>(S::select_gt(magnitude, S::iset(0x7f800000), quiet, rounded));
}

template <class S>
MXTILE_WORD typename S::F bf16_value(typename S::I low_bits) {
  return S::as_float(S::template shl<16>(low_bits));
}

}  // namespace mxtile::simd
