// Rows of x on their way to shared memory: as fp16 numbers of one slice of k, [block][row][32], and
// their scales in fp32, [block][row]. Values are quantized here, to the bytes of the quantizer.
#pragma once

#include "quantize/quantize_input.cuh"

namespace te_mx::sm90 {

// Rows of x: values to quantize, or codes with their scales.
struct DecodeInput {
  const void* x = nullptr;  // values or codes, [rows, k]
  int64_t ld = 0;
  const uint8_t* scales = nullptr;  // of codes, [rows, ceil(k/32)], compact; null: values
  DType dtype = DType::bf16;        // of values
  ScaleRule rule = ScaleRule::rceil;
  bool e5m2 = false;     // codes, given or made, are E5M2
  bool vectors = false;  // rows start at whole vectors of 8 elements
};

// Where a slice of x goes.
struct InputRoom {
  uint4* values;  // of 8 numbers
  float* scales;
  int rows;     // of room
  int64_t k0;   // first k of the slice, a multiple of 128
  int length;   // of the slice, likewise
  int64_t k;    // of x: what lies behind is zero
};

template <Element kFmt>
__device__ __forceinline__ uint32_t half2_of_codes(uint32_t codes) {
  const __half2 v = tile::fp8x2_to_half2<kFmt>(static_cast<uint16_t>(codes));
  return *reinterpret_cast<const uint32_t*>(&v);
}
template <Element kFmt>
__device__ __forceinline__ uint4 halves_of(uint2 codes) {
  return {half2_of_codes<kFmt>(codes.x), half2_of_codes<kFmt>(codes.x >> 16),
          half2_of_codes<kFmt>(codes.y), half2_of_codes<kFmt>(codes.y >> 16)};
}
__device__ __forceinline__ uint4 halves_of(uint2 codes, bool e5m2) {
  return e5m2 ? halves_of<Element::e5m2>(codes) : halves_of<Element::e4m3>(codes);
}

// Eight elements of T, `count` of which exist, as words of the quantizer.
template <class T>
struct EightValues {
  static constexpr bool kWide = sizeof(T) == 4;
  uint4 v[kWide ? 2 : 1];

