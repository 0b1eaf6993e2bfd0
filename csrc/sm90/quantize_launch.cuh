// Host side of the quantizer: its parameters, and the instance for the input type and the format.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

#include "device.h"
#include "launch.h"
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

// When a kernel starts: after its predecessor, while that ends, or at once, beside it.
enum class Start { after, early, beside };

inline constexpr int kSpreadingSmem = 112 * 1024;

// Shared memory beyond what the kernel uses, so that no more CTAs fit on an SM than a grid of
// `tiles` needs there: one that starts while another ends would pile up where there is room first.
inline int spreading_smem(int64_t tiles, int sms) {
  return tiles <= sms ? kSpreadingSmem : tiles <= 2 * sms ? kSpreadingSmem / 2 : 0;
}

// kPlain: whether a wanted direction may be plain.
template <class T, tile::Fp8 kFmt, bool kPlain, class Where>
Status launch_kernel(const QuantizeParams& p, const Where& where, int64_t matrices,
                     cudaStream_t stream, Start start) {
  const auto kernel = quantize_kernel<T, kFmt, kPlain, Where>;
  const Device device = current_device();
  static std::atomic<bool> ready[64];
  std::atomic<bool>& allowed = ready[device.index & 63];
  if (!allowed.load(std::memory_order_relaxed)) {
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSpreadingSmem) !=
        cudaSuccess)
      return Status::unsupported;
    allowed.store(true, std::memory_order_relaxed);
  }
  cudaLaunchConfig_t config{};
  config.gridDim = quantize_grid(p, matrices);
  config.blockDim = dim3(kQuantizeThreads);
  config.stream = stream;
  config.dynamicSmemBytes =
      spreading_smem(static_cast<int64_t>(p.row_tiles) * p.col_tiles * matrices, device.sms);
  cudaLaunchAttribute early = early_start();
  config.attrs = &early, config.numAttrs = start == Start::after ? 0 : 1;
  QuantizeParams params = p;
  params.beside = start == Start::beside;
  return cudaLaunchKernelEx(&config, kernel, params, where) == cudaSuccess ? Status::ok
                                                                           : Status::unsupported;
}

template <class T, bool kPlain, class Where>
Status launch_format(const QuantizeParams& p, const Where& where, int64_t matrices,
                     cudaStream_t stream, Start start) {
  using tile::Fp8;
  return p.a.fmt == Format::e4m3
             ? launch_kernel<T, Fp8::e4m3, kPlain>(p, where, matrices, stream, start)
             : launch_kernel<T, Fp8::e5m2, kPlain>(p, where, matrices, stream, start);
}

template <bool kPlain, class Where>
Status launch_quantize(const QuantizeParams& p, const Where& where, int64_t matrices,
                       cudaStream_t stream, Start start) {
  return p.a.x_dtype == DType::bf16
             ? launch_format<__nv_bfloat16, kPlain>(p, where, matrices, stream, start)
         : p.a.x_dtype == DType::f16
             ? launch_format<__half, kPlain>(p, where, matrices, stream, start)
             : launch_format<float, kPlain>(p, where, matrices, stream, start);
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

__device__ __forceinline__ void store_sum(void* out, DType dtype, int64_t i, float s) {
  if (dtype == DType::bf16) {
    static_cast<__nv_bfloat16*>(out)[i] = __float2bfloat16_rn(s);
  } else if (dtype == DType::f16) {
    static_cast<__half*>(out)[i] = __float2half_rn(s);
  } else {
    static_cast<float*>(out)[i] = s;
  }
}

// A kernel that starts while the quantizer ends, and waits for it: kSumWidth columns a CTA.
template <class... Params, class... Args>
Status launch_sums(void (*kernel)(Params...), int64_t cols, int64_t groups, cudaStream_t stream,
                   Args... args) {
  cudaLaunchAttribute early = early_start();
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
