// Eight elements of a row of x on their way to an operand of the tensor cores: values, which are
// quantized to the bytes of the quantizer or taken as they are, products of activations and their
// gates, or codes.
#pragma once

#include "decode/decode_rows.cuh"
#include "fused/activation.cuh"
#include "mxtile/mx/scale.hpp"
#include "mxtile/sm90/mma.cuh"
#include "quantize/factor_kernel.cuh"
#include "quantize/quantize_input.cuh"
#include "te_mx/sm90_decode.h"

namespace te_mx::sm90 {

// Rows of x: values to quantize, or codes with their scales.
struct DecodeInput {
  const void* x = nullptr;  // values or codes, [rows, k]
  int64_t ld = 0;
  const void* scales = nullptr;  // of codes, compact, [rows, ceil(k/32)] or those of factors; null:
                                 // values
  DType dtype = DType::bf16;     // of values
  bool e5m2 = false;             // codes, given or made, are E5M2
  bool vectors = false;          // rows start at whole vectors of 8 elements
  bool as_is = false;            // values of 16 bits are not quantized
  const void* gate = nullptr;    // values of 16 bits [rows, k]: x is act(x) * gate, rounded
  int64_t gate_ld = 0;
  float act_linear = 0.0f, act_cubic = 0.0f;  // act(x) = x sigmoid(linear x + cubic x^3)
  // Of a scale rule of MX (mxtile/mx/scale.hpp): what is added to the bits of amax, the exponent of
  // the largest code, and the bits of which the scale is 0 all the same.
  uint32_t carry = 0, exponent = 0, edge = 0;
  float epsilon = 0.0f;  // of fp32 scales
  bool power_of_two = false;
  // What prepare_rows made of many rows, or of a long k: operands of [block of rows][quad],
  // then their scales.
  uint8_t* made = nullptr;
  uint8_t* made_scales = nullptr;

  // bf16 values in whole vectors.
  __host__ __device__ bool plain(int64_t k) const {
    return dtype == DType::bf16 && vectors && k % 8 == 0 && scales == nullptr && gate == nullptr &&
           !as_is;
  }
};

inline void set_rule(DecodeInput& in, ScaleRule rule, float epsilon) {
  namespace mx = mxtile::mx;
  in.epsilon = epsilon, in.power_of_two = rule == ScaleRule::pow2;
  if (is_f32_rule(rule)) return;
  const auto to = static_cast<mx::Rule>(rule);
  using E4M3 = mx::ElementOf<Element::e4m3>;
  using E5M2 = mx::ElementOf<Element::e5m2>;
  in.carry = in.e5m2 ? mx::carry_of<E5M2>(to) : mx::carry_of<E4M3>(to);
  in.exponent = in.e5m2 ? E5M2::kMaxExponent : E4M3::kMaxExponent;
  const uint32_t most = in.e5m2 ? mx::kMaxMantissa<E5M2> : mx::kMaxMantissa<E4M3>;
  in.edge = to == mx::Rule::rceil ? (in.exponent << 23) + most + 1 : ~0u;
}

// The gate and the activation; false for one that is not x sigmoid(linear x + cubic x^3).
inline bool set_gate(DecodeInput& in, const void* gate, int64_t ld, Act act) {
  constexpr float kGelu = 1.5957691216057308f;  // 2 sqrt(2/pi)
  in.gate = gate, in.gate_ld = ld;
  if (act == Act::silu) in.act_linear = 1.0f;
  if (act == Act::quick_gelu) in.act_linear = 1.702f;
  if (act == Act::gelu) in.act_linear = kGelu, in.act_cubic = kGelu * 0.044715f;
  return gate == nullptr || in.act_linear != 0.0f;
}

// The scale byte of a block, as mx::scale_byte.
__device__ __forceinline__ uint32_t scale_byte(const DecodeInput& in, uint32_t amax) {
  const uint32_t e = max((amax + in.carry) >> 23, in.exponent) - in.exponent;
  return amax >= 0x7F800000u ? 255 : amax == in.edge ? 0 : e;
}

// What a kernel multiplies x as: how eight elements of a lane become words of B. A quad has 16 such
// lanes.
struct EightMade {
  uint4 words;  // two of codes, or four of fp16
  float scale;
};

template <Element kFmt>
__device__ __forceinline__ uint4 halves_of(uint2 codes) {
  uint4 v;
  tile::fp8x4_to_halves<kFmt>(codes.x, v.x, v.y), tile::fp8x4_to_halves<kFmt>(codes.y, v.z, v.w);
  return v;
}

// NOTE: x is read past L1, which may hold what was there before the kernel that wrote it.

// Eight elements of T, `count` of which exist, as words of the quantizer. kVectors: there are all
// of them or none, in whole vectors. kFactors: scales are fp32 numbers of 128, else of MX.
template <class T, Element kFmt, bool kVectors, bool kHalves, bool kFactors>
struct EightValues {
  static constexpr bool kWide = sizeof(T) == 4;
  static constexpr int kWords = kWide ? 2 : 1;
  uint4 v[kWords];

