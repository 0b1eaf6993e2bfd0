// Ends of groups that the host knows, to the device: they travel as arguments of a kernel, so that
// a CUDA graph holds them.
#include <cuda_runtime_api.h>

#include <algorithm>

#include "common/device.h"
#include "te_mx/sm90.h"

namespace te_mx::sm90 {

namespace {

struct Ends {
  static constexpr int kMost = 512;
  int of[kMost];
};

__global__ void write_ends(const __grid_constant__ Ends ends, int count, int32_t* to) {
  if (static_cast<int>(threadIdx.x) < count) to[threadIdx.x] = ends.of[threadIdx.x];
}

}  // namespace

Status upload_ends(const int64_t* ends, int64_t count, int32_t* to, void* stream) {
  for (int64_t first = 0; first < count; first += Ends::kMost) {
    const int now = static_cast<int>(std::min<int64_t>(Ends::kMost, count - first));
    Ends part{};
    std::copy(ends + first, ends + first + now, part.of);
    write_ends<<<1, Ends::kMost, 0, static_cast<cudaStream_t>(stream)>>>(part, now, to + first);
  }
  return started(cudaGetLastError());
}

}  // namespace te_mx::sm90
