// Quantization words for any CPU: loops over 32-bit patterns of fp32 values, written so that a
// compiler turns them into vector code. Arrays are plain; n is a multiple of 32.
#pragma once

#include <cstdint>

#include "mxtile/mx/code.hpp"
#include "mxtile/mx/format.hpp"
#include "mxtile/mx/inline.hpp"
#include "mxtile/mx/scale.hpp"

namespace mxtile::quant {

// From this amax on, scale bytes are at least 21 and everything below the fp32 normal range rounds
// to zero. Blocks below it, and blocks with NaN or Inf, need the exact path.
inline constexpr uint32_t kFastExponent = 36;
inline constexpr uint32_t kFastAmax = kFastExponent << 23;

MXTILE_INLINE bool needs_exact(uint32_t amax) {
  return amax >= mx::kF32Inf || (amax != 0 && amax < kFastAmax);
}

// 2^(127 - byte), a normal number for the bytes of the fast path; 1 for a block of zeros.
MXTILE_INLINE float multiplier(uint32_t byte) {
  return mx::as_float((byte == 0 || byte > 253 ? 127u : 254u - byte) << 23);
}

// Code of x * scale: normal codes by integer rounding of the fp32 pattern, subnormal ones by adding
// a constant whose last place is the smallest subnormal. A product flushed to zero would round to
// zero.
template <class F>
MXTILE_INLINE uint8_t encode_fast(uint32_t x, float scale) {
  constexpr int kDrop = 23 - F::kMantissaBits;
  constexpr uint32_t kMagic = static_cast<uint32_t>(127 + 24 - F::kBias - F::kMantissaBits) << 23;
  constexpr int32_t kMinNormal = (128 - F::kBias) << 23;
  const float y = mx::as_float(x & 0x7FFFFFFF) * scale;
  const uint32_t bits = mx::as_bits(y);
  const uint32_t rounded = (bits + ((1u << (kDrop - 1)) - 1) + ((bits >> kDrop) & 1)) >> kDrop;
  const int32_t normal = static_cast<int32_t>(rounded) - ((127 - F::kBias) << F::kMantissaBits);
  const int32_t small = static_cast<int32_t>(mx::as_bits(y + mx::as_float(kMagic)) - kMagic);
  // All ones below kMinNormal. A condition would keep compilers from vectorizing: they may not
  // compute a float sum that the source does not ask for.
  const int32_t is_small = (static_cast<int32_t>(bits) - kMinNormal) >> 31;
  int32_t code = normal ^ ((normal ^ small) & is_small);
  constexpr int32_t kMax = static_cast<int32_t>(F::kMaxCode);
  code = code < kMax ? code : kMax;
  int32_t sign = static_cast<int32_t>((x >> (32 - F::kBits)) & F::kSign);
  if constexpr (!F::kHasNegativeZero) sign &= -code >> 31;
  return static_cast<uint8_t>(code | sign);
}

// mx::f16_to_f32 without branches: subnormals by a difference of normal numbers.
MXTILE_INLINE void load_f16(const uint16_t* in, uint32_t* out, int n) {
  for (int i = 0; i < n; ++i) {
    const uint32_t a = in[i] & 0x7FFFu;
    const uint32_t shifted = a << 13;
    const uint32_t small = mx::as_bits(mx::as_float(shifted + (113u << 23)) - 0x1p-14f);
    const uint32_t is_small = static_cast<uint32_t>((static_cast<int32_t>(a) - 0x400) >> 31);
    const uint32_t is_special = static_cast<uint32_t>((0x7BFF - static_cast<int32_t>(a)) >> 31);
    const uint32_t normal = shifted + (112u << 23) + (is_special & (112u << 23));
    out[i] = (normal ^ ((normal ^ small) & is_small)) | ((in[i] & 0x8000u) << 16);
  }
}

// Largest magnitude of n patterns.
MXTILE_INLINE uint32_t max_magnitude(const uint32_t* x, int n) {
  int32_t largest = 0;
  for (int i = 0; i < n; ++i) {
    const int32_t a = static_cast<int32_t>(x[i] & 0x7FFFFFFF);
    largest = a > largest ? a : largest;
  }
  return static_cast<uint32_t>(largest);
}

// largest[i] = max(largest[i], |x[i]|).
MXTILE_INLINE void fold_magnitudes(const uint32_t* x, uint32_t* largest, int n) {
  for (int i = 0; i < n; ++i) {
    const int32_t a = static_cast<int32_t>(x[i] & 0x7FFFFFFF);
    const int32_t old = static_cast<int32_t>(largest[i]);
    largest[i] = static_cast<uint32_t>(a > old ? a : old);
  }
}

// One block with one scale. Returns its byte.
template <class F>
MXTILE_INLINE uint8_t quantize_block(const uint32_t* x, uint8_t* codes, mx::Rule rule) {
  const uint32_t amax = max_magnitude(x, mx::kBlockSize);
  const uint32_t byte = mx::scale_byte<F>(amax, rule);
  if (needs_exact(amax)) {
    for (int i = 0; i < mx::kBlockSize; ++i) codes[i] = mx::encode<F>(x[i], byte);
  } else {
    const float scale = multiplier(byte);
    for (int i = 0; i < mx::kBlockSize; ++i) codes[i] = encode_fast<F>(x[i], scale);
  }
  return static_cast<uint8_t>(byte);
}

// One row of n elements, each with the scale of its column.
template <class F>
MXTILE_INLINE void encode_row(const uint32_t* x, const float* scale, uint8_t* codes, int n) {
  for (int i = 0; i < n; ++i) codes[i] = encode_fast<F>(x[i], scale[i]);
}

// The factor of a block whose scale is fp32, from the bits of its largest magnitude, a finite
// number: max / amax rounded to fp32, at most 2^126, of which `pow2` leaves the power of two.
// `epsilon`: bits of what a smaller amax counts as. A block of zeros has factor 1.
template <class F>
MXTILE_INLINE float block_factor(uint32_t amax, uint32_t epsilon, bool pow2) {
  constexpr float kMax = static_cast<float>(F::kTraits.max), kMost = 0x1p126f;
  amax = amax > epsilon ? amax : epsilon;
  if (amax == 0) return 1.0f;
  if (amax < mx::as_bits(kMax / kMost)) return kMost;
  const uint32_t factor = mx::as_bits(kMax / mx::as_float(amax));
  return mx::as_float(pow2 ? factor & mx::kF32Inf : factor);
}

}  // namespace mxtile::quant
