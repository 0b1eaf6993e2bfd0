// Entry point of quantize: picks the instance for the input type and the format.
#include <cuda_runtime.h>

#include <atomic>

#include "device.h"
#include "launch.h"
#include "quantize_kernel.cuh"
#include "quantize_launch.h"

namespace te_mx::sm90 {

namespace {

// When a kernel starts: after its predecessor, while that ends, or at once, beside it.
enum class Start { after, early, beside };

constexpr int kSpreadingSmem = 112 * 1024;

// Shared memory beyond what the kernel uses, so that no more CTAs fit on an SM than a grid of
// `tiles` needs there: one that starts while another ends would pile up where there is room first.
int spreading_smem(int64_t tiles, int sms) {
  return tiles <= sms ? kSpreadingSmem : tiles <= 2 * sms ? kSpreadingSmem / 2 : 0;
}

template <class T, tile::Fp8 kFmt>
Status launch_quantize(const QuantizeParams& p, cudaStream_t stream, Start start) {
  const bool plain = wants_plain(p);
  const auto kernel = plain ? quantize_kernel<T, kFmt, true> : quantize_kernel<T, kFmt, false>;
  cudaLaunchConfig_t config{};
  config.gridDim = tile_grid(p, p.col_tiles);
  config.blockDim = dim3(kQuantizeThreads);
  config.stream = stream;
  const Device device = current_device();
  const int64_t tiles = static_cast<int64_t>(p.row_tiles) * p.col_tiles;
  static std::atomic<bool> ready[2][64];
  std::atomic<bool>& allowed = ready[plain][device.index & 63];
  if (!allowed.load(std::memory_order_relaxed)) {
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSpreadingSmem) !=
        cudaSuccess)
      return Status::unsupported;
    allowed.store(true, std::memory_order_relaxed);
  }
  config.dynamicSmemBytes = spreading_smem(tiles, device.sms);
  cudaLaunchAttribute early = early_start();
  config.attrs = &early, config.numAttrs = start == Start::after ? 0 : 1;
  QuantizeParams params = p;
  params.beside = start == Start::beside;
  return cudaLaunchKernelEx(&config, kernel, params) == cudaSuccess ? Status::ok
                                                                    : Status::unsupported;
}

template <class T>
Status launch_format(const QuantizeParams& p, cudaStream_t stream, Start start) {
  return p.a.fmt == Format::e4m3 ? launch_quantize<T, tile::Fp8::e4m3>(p, stream, start)
                                 : launch_quantize<T, tile::Fp8::e5m2>(p, stream, start);
}

// out[col] = sum over tiles of partial[tile, col], each thread of 8 every eighth tile.
constexpr int kSumWidth = 32, kSumHeight = 8;

__global__ void __launch_bounds__(kSumWidth* kSumHeight)
    sum_tiles(const float* partial, void* out, DType out_dtype, int64_t tiles, int64_t cols) {
  __shared__ float sums[kSumHeight][kSumWidth];
  const int64_t col = static_cast<int64_t>(blockIdx.x) * kSumWidth + threadIdx.x;
  tile::let_dependents_start();
  tile::await_predecessors();
  float s = 0.0f;
  if (col < cols) {
#pragma unroll 8
    for (int64_t t = threadIdx.y; t < tiles; t += kSumHeight) s += partial[t * cols + col];
  }
  sums[threadIdx.y][threadIdx.x] = s;
  __syncthreads();
  if (threadIdx.y != 0 || col >= cols) return;
#pragma unroll
  for (int i = 1; i < kSumHeight; ++i) s += sums[i][threadIdx.x];
  if (out_dtype == DType::bf16) {
    static_cast<__nv_bfloat16*>(out)[col] = __float2bfloat16_rn(s);
  } else if (out_dtype == DType::f16) {
    static_cast<__half*>(out)[col] = __float2half_rn(s);
  } else {
    static_cast<float*>(out)[col] = s;
  }
}

int last_of(int64_t size) { return static_cast<int>((size - 1) % kTile + 1); }

// Rows of `width` codes, in vectors of `bytes` where every row allows it.
CodesOut codes_out(uint8_t* plain, const Packed& packed, int64_t rows, int64_t width, int bytes) {
  CodesOut out{};
  out.packed = packed.codes != nullptr;
  out.codes = out.packed ? packed.codes : plain;
  out.wanted = out.codes != nullptr;
  out.ld = out.packed ? packed_ld(width) : width;
  out.last_rows = last_of(rows), out.last_width = last_of(out.ld);
  out.vectors = out.ld % bytes == 0 && reinterpret_cast<uintptr_t>(out.codes) % bytes == 0;
  return out;
}

}  // namespace

