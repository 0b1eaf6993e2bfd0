// Rows of x as the bf16 values of their MXFP8 codes: the numbers that quantize() and dequantize()
// make of them, which bf16 holds but below 2^-133.
#pragma once

#include "decode/decode_values.cuh"
#include "mxtile/sm90/swizzle.cuh"

namespace te_mx::sm90 {

// Eight of a row. By whole warps.
template <Element kFmt, class Eight>
__device__ __forceinline__ uint4 values_of_codes(Eight& x, const DecodeInput& in) {
  const EightMade made = x.made(in);
  const uint4 h = halves_of<kFmt>(uint2{made.words.x, made.words.y});
  const auto two = [&](uint32_t halves) {
    const float2 v = __half22float2(*reinterpret_cast<const __half2*>(&halves));
    const __nv_bfloat162 b = __floats2bfloat162_rn(v.x * made.scale, v.y * made.scale);
    return *reinterpret_cast<const uint32_t*>(&b);
  };
  return {two(h.x), two(h.y), two(h.z), two(h.w)};
}

// Which rows of x a product has, where they are not all of them in order.
struct RowPlaces {
  const int32_t* at = nullptr;
  int last = 0;  // of x
  int each = 1;  // that share a row of x, where they are in order
  __device__ __forceinline__ int of(int r) const {
    return at == nullptr ? r / each : min(max(__ldcg(at + r), 0), last);
  }
};

// A block of up to 8 rows of bf16 in whole vectors, quads [first, first + length) of x, to shared
// memory as TMA would write it: two tiles of 64 k a quad, under the 128-byte swizzle. By the
// kThreads first threads: half a warp has a row of a quad.
template <int kThreads>
__device__ __forceinline__ void make_rows(const DecodeInput& in, const RowPlaces& places, int k,
                                          const DecodeBlock& rows, int first, int length,
                                          uint8_t* to) {
  constexpr int kAtOnce = 4, kHalfWarps = kThreads / 16;
  using Eight = EightValues<__nv_bfloat16, Element::e4m3, true, false, false>;
  const int lane = threadIdx.x % 16, all = rows.count * length;
  int row[kAtOnce], quad[kAtOnce];
#pragma unroll 1
  for (int from = 0; from < all; from += kAtOnce * kHalfWarps) {
    Eight x[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int i = from + j * kHalfWarps + static_cast<int>(threadIdx.x) / 16;
      quad[j] = i / rows.count, row[j] = i - quad[j] * rows.count;
      const int at = (first + quad[j]) * kDecodeQuad + lane * 8;
      x[j].load(in, i < all ? places.of(rows.first + row[j]) : 0, at, i < all ? k - at : 0);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const uint4 v = values_of_codes<Element::e4m3>(x[j], in);
      if (quad[j] < length)
        *reinterpret_cast<uint4*>(to + quad[j] * 2048 + lane / 8 * 1024 +
                                  tile::swizzle128(row[j], lane % 8)) = v;
    }
  }
}

// Rows [m, k] to `to`, rows ld elements apart, ld a multiple of 8: zeros behind k.
struct Nvfp4Input {
  DecodeInput in;
  RowPlaces places;
  int m = 0, k = 0;
  uint16_t* to = nullptr;
  int64_t ld = 0;
};

inline constexpr int kInputThreads = 256, kInputRows = kInputThreads / 16;

template <Element kFmt, class Eight>
__device__ __forceinline__ void write_values(const Nvfp4Input& a) {
  const int row = static_cast<int>(blockIdx.y) * kInputRows + static_cast<int>(threadIdx.x) / 16;
  const int k = static_cast<int>(blockIdx.x) * kDecodeQuad + threadIdx.x % 16 * 8;
  Eight x;
  x.load(a.in, a.places.of(min(row, a.m - 1)), k, a.k - k);
  const uint4 v = values_of_codes<kFmt>(x, a.in);
  if (row < a.m && k < a.ld) *reinterpret_cast<uint4*>(a.to + row * a.ld + k) = v;
}

template <Element kFmt, bool kVectors>
__device__ __forceinline__ void write_any(const Nvfp4Input& a) {
  using Bf16 = EightValues<__nv_bfloat16, kFmt, kVectors, false, false>;
  using F16 = EightValues<__half, kFmt, kVectors, false, false>;
  const bool bf16 = a.in.dtype == DType::bf16;
  if constexpr (kVectors) {
    if (a.in.gate != nullptr) {
      if (bf16) return write_values<kFmt, EightGated<Bf16, __nv_bfloat16>>(a);
      return write_values<kFmt, EightGated<F16, __half>>(a);
    }
  }
  if (bf16) return write_values<kFmt, Bf16>(a);
  if (a.in.dtype == DType::f16) return write_values<kFmt, F16>(a);
  return write_values<kFmt, EightValues<float, kFmt, kVectors, false, false>>(a);
}

template <Element kFmt>
__device__ __forceinline__ void write_rows(const Nvfp4Input& a) {
  if (a.in.vectors && a.k % 8 == 0) return write_any<kFmt, true>(a);
  write_any<kFmt, false>(a);
}

}  // namespace te_mx::sm90
