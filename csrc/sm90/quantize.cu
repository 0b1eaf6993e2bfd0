// Entry point of quantize: one matrix.
#include "quantize_launch.cuh"

namespace te_mx::sm90 {

namespace {

// out[col] = sum over tiles of partial[tile, col].
__global__ void __launch_bounds__(kSumWidth* kSumHeight)
    sum_tiles(const float* partial, float* out, int64_t tiles, int64_t cols) {
  __shared__ float sums[kSumHeight][kSumWidth];
  const int64_t col = static_cast<int64_t>(blockIdx.x) * kSumWidth + threadIdx.x;
  cudaGridDependencySynchronize();
  const float s = sum_of_tiles(sums, partial, tiles, cols, col);
  if (threadIdx.y == 0 && col < cols) out[col] = s;
}

}  // namespace

Status quantize(const QuantizeArgs& a) {
  if (!valid(a)) return Status::bad_argument;
  if (a.rows == 0 || a.cols == 0) return Status::ok;
  QuantizeParams p{};
  Status status = quantize_params(p, a, (a.rows + 127) / 128, a.rows);
  if (status != Status::ok) return status;
  const auto stream = static_cast<cudaStream_t>(a.stream);
  const bool plain = (p.row.wanted && !p.row.packed) || (p.col.wanted && !p.col.packed);
  const dim3 grid = quantize_grid(p, 1);
  status = plain ? launch_quantize<true>(p, OneMatrix{}, grid, stream)
                 : launch_quantize<false>(p, OneMatrix{}, grid, stream);
  if (status != Status::ok || a.col_sum == nullptr) return status;
  const float* const partial = a.col_sum_ws;
  return launch_sums(sum_tiles, a.cols, 1, stream, partial, a.col_sum,
                     static_cast<int64_t>(p.row_tiles), a.cols);
}

}  // namespace te_mx::sm90