  __device__ __forceinline__ void load(const DecodeInput& in, int64_t row, int64_t k,
                                       int64_t count) {
    read(v, static_cast<const T*>(in.x) + row * in.ld + k, count);
  }
  static __device__ __forceinline__ void read(uint4 (&v)[kWords], const T* from, int64_t count) {
    v[0] = make_uint4(0, 0, 0, 0);
    if constexpr (kWide) v[1] = make_uint4(0, 0, 0, 0);
    if constexpr (kVectors) {
      if (count > 0) {
        v[0] = __ldcg(reinterpret_cast<const uint4*>(from));
        if constexpr (kWide) v[1] = __ldcg(reinterpret_cast<const uint4*>(from) + 1);
      }
    } else {
      uint32_t* const words = reinterpret_cast<uint32_t*>(v);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (j >= count) continue;
        if constexpr (kWide) {
          words[j] = __ldcg(reinterpret_cast<const uint32_t*>(from) + j);
        } else {
          const uint32_t one = __ldcg(reinterpret_cast<const uint16_t*>(from) + j);
          words[j / 2] |= one << (16 * (j % 2));
        }
      }
    }
  }

  __device__ __forceinline__ typename Input<T>::Word word(int j) const {
    if constexpr (kWide) {
      const uint4& half = v[j / 2];
      return j % 2 ? uint2{half.z, half.w} : uint2{half.x, half.y};
    } else {
      return j == 0 ? v[0].x : j == 1 ? v[0].y : j == 2 ? v[0].z : v[0].w;
    }
  }

  // The largest magnitudes of the lane's elements.
  __device__ __forceinline__ auto own_most() const {
    using In = Input<T>;
    return In::larger(In::larger(word(0), word(1)), In::larger(word(2), word(3)));
  }
  // Bits of the largest magnitude of a block. NaN wins.
  __device__ __forceinline__ uint32_t most() const {
    using In = Input<T>;
    auto m = own_most();
#pragma unroll
    for (int lanes = 1; lanes < (kFactors ? 16 : 4); lanes *= 2)
      m = In::larger(m, In::shuffle_xor(m, lanes));
    const float2 two = In::magnitudes(m);
    return max(__float_as_uint(two.x), __float_as_uint(two.y));
  }

  // Codes of MX for the scale of the block.
  __device__ __forceinline__ uint2 codes_of(uint32_t byte) const {
    const uint32_t f = block_factor(byte) * 0x10001u;
    const float2 a = Input<T>::scaled(word(0), f), b = Input<T>::scaled(word(1), f),
                 c = Input<T>::scaled(word(2), f), d = Input<T>::scaled(word(3), f);
    return {tile::fp8x4<kFmt>(a.x, a.y, b.x, b.y), tile::fp8x4<kFmt>(c.x, c.y, d.x, d.y)};
  }

  // And those of a factor.
  __device__ __forceinline__ uint2 codes_by(float factor) const {
    const float2 a = Input<T>::values(word(0)), b = Input<T>::values(word(1)),
                 c = Input<T>::values(word(2)), d = Input<T>::values(word(3));
    const float eight[8] = {a.x, a.y, b.x, b.y, c.x, c.y, d.x, d.y};
    return codes_by_row<T, kFmt>(eight, factor);
  }

