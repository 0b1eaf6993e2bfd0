// Dequantizes plain MX codes [rows, cols]: code * 2^(byte - 127). In bf16 this is the exact path's
// operand: every value of a block with a scale byte in [4, 246] is a bf16 number.
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "mxtile/sm90/fp8.cuh"
#include "te_mx/sm90.h"

namespace te_mx::sm90 {

namespace {

namespace tile = mxtile::sm90;

inline constexpr int kThreads = 256;

template <class T>
__device__ __forceinline__ T rounded(float v);
template <>
__device__ __forceinline__ float rounded<float>(float v) {
  return v;
}
template <>
__device__ __forceinline__ __nv_bfloat16 rounded<__nv_bfloat16>(float v) {
  return __float2bfloat16_rn(v);
}
template <>
__device__ __forceinline__ __half rounded<__half>(float v) {
  return __float2half_rn(v);
}

__device__ __forceinline__ uint32_t scale_byte(const DequantizeArgs& a, int64_t row, int64_t col) {
  return a.blocks_along_rows ? a.scales[row / 32 * a.cols + col]
                             : a.scales[row * ((a.cols + 31) / 32) + col / 32];
}

// i / per_row, in 32 bits where they do: a 64-bit division costs more than the rest of the step.
__device__ __forceinline__ int64_t row_of(int64_t i, int64_t count, int64_t per_row) {
  return count <= UINT32_MAX ? static_cast<uint32_t>(i) / static_cast<uint32_t>(per_row)
                             : i / per_row;
}

// 8 codes a thread and step; cols is a multiple of 8 and the addresses are aligned.
template <tile::Fp8 kFmt, class T>
__global__ void __launch_bounds__(kThreads)
    dequantize_vectors(const __grid_constant__ DequantizeArgs a) {
  const int64_t vectors = a.rows * a.cols / 8, step = static_cast<int64_t>(gridDim.x) * kThreads;
#pragma unroll 2
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < vectors;
       i += step) {
    const uint2 c = __ldcs(reinterpret_cast<const uint2*>(a.codes) + i);
    const uint32_t words[2] = {c.x, c.y};
    const int64_t row = row_of(i, vectors, a.cols / 8), col = i * 8 - row * a.cols;
    float factor = a.blocks_along_rows ? 0.0f : tile::e8m0_to_float(scale_byte(a, row, col));
    alignas(16) T out[8];
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const float2 v = __half22float2(
          tile::fp8x2_to_half2<kFmt>(static_cast<uint16_t>(words[j / 4] >> (j % 4 * 8))));
      if (a.blocks_along_rows) factor = tile::e8m0_to_float(scale_byte(a, row, col + j));
      out[j] = rounded<T>(v.x * factor);
      if (a.blocks_along_rows) factor = tile::e8m0_to_float(scale_byte(a, row, col + j + 1));
      out[j + 1] = rounded<T>(v.y * factor);
    }
    uint4* const to = reinterpret_cast<uint4*>(static_cast<T*>(a.out) + i * 8);
#pragma unroll
    for (int j = 0; j < static_cast<int>(sizeof(T)) / 2; ++j)
      to[j] = reinterpret_cast<const uint4*>(out)[j];
  }
}

template <tile::Fp8 kFmt, class T>
__global__ void __launch_bounds__(kThreads)
    dequantize_elements(const __grid_constant__ DequantizeArgs a) {
  const int64_t total = a.rows * a.cols, step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < total;
       i += step) {
    const int64_t row = row_of(i, total, a.cols);
    const float v = __low2float(tile::fp8x2_to_half2<kFmt>(a.codes[i]));
    static_cast<T*>(a.out)[i] =
        rounded<T>(v * tile::e8m0_to_float(scale_byte(a, row, i - row * a.cols)));
  }
}

template <tile::Fp8 kFmt, class T>
void launch(const DequantizeArgs& a) {
  const bool vectors = a.cols % 8 == 0 && reinterpret_cast<uintptr_t>(a.codes) % 8 == 0 &&
                       reinterpret_cast<uintptr_t>(a.out) % 16 == 0;
  const int64_t items = vectors ? a.rows * a.cols / 8 : a.rows * a.cols;
  const int64_t blocks = (items + kThreads - 1) / kThreads;
  const auto grid = static_cast<unsigned>(blocks < 132 * 64 ? blocks : 132 * 64);
  const auto stream = static_cast<cudaStream_t>(a.stream);
  if (vectors) {
    dequantize_vectors<kFmt, T><<<grid, kThreads, 0, stream>>>(a);
  } else {
    dequantize_elements<kFmt, T><<<grid, kThreads, 0, stream>>>(a);
  }
}

template <tile::Fp8 kFmt>
void launch_any(const DequantizeArgs& a) {
  if (a.out_dtype == DType::bf16) {
    launch<kFmt, __nv_bfloat16>(a);
  } else if (a.out_dtype == DType::f16) {
    launch<kFmt, __half>(a);
  } else {
    launch<kFmt, float>(a);
  }
}

}  // namespace

Status dequantize(const DequantizeArgs& a) {
  if (a.rows < 0 || a.cols < 0) return Status::bad_argument;
  if (a.rows == 0 || a.cols == 0) return Status::ok;
  a.fmt == Format::e4m3 ? launch_any<tile::Fp8::e4m3>(a) : launch_any<tile::Fp8::e5m2>(a);
  return cudaGetLastError() == cudaSuccess ? Status::ok : Status::unsupported;
}

}  // namespace te_mx::sm90
