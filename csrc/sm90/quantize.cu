// Entry points of quantize: one matrix, or two beside each other.
#include "quantize_launch.cuh"

namespace te_mx::sm90 {

namespace {

// out[col] = sum over tiles of partial[tile, col].
__global__ void __launch_bounds__(kSumWidth* kSumHeight)
    sum_tiles(const float* partial, void* out, DType out_dtype, int64_t tiles, int64_t cols) {
  __shared__ float sums[kSumHeight][kSumWidth];
  const int64_t col = static_cast<int64_t>(blockIdx.x) * kSumWidth + threadIdx.x;
  tile::let_dependents_start();
  tile::await_predecessors();
  const float s = sum_of_tiles(sums, partial, tiles, cols, col);
  if (threadIdx.y == 0 && col < cols) store_sum(out, out_dtype, col, s);
}

Status launch(const QuantizeArgs& a, Start start) {
  if (!valid(a)) return Status::bad_argument;
  if (a.rows == 0 || a.cols == 0) return Status::ok;
  QuantizeParams p{};
  Status status = quantize_params(p, a, (a.rows + 127) / 128, a.rows);
  if (status != Status::ok) return status;
  const auto stream = static_cast<cudaStream_t>(a.stream);
  const bool plain = (p.row.wanted && !p.row.packed) || (p.col.wanted && !p.col.packed);
  status = plain ? launch_quantize<true>(p, OneMatrix{}, 1, stream, start)
                 : launch_quantize<false>(p, OneMatrix{}, 1, stream, start);
  if (status != Status::ok || a.col_sum == nullptr) return status;
  const float* const partial = a.col_sum_ws;
  return launch_sums(sum_tiles, a.cols, 1, stream, partial, a.col_sum, a.col_sum_dtype,
                     static_cast<int64_t>(p.row_tiles), a.cols);
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