bool wants_plain(const QuantizeParams& p) {
  return (p.row.wanted && !p.row.packed) || (p.col.wanted && !p.col.packed);
}

dim3 tile_grid(const QuantizeParams& p, int col_tiles) {
  const int64_t groups = (p.row_tiles + (1ll << p.group_bits) - 1) >> p.group_bits;
  constexpr int64_t kMaxY = 32768;
  return dim3(static_cast<unsigned>(col_tiles) << p.group_bits,
              static_cast<unsigned>(groups < kMaxY ? groups : kMaxY),
              static_cast<unsigned>((groups + kMaxY - 1) / kMaxY));
}

Status launch_sums(const float* partial, void* out, DType out_dtype, int64_t tiles, int64_t cols,
                   cudaStream_t stream) {
  cudaLaunchAttribute early = early_start();
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>((cols + kSumWidth - 1) / kSumWidth));
  config.blockDim = dim3(kSumWidth, kSumHeight);
  config.stream = stream;
  config.attrs = &early, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, sum_tiles, partial, out, out_dtype, tiles, cols) == cudaSuccess
             ? Status::ok
             : Status::unsupported;
}

Status quantize_params(const QuantizeArgs& a, QuantizeParams& p) {
  if (a.rows < 0 || a.cols < 0 || a.spread < 0 || a.spread > kMaxSpread ||
      (a.row_codes != nullptr && a.row_packed.codes != nullptr) ||
      (a.col_codes != nullptr && a.col_packed.codes != nullptr) ||
      (a.col_lies_as_x && a.col_packed.codes != nullptr) ||
      (a.col_sum != nullptr && a.col_sum_ws == nullptr)) {
    return Status::bad_argument;
  }
  const int64_t row_tiles = (a.rows + 127) / 128, col_tiles = (a.cols + 127) / 128;
  // Eight row tiles at a time keep both the rows and the columns that are written together long.
  int group_bits = 0;
  while (group_bits < 3 && (1 << group_bits) < row_tiles) ++group_bits;
  if (row_tiles > INT32_MAX || col_tiles > INT32_MAX >> group_bits) return Status::unsupported;
  p = {};
  p.a = a;
  p.row = codes_out(a.row_codes, a.row_packed, a.rows, a.cols, 8);
  p.col = a.col_lies_as_x ? codes_out(a.col_codes, {}, a.rows, a.cols, 8)
                          : codes_out(a.col_codes, a.col_packed, a.cols, a.rows, 16);
  p.x_vectors = a.cols % 8 == 0 && a.x_stride * (a.x_dtype == DType::f32 ? 4 : 2) % 16 == 0 &&
                reinterpret_cast<uintptr_t>(a.x) % 16 == 0;
  p.row_tiles = static_cast<int>(row_tiles), p.col_tiles = static_cast<int>(col_tiles);
  p.last_rows = last_of(a.rows), p.last_cols = last_of(a.cols);
  p.group_bits = group_bits;
  if ((p.row.packed && !p.row.vectors) || (p.col.packed && !p.col.vectors))
    return Status::bad_argument;
  return Status::ok;
}

namespace {

Status launch(const QuantizeArgs& a, Start start) {
  if (a.rows == 0 || a.cols == 0) return Status::ok;
  QuantizeParams p;
  Status status = quantize_params(a, p);
  if (status != Status::ok) return status;
  const auto stream = static_cast<cudaStream_t>(a.stream);
  status = a.x_dtype == DType::bf16  ? launch_format<__nv_bfloat16>(p, stream, start)
           : a.x_dtype == DType::f16 ? launch_format<__half>(p, stream, start)
                                     : launch_format<float>(p, stream, start);
  if (status != Status::ok || a.col_sum == nullptr) return status;
  return launch_sums(a.col_sum_ws, a.col_sum, a.col_sum_dtype, p.row_tiles, a.cols, stream);
}

}  // namespace

Status quantize(const QuantizeArgs& a) { return launch(a, Start::early); }

Status quantize_two(const QuantizeArgs& first, const QuantizeArgs& second) {
  if (first.col_sum != nullptr || first.stream != second.stream) return Status::bad_argument;
  if (first.rows == 0 || first.cols == 0) return quantize(second);
  // NOTE: what ran before is over when the first starts, so the second need not wait for it.
  const Status status = launch(first, Start::after);
  return status == Status::ok ? launch(second, Start::beside) : status;
}

}  // namespace te_mx::sm90
