// Rows of x on their way to the tensor cores, quad after quad: fp16 numbers [4 blocks][row][32],
// and their scales in fp32, [4][row]. Values are quantized here, to the bytes of the quantizer.
#pragma once

#include "mxtile/mx/scale.hpp"
#include "mxtile/sm90/mma.cuh"
#include "quantize/quantize_input.cuh"
#include "te_mx/sm90_decode.h"

namespace te_mx::sm90 {

// Rows of x: values to quantize, or codes with their scales.
struct DecodeInput {
  const void* x = nullptr;  // values or codes, [rows, k]
  int64_t ld = 0;
  const uint8_t* scales = nullptr;  // of codes, [rows, ceil(k/32)], compact; null: values
  DType dtype = DType::bf16;        // of values
  bool e5m2 = false;                // codes, given or made, are E5M2
  bool vectors = false;             // rows start at whole vectors of 8 elements
  // Of a scale rule (mxtile/mx/scale.hpp): what is added to the bits of amax, the exponent of the
  // largest code, and the bits of which the scale is 0 all the same.
  uint32_t carry = 0, exponent = 0, edge = 0;
  const uint8_t* made = nullptr;  // what prepare_rows made of them: [block of rows][quad], or null
  bool as_is = false;             // values of 16 bits are not quantized
};

inline void set_rule(DecodeInput& in, ScaleRule rule) {
  namespace mx = mxtile::mx;
  const auto to = static_cast<mx::Rule>(rule);
  using E4M3 = mx::ElementOf<Element::e4m3>;
  using E5M2 = mx::ElementOf<Element::e5m2>;
  in.carry = in.e5m2 ? mx::carry_of<E5M2>(to) : mx::carry_of<E4M3>(to);
  in.exponent = in.e5m2 ? E5M2::kMaxExponent : E4M3::kMaxExponent;
  const uint32_t most = in.e5m2 ? mx::kMaxMantissa<E5M2> : mx::kMaxMantissa<E4M3>;
  in.edge = to == mx::Rule::rceil ? (in.exponent << 23) + most + 1 : ~0u;
}

// The scale byte of a block, as mx::scale_byte.
__device__ __forceinline__ uint32_t scale_byte(const DecodeInput& in, uint32_t amax) {
  const uint32_t e = max((amax + in.carry) >> 23, in.exponent) - in.exponent;
  return amax >= 0x7F800000u ? 255 : amax == in.edge ? 0 : e;
}

// Where a slice of x goes.
struct InputRoom {
  uint8_t* to;
  int rows;    // of room
  int64_t k0;  // first k of the slice, a multiple of 128
  int length;  // of the slice, likewise
  int64_t k;   // of x: what lies behind is zero
};

template <Element kFmt>
__device__ __forceinline__ uint32_t half2_of_codes(uint32_t codes) {
  const __half2 v = tile::fp8x2_to_half2<kFmt>(static_cast<uint16_t>(codes));
  return *reinterpret_cast<const uint32_t*>(&v);
}

// Two numbers rounded to codes, as fp16.
template <Element kFmt, class T>
__device__ __forceinline__ uint32_t rounded(typename Input<T>::Word word, uint32_t factors) {
  const float2 v = Input<T>::scaled(word, factors);
  return half2_of_codes<kFmt>(tile::fp8x2<kFmt>(v.x, v.y));
}

// Eight elements of T, `count` of which exist, as words of the quantizer; a block has four lanes.
// kVectors: there are all of them or none, in whole vectors.
template <class T, Element kFmt, bool kVectors>
struct EightValues {
  static constexpr bool kWide = sizeof(T) == 4;
  uint4 v[kWide ? 2 : 1];

