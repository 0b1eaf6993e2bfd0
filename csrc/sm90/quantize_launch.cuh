// Host side of the quantizer: its parameters, and the instance for the input type and the format.
#pragma once

#include <cuda_runtime.h>

#include "quantize_kernel.cuh"

namespace te_mx::sm90 {

inline int last_of(int64_t size) { return static_cast<int>((size - 1) % kTile + 1); }

// Rows of `width` codes, in vectors of `bytes` where every row allows it.
inline CodesOut codes_out(uint8_t* plain, const Packed& packed, int64_t width, int bytes) {
  CodesOut out{};
  out.packed = packed.codes != nullptr;
  out.codes = out.packed ? packed.codes : plain;
  out.wanted = out.codes != nullptr;
  out.ld = out.packed ? packed_ld(width) : width;
  out.last_width = last_of(out.ld);
  out.vectors = out.ld % bytes == 0 && reinterpret_cast<uintptr_t>(out.codes) % bytes == 0;
  return out;
}

inline bool valid(const QuantizeArgs& a) {
  return a.rows >= 0 && a.cols >= 0 && a.spread >= 0 && a.spread <= kMaxSpread &&
         (a.row_codes == nullptr || a.row_packed.codes == nullptr) &&
         (a.col_codes == nullptr || a.col_packed.codes == nullptr) &&
         !(a.col_lies_as_x && a.col_packed.codes != nullptr) &&
         (a.col_sum == nullptr || a.col_sum_ws != nullptr);
}

// Of a matrix that is cut into `row_tiles` tiles along its rows, with `k` codes in a row of the
// columns.
inline Status quantize_params(QuantizeParams& p, const QuantizeArgs& a, int64_t row_tiles,
                              int64_t k) {
  const int64_t col_tiles = (a.cols + 127) / 128;
  // Eight row tiles at a time keep both the rows and the columns that are written together long.
  p.group_bits = 0;
  while (p.group_bits < 3 && (1 << p.group_bits) < row_tiles) ++p.group_bits;
  if (row_tiles > INT32_MAX || col_tiles > INT32_MAX >> p.group_bits) return Status::unsupported;
  p.a = a;
  p.row = codes_out(a.row_codes, a.row_packed, a.cols, 8);
  p.col = a.col_lies_as_x ? codes_out(a.col_codes, {}, a.cols, 8)
                          : codes_out(a.col_codes, a.col_packed, k, 16);
  p.x_vectors = a.cols % 8 == 0 && a.x_stride * (a.x_dtype == DType::f32 ? 4 : 2) % 16 == 0 &&
                reinterpret_cast<uintptr_t>(a.x) % 16 == 0;
  p.row_tiles = static_cast<int>(row_tiles), p.col_tiles = static_cast<int>(col_tiles);
  p.last_rows = last_of(a.rows), p.last_cols = last_of(a.cols);
  return (p.row.packed && !p.row.vectors) || (p.col.packed && !p.col.vectors) ? Status::bad_argument
                                                                              : Status::ok;
}

// One CTA a tile; the last dimension of the grid counts matrices, or what a dimension cannot hold.
inline dim3 quantize_grid(const QuantizeParams& p, int64_t matrices) {
  const int64_t groups = (p.row_tiles + (1ll << p.group_bits) - 1) >> p.group_bits;
  constexpr int64_t kMaxY = 32768;
  return dim3(static_cast<unsigned>(p.col_tiles) << p.group_bits,
              static_cast<unsigned>(groups < kMaxY ? groups : kMaxY),
              static_cast<unsigned>(matrices * ((groups + kMaxY - 1) / kMaxY)));
}

// kPlain: whether a wanted direction may be plain.
template <bool kPlain, class T, class Where>
Status launch_quantize(const QuantizeParams& p, const Where& where, dim3 grid,
                       cudaStream_t stream) {
  if (p.a.fmt == Format::e4m3) {
    quantize_kernel<T, tile::Fp8::e4m3, kPlain><<<grid, kQuantizeThreads, 0, stream>>>(p, where);
  } else {
    quantize_kernel<T, tile::Fp8::e5m2, kPlain><<<grid, kQuantizeThreads, 0, stream>>>(p, where);
  }
  return cudaGetLastError() == cudaSuccess ? Status::ok : Status::unsupported;
}

template <bool kPlain, class Where>
Status launch_quantize(const QuantizeParams& p, const Where& where, dim3 grid,
                       cudaStream_t stream) {
  return p.a.x_dtype == DType::bf16 ? launch_quantize<kPlain, __nv_bfloat16>(p, where, grid, stream)
         : p.a.x_dtype == DType::f16 ? launch_quantize<kPlain, __half>(p, where, grid, stream)
                                     : launch_quantize<kPlain, float>(p, where, grid, stream);
}

// ------------------------------------------------------------------------------------- column sums
inline constexpr int kSumWidth = 32, kSumHeight = 8;

// The sum of partial[tile, col] over `tiles`, each thread of kSumHeight every eighth tile; in
// threads of y 0.
__device__ __forceinline__ float sum_of_tiles(float (&sums)[kSumHeight][kSumWidth],
                                              const float* partial, int64_t tiles, int64_t cols,
                                              int64_t col) {
  float s = 0.0f;
  if (col < cols) {
#pragma unroll 8
    for (int64_t t = threadIdx.y; t < tiles; t += kSumHeight) s += partial[t * cols + col];
  }
  sums[threadIdx.y][threadIdx.x] = s;
  __syncthreads();
  if (threadIdx.y != 0) return s;
#pragma unroll
  for (int i = 1; i < kSumHeight; ++i) s += sums[i][threadIdx.x];
  return s;
}

// A kernel that starts while the quantizer ends, and waits for it: kSumWidth columns a CTA.
template <class... Params, class... Args>
Status launch_sums(void (*kernel)(Params...), int64_t cols, int64_t groups, cudaStream_t stream,
                   Args... args) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>((cols + kSumWidth - 1) / kSumWidth),
                        static_cast<unsigned>(groups));
  config.blockDim = dim3(kSumWidth, kSumHeight);
  config.stream = stream;
  config.attrs = &early, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, args...) == cudaSuccess ? Status::ok
                                                                     : Status::unsupported;
}

}  // namespace te_mx::sm90
