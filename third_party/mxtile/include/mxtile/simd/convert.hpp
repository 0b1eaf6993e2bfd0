// bfloat16 on f32 vectors: rounding to nearest even by integer arithmetic, so that no mode of the
// CPU (flush to zero, denormals are zero) and no instruction that implies one changes a bit.
#pragma once

#include "mxtile/simd/portable.hpp"

namespace mxtile::simd {

// The bfloat16 of each lane in its high 16 bits, anything below. NaN stays NaN (made quiet).
template <class S>
MXTILE_WORD typename S::I bf16_high(typename S::F x) {
  if constexpr (requires { S::bf16_high(x); }) {
    return S::bf16_high(x);
  } else {
    const auto bits = S::as_int(x);
    const auto magnitude = S::iand(bits, S::iset(0x7fffffff));
    const auto odd = S::iand(S::template shr<16>(bits), S::iset(1));
    const auto rounded = S::iadd(bits, S::iadd(odd, S::iset(0x7fff)));
    const auto quiet = S::ior(bits, S::iset(0x400000));
    return S::select_gt(magnitude, S::iset(0x7f800000), quiet, rounded);
  }
}

// The bfloat16 of each lane in its low 16 bits, zeros above.
template <class S>
MXTILE_WORD typename S::I bf16_bits(typename S::F x) {
  return S::template shr<16>(bf16_high<S>(x));
}

template <class S>
MXTILE_WORD typename S::F bf16_value(typename S::I low_bits) {
  return S::as_float(S::template shl<16>(low_bits));
}

// Adjacent bfloat16 as the words that hold two of them: no shuffles, where the order of elements
// does not matter.
template <class S>
struct Bf16Pairs {
  typename S::F even, odd;

  MXTILE_WORD Bf16Pairs load(const void* p) {
    typename S::I words;
    words = S::as_int(S::load(static_cast<const float*>(p)));
    return {bf16_value<S>(words), S::as_float(S::iand(words, S::iset(~0xffff)))};
  }
  MXTILE_WORD void store(void* p, typename S::F even, typename S::F odd) {
    const auto high = S::iand(bf16_high<S>(odd), S::iset(~0xffff));
    S::store(static_cast<float*>(p), S::as_float(S::ior(bf16_bits<S>(even), high)));
  }
};

}  // namespace mxtile::simd
