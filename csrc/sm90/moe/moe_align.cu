// Slots sorted by expert and cut into blocks, by one CTA: a thread an expert walks over all slots,
// which lie in shared memory, so that every expert's keep their order.
#include "common/device.h"
#include "common/launch.h"
#include "mxtile/sm90/barrier.cuh"
#include "te_mx/sm90.h"

namespace te_mx::sm90 {
namespace {

constexpr int kThreads = kMostExperts;

__global__ void __launch_bounds__(kThreads)
    moe_align_kernel(const __grid_constant__ MoeAlignArgs a) {
  __shared__ int32_t slots[kMostSlots], ends[kThreads];
  __shared__ int32_t warp_sums[kThreads / 32];
  const int me = static_cast<int>(threadIdx.x), warp = me / 32, lane = me % 32;
  const int routed = static_cast<int>(a.routed), experts = static_cast<int>(a.experts);
  mxtile::sm90::await_predecessors();
  for (int i = me; i < routed; i += kThreads) slots[i] = __ldg(a.topk_ids + i);
  __syncthreads();

  int count = 0;
  if (me < experts) {
    for (int i = 0; i < routed; ++i) count += slots[i] == me ? 1 : 0;
  }
  const int padded = (count + a.block_m - 1) / a.block_m * a.block_m;
  int end = padded;  // the sum up to this expert
  for (int d = 1; d < 32; d *= 2) {
    const int before = __shfl_up_sync(~0u, end, d);
    if (lane >= d) end += before;
  }
  if (lane == 31) warp_sums[warp] = end;
  __syncthreads();
  for (int w = 0; w < warp; ++w) end += warp_sums[w];
  ends[me] = end;
  __syncthreads();

  const int used = ends[kThreads - 1], positions = static_cast<int>(a.positions);
  if (me < experts) {
    int at = end - padded;
    for (int i = 0; i < routed; ++i) {
      if (slots[i] == me) a.sorted_token_ids[at++] = i;
    }
    for (; at < end; ++at) a.sorted_token_ids[at] = routed;
    const int owner = a.expert_map == nullptr ? me : __ldg(a.expert_map + me);
    for (int b = (end - padded) / a.block_m; b < end / a.block_m; ++b) a.expert_ids[b] = owner;
  }
  for (int i = used + me; i < positions; i += kThreads) a.sorted_token_ids[i] = routed;
  for (int b = used / a.block_m + me; b < a.blocks; b += kThreads) a.expert_ids[b] = -1;
  if (me == 0) *a.num_tokens_post_padded = used;
}

}  // namespace

Status moe_align(const MoeAlignArgs& a) {
  if (a.topk_ids == nullptr || a.sorted_token_ids == nullptr || a.expert_ids == nullptr ||
      a.num_tokens_post_padded == nullptr || a.experts < 1 || a.block_m < 1)
    return Status::bad_argument;
  if (a.routed > kMostSlots || a.experts > kMostExperts || a.positions >= int64_t{1} << 30)
    return Status::unsupported;
  cudaLaunchAttribute attributes[] = {early_start()};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(1);
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(a.execution.stream);
  config.attrs = attributes;
  config.numAttrs = 1;
  return started(cudaLaunchKernelEx(&config, moe_align_kernel, a));
}

}  // namespace te_mx::sm90
