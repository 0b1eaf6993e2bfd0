// Host side of the GEMM: the device, the configurations that were compiled, the launcher of each.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

#include "device.h"
#include "te_mx/sm90_grouped.h"

namespace te_mx::sm90 {

// How many clusters of one kernel run at the same time, per device. Asked once: a persistent grid
// larger than that would leave whole clusters to run after the others.
class ClusterCount {
 public:
  // 0 when the device cannot run the kernel. Also lets the kernel have `smem` bytes.
  int of(int device, const void* kernel, int threads, int smem, int cluster);

 private:
  std::atomic<int> counts_[64] = {};
};

// Blocks along M that are walked together: one wave of `clusters` blocks of bm x bn covers a nearly
// square region.
inline int group_size(int clusters, int bm, int bn) {
  int best = 1;
  int64_t least = INT64_MAX;
  for (int g = 1; g <= clusters; ++g) {
    const int64_t rows = static_cast<int64_t>(g) * bm;
    const int64_t cols = static_cast<int64_t>((clusters + g - 1) / g) * bn;
    if (rows + cols < least) least = rows + cols, best = g;
  }
  return best;
}

Status launch_192x128_cluster2(const GemmArgs& a, const Device& device);
Status launch_256x128_cluster2(const GemmArgs& a, const Device& device);
Status launch_128x128(const GemmArgs& a, const Device& device);
Status launch_64x128(const GemmArgs& a, const Device& device);

// What a grouped GEMM is told beside its operands; first_rows as for gemm_k, or null.
struct GroupedCall {
  Groups groups;
  bool along_k;
  const int32_t* first_rows;
};

Status launch_grouped_192x128_cluster2(const GemmArgs& a, const GroupedCall& call,
                                       const Device& device);
Status launch_grouped_256x128(const GemmArgs& a, const GroupedCall& call, const Device& device);

// bias_grad[n] = sum over blocks of 64 rows of partial[block, n], in order.
Status reduce_columns(const float* partial, float* out, int64_t blocks, int64_t n,
                      cudaStream_t stream);

}  // namespace te_mx::sm90
