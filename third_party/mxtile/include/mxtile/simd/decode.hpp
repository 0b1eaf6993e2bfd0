// MX codes to f32 lanes, without meeting an fp32 subnormal on the way.
#pragma once

#include <cstdint>

#include "mxtile/mx/format.hpp"
#include "mxtile/simd/portable.hpp"

namespace mxtile::simd {

// The value of each code (one a lane), unscaled. NaN codes give NaN, E5M2's infinities
// infinity.
template <class S, class F>
MXTILE_WORD typename S::F decode(typename S::I code) {
  constexpr int kShift = 23 - F::kMantissaBits;
  constexpr int kRebias = 127 - F::kBias;
  const auto magnitude = S::iand(code, S::iset(F::kSign - 1));
  const auto moved = S::iadd(S::template shl<kShift>(magnitude), S::iset(kRebias << 23));
  // Exponent field 0: moved reads as 2^-b (1 + m / 2^M) where 2^(1-b) (m / 2^M) is meant.
  const auto implied = S::as_float(S::iset((kRebias + 1) << 23));
  const auto x = S::as_float(moved);
  const auto subnormal = S::as_int(S::sub(S::add(x, x), implied));
  auto bits = S::select_gt(S::iset(1 << F::kMantissaBits), magnitude, subnormal, moved);
  const auto special = S::ior(moved, S::iset(0x7f800000));
  bits = S::select_gt(magnitude, S::iset(static_cast<int>(F::kMaxCode)), special, bits);
  if constexpr (!F::kHasNegativeZero) {  // whose code is NaN
    const auto zero = S::select_gt(S::iset(1), magnitude, S::iset(0x7fc00000), bits);
    bits = S::select_gt(code, S::iset(0x7f), zero, bits);
  }
  const auto sign = S::iand(code, S::iset(F::kSign));
  return S::as_float(S::ior(bits, S::template shl<32 - F::kBits>(sign)));
}

// The 32 codes of one block to scaled floats. Backends with byte or word look-ups do better than
// decode() (decode_avx2.hpp, decode_avx512.hpp), but leave the elements in an order of their own:
// element k of the block is out[position(k)].
template <class S, class F>
struct BlockDecoder {
  MXTILE_WORD constexpr int element(int position) { return position; }
  MXTILE_WORD void run(const uint8_t* codes, float factor, float* out) {
    for (int i = 0; i < mx::kBlockSize; i += S::kLanes) {
      S::store(out + i, S::mul(decode<S, F>(S::load_u8(codes + i)), S::set(factor)));
    }
  }
};

// The same with a factor for either half of the block.
template <class S, class F>
MXTILE_WORD void decode_halves(const uint8_t* codes, float first, float second, float* out) {
  using Block = BlockDecoder<S, F>;
  struct Elements {
    alignas(64) int32_t at[mx::kBlockSize];
    constexpr Elements() : at{} {
      for (int i = 0; i < mx::kBlockSize; ++i) at[i] = Block::element(i);
    }
  };
  static constexpr Elements kElements{};
  Block::run(codes, 1.0f, out);
  const auto one = S::as_int(S::set(first)), other = S::as_int(S::set(second));
  for (int i = 0; i < mx::kBlockSize; i += S::kLanes) {
    typename S::I element;
    std::memcpy(&element, kElements.at + i, sizeof element);
    const auto factor = S::select_gt(S::iset(mx::kBlockSize / 2), element, one, other);
    S::store(out + i, S::mul(S::load(out + i), S::as_float(factor)));
  }
}

// 2^(exponent) for a scale byte: NaN for 255. The exponent is byte - shift, kept within [-100,
// 100].
MXTILE_WORD float block_factor(int byte, int shift) {
  const int target = byte - shift;
  const int exponent = target < -100 ? -100 : target > 100 ? 100 : target;
  const uint32_t bits = byte == 255 ? 0x7fc00000u : static_cast<uint32_t>(exponent + 127) << 23;
  float factor;
  std::memcpy(&factor, &bits, sizeof factor);
  return factor;
}

}  // namespace mxtile::simd

#include "mxtile/simd/decode_avx2.hpp"
#include "mxtile/simd/decode_avx512.hpp"