  __device__ __forceinline__ void load(const T* from, int64_t count, bool vectors) {
    v[0] = make_uint4(0, 0, 0, 0);
    if constexpr (kWide) v[1] = make_uint4(0, 0, 0, 0);
    if (vectors && count >= 8) {
      v[0] = __ldg(reinterpret_cast<const uint4*>(from));
      if constexpr (kWide) v[1] = __ldg(reinterpret_cast<const uint4*>(from) + 1);
    } else {
      uint32_t* const words = reinterpret_cast<uint32_t*>(v);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (j >= count) continue;
        if constexpr (kWide) {
          words[j] = __ldg(reinterpret_cast<const uint32_t*>(from) + j);
        } else {
          words[j / 2] |=
              static_cast<uint32_t>(__ldg(reinterpret_cast<const uint16_t*>(from) + j)) << (16 * (j % 2));
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

  // Largest magnitude of a block: of four neighbouring lanes.
  __device__ __forceinline__ float most() const {
    using In = Input<T>;
    auto m = In::larger(In::larger(word(0), word(1)), In::larger(word(2), word(3)));
    m = In::larger(m, In::shuffle_xor(m, 1));
    m = In::larger(m, In::shuffle_xor(m, 2));
    const float2 two = In::magnitudes(m);
    const uint32_t a = __float_as_uint(two.x), b = __float_as_uint(two.y);
    return __uint_as_float(max(a, b));  // NaN wins: its bits are the largest
  }

  template <Element kFmt>
  __device__ __forceinline__ uint2 codes(uint32_t factor) const {
    const uint32_t f = factor * 0x10001u;
    const float2 a = Input<T>::scaled(word(0), f), b = Input<T>::scaled(word(1), f);
    const float2 c = Input<T>::scaled(word(2), f), d = Input<T>::scaled(word(3), f);
    return {tile::fp8x4<kFmt>(a.x, a.y, b.x, b.y), tile::fp8x4<kFmt>(c.x, c.y, d.x, d.y)};
  }
};

// One place of 8 numbers of the slice: row, and where in it.
struct InputPlace {
  int row, eighth;
  __device__ __forceinline__ InputPlace(int i, int length)
      : row(i / (length / 8)), eighth(i % (length / 8)) {}
  __device__ __forceinline__ void store(const InputRoom& to, uint4 v, float scale) const {
    const int at = (eighth / 4) * to.rows + row;
    to.values[at * 4 + eighth % 4] = v;
    if (eighth % 4 == 0) to.scales[at] = scale;
  }
};

// Values of `count` rows, quantized. Whole warps call it: four lanes have a block.
template <class T, class RowOf>
__device__ __forceinline__ void quantize_slice(const DecodeInput& in, const InputRoom& to,
                                               int count, const RowOf& row_of) {
  constexpr int kAtOnce = sizeof(T) == 4 ? 2 : 4;
  const int all = count * (to.length / 8);
  for (int base = 0; base < all; base += kAtOnce * blockDim.x) {
    EightValues<T> x[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int i = base + j * blockDim.x + threadIdx.x;
      const InputPlace at(i, to.length);
      const int64_t from = i < all ? row_of(at.row) : -1, k = to.k0 + 8 * at.eighth;
      x[j].load(static_cast<const T*>(in.x) + from * in.ld + k, from < 0 ? 0 : to.k - k,
                in.vectors);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int i = base + j * blockDim.x + threadIdx.x;
      if (i - static_cast<int>(threadIdx.x % 32) >= all) break;
      const float most = x[j].most();
      const uint32_t entry = in.e5m2 ? block_entry<T, Element::e5m2>(most, in.rule)
                                     : block_entry<T, Element::e4m3>(most, in.rule);
      const uint32_t factor = block_factor(entry);
      const uint4 v = in.e5m2 ? halves_of<Element::e5m2>(x[j].template codes<Element::e5m2>(factor))
                              : halves_of<Element::e4m3>(x[j].template codes<Element::e4m3>(factor));
      if (i < all) InputPlace(i, to.length).store(to, v, tile::e8m0_to_float(entry & 0xFF));
    }
  }
}

// Codes of `count` rows and their scales.
template <class RowOf>
__device__ __forceinline__ void copy_slice(const DecodeInput& in, const InputRoom& to, int count,
                                           const RowOf& row_of) {
  const int all = count * (to.length / 8);
  const int64_t blocks = (to.k + 31) / 32;
#pragma unroll 4
  for (int i = threadIdx.x; i < all; i += blockDim.x) {
    const InputPlace at(i, to.length);
    const int64_t row = row_of(at.row), k = to.k0 + 8 * at.eighth;
    const int64_t left = row < 0 ? 0 : to.k - k;
    const uint8_t* const from = static_cast<const uint8_t*>(in.x) + row * in.ld + k;
    uint2 codes = make_uint2(0, 0);
    if (in.vectors && left >= 8) {
      codes = __ldg(reinterpret_cast<const uint2*>(from));
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const uint32_t byte = j < left ? __ldg(from + j) : 0;
        (j < 4 ? codes.x : codes.y) |= byte << (8 * (j % 4));
      }
    }
    const uint32_t scale = left > 0 ? __ldg(in.scales + row * blocks + k / 32) : 127;
    at.store(to, halves_of(codes, in.e5m2), tile::e8m0_to_float(scale));
  }
}

// row_of(i): the row of x that row i of the slice is, or -1 for zeros.
template <class RowOf>
__device__ __forceinline__ void fill_slice(const DecodeInput& in, const InputRoom& to, int count,
                                           const RowOf& row_of) {
  if (in.scales != nullptr) {
    copy_slice(in, to, count, row_of);
  } else if (in.dtype == DType::bf16) {
    quantize_slice<__nv_bfloat16>(in, to, count, row_of);
  } else if (in.dtype == DType::f16) {
    quantize_slice<__half>(in, to, count, row_of);
  } else {
    quantize_slice<float>(in, to, count, row_of);
  }
}

}  // namespace te_mx::sm90