  __device__ __forceinline__ EightMade made(const DecodeInput& in) const {
    uint2 codes;
    float scale;
    if constexpr (kFactors) {
      const Factor f = factor_of_block<kFmt>(__uint_as_float(most()), in.epsilon, in.power_of_two);
      codes = codes_by(f.factor), scale = f.scale;
    } else {
      const uint32_t byte = scale_byte(in, most());
      codes = codes_of(byte);
      scale = tile::e8m0_to_float(byte);
    }
    if constexpr (kHalves) return {halves_of<kFmt>(codes), scale};
    return {uint4{codes.x, codes.y, 0, 0}, scale};
  }
};

// The largest magnitude, as bits, of each of kSteps eights of bf16 over kLanes lanes. NOTE: each
// step for all eights before the next, as each waits for lanes.
template <int kLanes, class Eight, int kSteps>
__device__ __forceinline__ void largest_over(const Eight (&x)[kSteps], uint32_t (&amax)[kSteps]) {
  using In = Input<__nv_bfloat16>;
  decltype(x[0].own_most()) most[kSteps];
#pragma unroll
  for (int j = 0; j < kSteps; ++j) most[j] = x[j].own_most();
#pragma unroll
  for (int lanes = 1; lanes < kLanes; lanes *= 2)
#pragma unroll
    for (int j = 0; j < kSteps; ++j) most[j] = In::larger(most[j], In::shuffle_xor(most[j], lanes));
#pragma unroll
  for (int j = 0; j < kSteps; ++j) {
    const float2 two = In::magnitudes(most[j]);
    amax[j] = max(__float_as_uint(two.x), __float_as_uint(two.y));
  }
}

// Scales of eights of kSteps rows in a quad, of which half a warp has one each: the byte of a
// lane's block, whether the block counts, and the largest byte of the quad that counts, -1 if none
// does.
template <int kSteps>
struct QuadBytes {
  int byte[kSteps], largest[kSteps];
  bool counts[kSteps];

  template <class Eight>
  __device__ __forceinline__ QuadBytes(const Eight (&x)[kSteps], const DecodeInput& in) {
    uint32_t amax[kSteps];
    largest_over<4>(x, amax);
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      byte[j] = static_cast<int>(scale_byte(in, amax[j]));
      // NOTE: of codes that are all rounded to zero, too; their scale is the least that there is.
      counts[j] = amax[j] != 0 && byte[j] != 255, largest[j] = counts[j] ? byte[j] : -1;
    }
#pragma unroll
    for (int lanes = 4; lanes < 16; lanes *= 2)
#pragma unroll
      for (int j = 0; j < kSteps; ++j)
        largest[j] = max(largest[j], __shfl_xor_sync(~0u, largest[j], lanes));
  }
  // Codes of eight j for the largest scale. NOTE: codes of NaN stay NaN, others of blocks that lie
  // far below become zeros.
  template <class Eight>
  __device__ __forceinline__ uint2 codes(const Eight& x, int j) const {
    const int down = largest[j] - byte[j];
    const bool taken = counts[j] && down < 15;
    const uint32_t f = taken ? 0x3C003C00u - static_cast<uint32_t>(down) * 0x04000400u : 0;
    const uint2 own = x.codes_of(byte[j]);
    return {tile::fp8x4_times<Element::e4m3>(own.x, f, f),
            tile::fp8x4_times<Element::e4m3>(own.y, f, f)};
  }
};

// Factors of eights of bf16 of kSteps rows in a quad, of which half a warp has one each.
template <int kSteps>
struct QuadFactors {
  Factor of[kSteps];

  template <class Eight>
  __device__ __forceinline__ QuadFactors(const Eight (&x)[kSteps], const DecodeInput& in) {
    uint32_t amax[kSteps];
    largest_over<16>(x, amax);
#pragma unroll
    for (int j = 0; j < kSteps; ++j)
      of[j] = factor_of_block<Element::e4m3>(__uint_as_float(amax[j]), in.epsilon, in.power_of_two);
  }
};

// Eight elements of T, of 16 bits, as they are: times a power of two that takes the largest of a
// block to 2^15 and more. So fp16 holds all that are not below 2^-32 of it exactly, the others to
// 2^-40 of it; fp16 elements always. Where one is Inf or NaN, the others of its block do not
// matter.
template <class T, bool kVectors, bool kFactors>
struct EightAsTheyAre : EightValues<T, Element::e4m3, kVectors, true, kFactors> {
  __device__ __forceinline__ EightMade made(const DecodeInput&) const {
    const uint32_t exponent = this->most() >> 23;
    const uint32_t up = exponent == 255 ? 27 : min(269 - exponent, 254u);  // that of the power
    const uint32_t f = up * 0x800080u;
    return {uint4{halves(0, f), halves(1, f), halves(2, f), halves(3, f)},
            tile::e8m0_to_float(254 - up)};
  }
  __device__ __forceinline__ uint32_t halves(int j, uint32_t factors) const {
    const float2 v = Input<T>::scaled(this->word(j), factors);
    const __half2 h = __float22half2_rn(v);
    return *reinterpret_cast<const uint32_t*>(&h);
  }
};

