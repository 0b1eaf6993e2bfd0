// The end of a GEMM with K in parts: adds the parts up, in their order, and applies the epilogue.
//
// This kernel takes about as long as memory takes to answer.
#include "common/launch.h"
#include "gemm/gemm_finish.cuh"

namespace te_mx::sm90 {

namespace {

constexpr int kThreads = 32 * kFinishRows;

struct SplitFinish {
  FinishParams finish;
  const float* sums;  // [parts][rows][pitch]
  int64_t size;       // of one part
  int64_t pitch;
  int column_blocks;
};

__global__ void __launch_bounds__(kThreads, 4)
    finish_kernel(const __grid_constant__ SplitFinish p) {
  __shared__ FinishSums rows;
  tile::let_dependents_start();
  tile::await_predecessors();
  const int block = static_cast<int>(blockIdx.x) / p.column_blocks;
  const int col0 = static_cast<int>(blockIdx.x) % p.column_blocks * kFinishColumns;
  const auto sums = [&](int part, int row, int col) {
    return __ldcg(reinterpret_cast<const float4*>(p.sums + row * p.pitch + col + part * p.size));
  };
  finish_block(p.finish, rows, block, col0, static_cast<int>(threadIdx.x), sums,
               [] { __syncthreads(); });
}

}  // namespace

Status finish_split(const GemmArgs& a) {
  const int64_t m = a.lhs.rows, n = a.rhs.rows;
  const SplitSums sizes = split_sums(a);
  const int64_t blocks = (m + kFinishRows - 1) / kFinishRows;
  float* const sums = static_cast<float*>(a.execution.workspace);
  SplitFinish p{};
  p.sums = sums, p.size = sizes.rows * sizes.pitch, p.pitch = sizes.pitch;
  p.finish = finish_params(a, a.execution.parts, sums + a.execution.parts * p.size);
  p.column_blocks = static_cast<int>((n + kFinishColumns - 1) / kFinishColumns);
  if (blocks * p.column_blocks > INT32_MAX) return Status::unsupported;

  const auto stream = static_cast<cudaStream_t>(a.execution.stream);
  const dim3 grid(static_cast<unsigned>(blocks * p.column_blocks));
  const Status status = launch_early(finish_kernel, {grid, kThreads, stream}, p);
  if (status != Status::ok) return status;
  return a.epilogue.bias_grad == nullptr
             ? Status::ok
             : reduce_columns(p.finish.bias_grad, a.epilogue.bias_grad, blocks, n, stream);
}

}  // namespace te_mx::sm90
