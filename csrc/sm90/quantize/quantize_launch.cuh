// Launches an instance of the quantizer for the input type, the format and the place of its tiles.
#pragma once

#include <cuda_runtime.h>

#include "common/device.h"
#include "common/launch.h"
#include "common/numbers.cuh"
#include "quantize/quantize_kernel.cuh"
#include "quantize/quantize_launch.h"

namespace te_mx::sm90 {

inline constexpr int kSpreadingSmem = 112 * 1024;

// Shared memory beyond what the kernel uses, so that no more CTAs fit on an SM than a grid of
// `tiles` needs there: one that starts while another ends would pile up where there is room first.
inline int spreading_smem(int64_t tiles, int sms) {
  return tiles <= sms ? kSpreadingSmem : tiles <= 2 * sms ? kSpreadingSmem / 2 : 0;
}

// Launches a kernel over tiles whose parameters end in `beside`. `tiles`: CTAs that have
// work, as far as the host knows.
template <class Params, class Where>
Status launch_spread(void (*kernel)(Params, Where), const Params& p, const Where& where, dim3 grid,
                     int64_t tiles, cudaStream_t stream, Start start) {
  Params params = p;
  params.beside = start == Start::beside;
  const int smem = spreading_smem(tiles, current_device().sms);
  return launch_early(kernel, {grid, kQuantizeThreads, stream, smem, 0, start != Start::after},
                      params, where);
}

// kPlain: whether a direction may be plain.
template <bool kPlain, class Where>
Status launch_quantize(const QuantizeParams& p, const Where& where, dim3 grid, int64_t tiles,
                       cudaStream_t stream, Start start) {
  const auto go = [&]<class T>(T) {
    const auto run = [&]<tile::Fp8 kFmt>() {
      return launch_spread(quantize_kernel<T, kFmt, kPlain, Where>, p, where, grid, tiles, stream,
                           start);
    };
    if constexpr (Where::kOfWeights) {
      return with_weights(p.a.element, run);
    } else {
      return with_element(p.a.element, run);
    }
  };
  return p.a.x_dtype == DType::bf16  ? go(__nv_bfloat16{})
         : p.a.x_dtype == DType::f16 ? go(__half{})
                                     : go(float{});
}

// The instances for rows.
Status launch_quantize(const QuantizeParams& p, const RowTiles& where, dim3 grid, int64_t tiles,
                       cudaStream_t stream, Start start);

// ------------------------------------------------------------------------------------- column sums
inline constexpr int kSumWidth = 32, kSumHeight = 8;

// out[at + col] = the sum of partial[tile, col] over `tiles`, each thread of kSumHeight every
// eighth tile. Tiles are `pitch` sums apart.
__device__ __forceinline__ void add_tiles(const float* partial, int64_t pitch, void* out,
                                          DType out_dtype, int64_t at, int64_t tiles,
                                          int64_t cols) {
  __shared__ float sums[kSumHeight][kSumWidth];
  const int64_t col = static_cast<int64_t>(blockIdx.x) * kSumWidth + threadIdx.x;
  float s = 0.0f;
  if (col < cols) {
#pragma unroll 8
    for (int64_t t = threadIdx.y; t < tiles; t += kSumHeight) s += partial[t * pitch + col];
  }
  sums[threadIdx.y][threadIdx.x] = s;
  __syncthreads();
  if (threadIdx.y != 0 || col >= cols) return;
#pragma unroll
  for (int i = 1; i < kSumHeight; ++i) s += sums[i][threadIdx.x];
  store_number(out, at + col, out_dtype, s);
}

// Launches a kernel around add_tiles() for `groups` sums of tiles, early.
template <class... Params, class... Args>
Status launch_adding(void (*kernel)(Params...), int64_t cols, int64_t groups, cudaStream_t stream,
                     Args... args) {
  const dim3 grid(static_cast<unsigned>((cols + kSumWidth - 1) / kSumWidth),
                  static_cast<unsigned>(groups));
  return launch_early(kernel, {grid, {kSumWidth, kSumHeight}, stream}, args...);
}

}  // namespace te_mx::sm90