  __device__ __forceinline__ void load(const DecodeInput& in, int64_t row, int64_t k,
                                       int64_t count) {
    const T* const from = static_cast<const T*>(in.x) + row * in.ld + k;
    v[0] = make_uint4(0, 0, 0, 0);
    if constexpr (kWide) v[1] = make_uint4(0, 0, 0, 0);
    if constexpr (kVectors) {
      if (count > 0) {
        v[0] = __ldg(reinterpret_cast<const uint4*>(from));
        if constexpr (kWide) v[1] = __ldg(reinterpret_cast<const uint4*>(from) + 1);
      }
    } else {
      uint32_t* const words = reinterpret_cast<uint32_t*>(v);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (j >= count) continue;
        if constexpr (kWide) {
          words[j] = __ldg(reinterpret_cast<const uint32_t*>(from) + j);
        } else {
          const uint32_t one = __ldg(reinterpret_cast<const uint16_t*>(from) + j);
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

  // Bits of the largest magnitude of a block. NaN wins.
  __device__ __forceinline__ uint32_t most() const {
    using In = Input<T>;
    auto m = In::larger(In::larger(word(0), word(1)), In::larger(word(2), word(3)));
    m = In::larger(m, In::shuffle_xor(m, 1));
    m = In::larger(m, In::shuffle_xor(m, 2));
    const float2 two = In::magnitudes(m);
    return max(__float_as_uint(two.x), __float_as_uint(two.y));
  }

  // (fp16 numbers, the scale)
  __device__ __forceinline__ uint4 quantized(const DecodeInput& in, float& scale) const {
    const uint32_t byte = scale_byte(in, most()), f = block_factor(byte) * 0x10001u;
    scale = tile::e8m0_to_float(byte);
    return {rounded<kFmt, T>(word(0), f), rounded<kFmt, T>(word(1), f),
            rounded<kFmt, T>(word(2), f), rounded<kFmt, T>(word(3), f)};
  }
};

// Eight elements of T, of 16 bits, as they are: times a power of two that takes the largest of a
// block to 2^15 and more. So fp16 holds all that are not below 2^-32 of it exactly, the others to
// 2^-40 of it; fp16 elements always. Where one is Inf or NaN, the others of its block do not
// matter.
template <class T, bool kVectors>
struct EightAsTheyAre : EightValues<T, Element::e4m3, kVectors> {
  __device__ __forceinline__ uint4 quantized(const DecodeInput&, float& scale) const {
    const uint32_t exponent = this->most() >> 23;
    const uint32_t up = exponent == 255 ? 27 : min(269 - exponent, 254u);  // that of the power
    scale = tile::e8m0_to_float(254 - up);
    const uint32_t f = up * 0x800080u;
    return {halves(0, f), halves(1, f), halves(2, f), halves(3, f)};
  }
  __device__ __forceinline__ uint32_t halves(int j, uint32_t factors) const {
    const float2 v = Input<T>::scaled(this->word(j), factors);
    const __half2 h = __float22half2_rn(v);
    return *reinterpret_cast<const uint32_t*>(&h);
  }
};

// Eight codes and the scale of their block.
template <Element kFmt, bool kVectors>
struct EightCodes {
  uint2 codes;
  uint32_t byte;

  __device__ __forceinline__ void load(const DecodeInput& in, int64_t row, int64_t k,
                                       int64_t count) {
    const uint8_t* const from = static_cast<const uint8_t*>(in.x) + row * in.ld + k;
    codes = make_uint2(0, 0), byte = 127;
    if (count <= 0) return;
    byte = __ldg(in.scales + row * ((k + count + 31) / 32) + k / 32);
    if constexpr (kVectors) {
      codes = __ldg(reinterpret_cast<const uint2*>(from));
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const uint32_t one = j < count ? __ldg(from + j) : 0;
        (j < 4 ? codes.x : codes.y) |= one << (8 * (j % 4));
      }
    }
  }

  __device__ __forceinline__ uint4 quantized(const DecodeInput&, float& scale) const {
    scale = tile::e8m0_to_float(byte);
    uint4 v;
    tile::fp8x4_to_halves<kFmt>(codes.x, v.x, v.y), tile::fp8x4_to_halves<kFmt>(codes.y, v.z, v.w);
    return v;
  }
};

// The rows of a slice in stretches of 256 k, one of a row to a warp; kBatch of them are loaded,
// then kTogether at once quantized.
template <class Eight, int kBatch, class RowOf>
__device__ __forceinline__ void fill_by(const DecodeInput& in, const InputRoom& to, int count,
                                        const RowOf& row_of) {
  constexpr int kTogether = kBatch < 4 ? kBatch : 4;
  const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
  const int rows_on = warps % count, k_on = warps / count * 256;
  int row = threadIdx.x / 32 % count, k = threadIdx.x / 32 / count * 256;
  // Where a lane's 8 numbers of row 0 at k = 0 go, and the scale of their block.
  const int quad_bytes = decode_input_bytes(to.rows), block = lane / 4 % 4 * to.rows;
  uint8_t* const values = to.to + lane / 16 * quad_bytes + block * 64 + lane % 4 * 16;
  uint8_t* const scales = to.to + lane / 16 * quad_bytes + to.rows * 256 + block * 4;
  while (k < to.length) {
    Eight x[kBatch];
    int rows[kBatch], ks[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      rows[j] = row, ks[j] = k;
      const int64_t from = k + lane * 8 < to.length ? row_of(row) : -1;
      const int64_t left = to.k - to.k0 - k - lane * 8;
      x[j].load(in, from, to.k0 + k + lane * 8, from < 0 ? 0 : left);
      row += rows_on, k += k_on;
      if (row >= count) row -= count, k += 256;
    }
#pragma unroll
    for (int first = 0; first < kBatch; first += kTogether) {
      if (ks[first] >= to.length) break;  // the whole warp
      uint4 v[kTogether];
      float scale[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) v[j] = x[first + j].quantized(in, scale[j]);
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        if (ks[first + j] + lane * 8 >= to.length) continue;
        const int quad = ks[first + j] / kDecodeQuad * quad_bytes;
        *reinterpret_cast<uint4*>(values + quad + rows[first + j] * 64) = v[j];
        if (lane % 4 == 0) {
          *reinterpret_cast<float*>(scales + quad + rows[first + j] * 4) = scale[j];
        }
      }
    }
  }
}

template <int kBatch, Element kFmt, bool kVectors, class RowOf>
__device__ __forceinline__ void fill_as(const DecodeInput& in, const InputRoom& to, int count,
                                        const RowOf& row_of) {
  constexpr int kWide = (kBatch + 1) / 2;
  if (in.scales != nullptr) {
    fill_by<EightCodes<kFmt, kVectors>, kBatch>(in, to, count, row_of);
  } else if (in.dtype == DType::bf16) {
    fill_by<EightValues<__nv_bfloat16, kFmt, kVectors>, kBatch>(in, to, count, row_of);
  } else if (in.dtype == DType::f16) {
    fill_by<EightValues<__half, kFmt, kVectors>, kBatch>(in, to, count, row_of);
  } else {
    fill_by<EightValues<float, kFmt, kVectors>, kWide>(in, to, count, row_of);
  }
}

template <int kBatch, bool kVectors, class RowOf>
__device__ __forceinline__ void fill_as_is(const DecodeInput& in, const InputRoom& to, int count,
                                           const RowOf& row_of) {
  if (in.dtype == DType::bf16) {
    fill_by<EightAsTheyAre<__nv_bfloat16, kVectors>, kBatch>(in, to, count, row_of);
  } else {
    fill_by<EightAsTheyAre<__half, kVectors>, kBatch>(in, to, count, row_of);
  }
}

// By all threads. row_of(i): the row of x that row i of the slice is, or -1 for zeros. Rows with
// other than whole vectors take their time.
template <int kBatch, class RowOf>
__device__ __forceinline__ void fill_slice(const DecodeInput& in, const InputRoom& to, int count,
                                           const RowOf& row_of) {
  const bool vectors = in.vectors && to.k % 8 == 0;
  if (in.as_is && vectors) {
    fill_as_is<kBatch, true>(in, to, count, row_of);
  } else if (in.as_is) {
    fill_as_is<1, false>(in, to, count, row_of);
  } else if (vectors && !in.e5m2) {
    fill_as<kBatch, Element::e4m3, true>(in, to, count, row_of);
  } else if (vectors) {
    fill_as<kBatch, Element::e5m2, true>(in, to, count, row_of);
  } else if (!in.e5m2) {
    fill_as<1, Element::e4m3, false>(in, to, count, row_of);
  } else {
    fill_as<1, Element::e5m2, false>(in, to, count, row_of);
  }
}

// Prepares blocks of `room_rows` rows for decode_kernel (DecodeInput::made), a policy of rows as
// there. Grid: x = stretches of two quads, y = blocks.
template <class Rows>
__global__ void __launch_bounds__(256)
    prepare_rows(const DecodeInput in, const Rows given, int room_rows, int64_t k, int quads) {
  tile::let_dependents_start();
  tile::await_predecessors();
  Rows rows = given;
  if (!rows.begin(blockIdx.y)) return;
  const int quad = 2 * static_cast<int>(blockIdx.x);
  const int64_t place = int64_t{blockIdx.y} * quads + quad;
  const InputRoom room{const_cast<uint8_t*>(in.made) + place * decode_input_bytes(room_rows),
                       room_rows, int64_t{quad} * kDecodeQuad, min(2, quads - quad) * kDecodeQuad,
                       k};
  fill_slice<4>(in, room, rows.count(), [&](int i) { return rows.in_row(i); });
}

}  // namespace te_mx::sm90