// Eight products of an activation and its gate in T, of 16 bits, rounded to T: the values that
// act_kernel writes (fused/fused_act.cuh). Of the activations those that are x times a sigmoid; one
// formula has all of them.
template <class Values, class T>
struct EightGated : Values {
  uint4 gate[1];

  __device__ __forceinline__ void load(const DecodeInput& in, int64_t row, int64_t k,
                                       int64_t count) {
    Values::load(in, row, k, count);
    Values::read(gate, static_cast<const T*>(in.gate) + row * in.gate_ld + k, count);
  }
  __device__ __forceinline__ EightMade made(const DecodeInput& in) {
    multiply(in);
    return Values::made(in);
  }
  __device__ __forceinline__ void multiply(const DecodeInput& in) {
    in.act_cubic == 0.0f ? multiply<false>(in) : multiply<true>(in);
  }

 private:
  template <bool kCubic>
  __device__ __forceinline__ void multiply(const DecodeInput& in) {
    uint4& x = this->v[0];
    x = {product<kCubic>(in, x.x, gate[0].x), product<kCubic>(in, x.y, gate[0].y),
         product<kCubic>(in, x.z, gate[0].z), product<kCubic>(in, x.w, gate[0].w)};
  }
  template <bool kCubic>
  static __device__ __forceinline__ uint32_t product(const DecodeInput& in, uint32_t x,
                                                     uint32_t gate) {
    const float2 a = Input<T>::values(x), b = Input<T>::values(gate);
    const float low = mul(activated<kCubic>(in, a.x), b.x),
                high = mul(activated<kCubic>(in, a.y), b.y);
    if constexpr (std::is_same_v<T, __half>) {
      const __half2 both = __floats2half2_rn(low, high);
      return *reinterpret_cast<const uint32_t*>(&both);
    } else {
      const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
      return *reinterpret_cast<const uint32_t*>(&both);
    }
  }
  // NOTE: Swish and GeluTanh of fused/activation.cuh, bit for bit.
  template <bool kCubic>
  static __device__ __forceinline__ float activated(const DecodeInput& in, float x) {
    float by = in.act_linear;
    if constexpr (kCubic) by = __fmaf_rn(fminf(mul(x, x), 1e4f), in.act_cubic, by);
    return mul(x, sigmoid<false>(mul(x, by)));
  }
};

// Eight codes and the scale of their block.
template <Element kFmt, bool kVectors, bool kHalves, bool kFactors>
struct EightCodes {
  uint2 codes;
  float scale;

  __device__ __forceinline__ void load(const DecodeInput& in, int64_t row, int64_t k,
                                       int64_t count) {
    const uint8_t* const from = static_cast<const uint8_t*>(in.x) + row * in.ld + k;
    codes = make_uint2(0, 0), scale = 1.0f;
    if (count <= 0) return;
    constexpr int kSpan = kFactors ? kDecodeQuad : 32;
    const int64_t place = row * ((k + count + kSpan - 1) / kSpan) + k / kSpan;
    scale = kFactors ? __ldcg(static_cast<const float*>(in.scales) + place)
                     : tile::e8m0_to_float(__ldcg(static_cast<const uint8_t*>(in.scales) + place));
    if constexpr (kVectors) {
      codes = __ldcg(reinterpret_cast<const uint2*>(from));
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const uint32_t one = j < count ? __ldcg(from + j) : 0;
        (j < 4 ? codes.x : codes.y) |= one << (8 * (j % 4));
      }
    }
  }

  __device__ __forceinline__ EightMade made(const DecodeInput&) const {
    if constexpr (kHalves) return {halves_of<kFmt>(codes), scale};
    return {uint4{codes.x, codes.y, 0, 0}, scale};
  }
};

}  // namespace te_mx::sm90
