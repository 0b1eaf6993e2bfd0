// Numbers from one dtype to another (te_mx/sm90_cast.h): a few thousand, a thread each.
#include "te_mx/sm90_cast.h"

#include <cuda_runtime.h>

#include "common/launch.h"
#include "common/numbers.cuh"
#include "mxtile/sm90/barrier.cuh"

namespace te_mx::sm90 {

namespace {

namespace tile = mxtile::sm90;
constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) cast_kernel(const __grid_constant__ CastArgs a) {
  tile::let_dependents_start();
  tile::await_predecessors();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= a.count) return;
  store_number(a.out, i, a.to, load_number(a.first, i, a.from));
  if (a.second != nullptr) {
    store_number(a.out, a.count + i, a.to, load_number(a.second, i, a.from));
  }
}

}  // namespace

Status cast(const CastArgs& a) {
  if (!known(a.from) || !known(a.to) || a.count < 0) return Status::bad_argument;
  if (a.count == 0) return Status::ok;
  if (a.first == nullptr || a.out == nullptr) return Status::bad_argument;
  const int64_t blocks = (a.count + kThreads - 1) / kThreads;
  if (blocks > INT32_MAX) return Status::unsupported;
  cudaLaunchAttribute early = early_start();
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks)), config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(a.execution.stream);
  config.attrs = &early, config.numAttrs = 1;
  return started(cudaLaunchKernelEx(&config, cast_kernel, a));
}

}  // namespace te_mx::sm90
