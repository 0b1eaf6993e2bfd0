// Entry point of quantize: picks the instance for the input type and the format.
#include <cuda_runtime.h>

#include "quantize_kernel.cuh"
#include "quantize_launch.h"

namespace te_mx::sm90 {

namespace {

template <class T, tile::Fp8 kFmt>
Status launch_quantize(const QuantizeParams& p, cudaStream_t stream) {
  const dim3 grid = tile_grid(p, p.col_tiles);
  const auto kernel =
      wants_plain(p) ? quantize_kernel<T, kFmt, true> : quantize_kernel<T, kFmt, false>;
  kernel<<<grid, kQuantizeThreads, 0, stream>>>(p);
  return cudaGetLastError() == cudaSuccess ? Status::ok : Status::unsupported;
}

template <class T>
Status launch_format(const QuantizeParams& p, cudaStream_t stream) {
  return p.a.fmt == Format::e4m3 ? launch_quantize<T, tile::Fp8::e4m3>(p, stream)
                                 : launch_quantize<T, tile::Fp8::e5m2>(p, stream);
}

// out[col] = sum over tiles of partial[tile, col], each thread of 8 every eighth tile. It starts
// while the quantizer ends, and waits for it.
constexpr int kSumWidth = 32, kSumHeight = 8;

__global__ void __launch_bounds__(kSumWidth* kSumHeight)
    sum_tiles(const float* partial, float* out, int64_t tiles, int64_t cols) {
  __shared__ float sums[kSumHeight][kSumWidth];
  const int64_t col = static_cast<int64_t>(blockIdx.x) * kSumWidth + threadIdx.x;
  cudaGridDependencySynchronize();
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
  out[col] = s;
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

dim3 tile_grid(const QuantizeParams& p, int col_tiles) {
  const int64_t groups = (p.row_tiles + (1ll << p.group_bits) - 1) >> p.group_bits;
  constexpr int64_t kMaxY = 32768;
  return dim3(static_cast<unsigned>(col_tiles) << p.group_bits,
              static_cast<unsigned>(groups < kMaxY ? groups : kMaxY),
              static_cast<unsigned>((groups + kMaxY - 1) / kMaxY));
}

bool wants_plain(const QuantizeParams& p) {
  return (p.row.wanted && !p.row.packed) || (p.col.wanted && !p.col.packed);
}

Status launch_sums(const float* partial, float* out, int64_t tiles, int64_t cols,
                   cudaStream_t stream) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>((cols + kSumWidth - 1) / kSumWidth));
  config.blockDim = dim3(kSumWidth, kSumHeight);
  config.stream = stream;
  config.attrs = &early, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, sum_tiles, partial, out, tiles, cols) == cudaSuccess
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

Status quantize(const QuantizeArgs& a) {
  if (a.rows == 0 || a.cols == 0) return Status::ok;
  QuantizeParams p;
  Status status = quantize_params(a, p);
  if (status != Status::ok) return status;
  const auto stream = static_cast<cudaStream_t>(a.stream);
  status = a.x_dtype == DType::bf16  ? launch_format<__nv_bfloat16>(p, stream)
           : a.x_dtype == DType::f16 ? launch_format<__half>(p, stream)
                                     : launch_format<float>(p, stream);
  if (status != Status::ok || a.col_sum == nullptr) return status;
  return launch_sums(a.col_sum_ws, a.col_sum, p.row_tiles, a.cols, stream);
}

}  // namespace te_mx::sm90
