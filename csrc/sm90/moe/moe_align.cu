// Slots sorted by expert and cut into blocks. Every CTA counts all slots, and places those of a
// part of its own, warp after warp, so that every expert's keep their order. No CTA waits for
// another one.
#include "common/device.h"
#include "common/launch.h"
#include "mxtile/sm90/barrier.cuh"
#include "te_mx/sm90.h"

namespace te_mx::sm90 {
namespace {

// Of a CTA, which places as many slots; few slots have few, who wait less for each other.
constexpr int kMostThreads = 1024, kFewThreads = 128, kMostWarps = kMostThreads / 32;

// The expert by which a slot is sorted, -1 for none.
__device__ __forceinline__ int expert_of(const MoeAlignArgs& a, int64_t slot) {
  int expert = __ldg(a.topk_ids + slot);
  if (a.mapped > 0) expert = expert >= 0 && expert < a.mapped ? __ldg(a.expert_map + expert) : -1;
  return expert >= 0 && expert < a.experts ? expert : -1;
}

__global__ void __launch_bounds__(kMostThreads)
    moe_align_kernel(const __grid_constant__ MoeAlignArgs a) {
  __shared__ int32_t counts[kMostExperts];  // of all slots
  __shared__ int32_t starts[kMostExperts];  // of those before the part; where its own ones go
  __shared__ int32_t slots[kMostThreads];   // the experts of the part's slots
  __shared__ int32_t warp_sums[kMostWarps];
  const int threads = static_cast<int>(blockDim.x);
  const int me = static_cast<int>(threadIdx.x), warp = me / 32, lane = me % 32;
  const int experts = static_cast<int>(a.experts), cta = static_cast<int>(blockIdx.x);
  const int64_t first = int64_t{cta} * threads;
  for (int e = me; e < experts; e += threads) counts[e] = starts[e] = 0;
  mxtile::sm90::await_predecessors();
  // NOTE: not before. Who starts now finds nothing of earlier lists in L1 once it may read.
  mxtile::sm90::let_dependents_start();
  __syncthreads();
  slots[me] = -1;
  for (int64_t i = me; i < a.routed; i += threads) {
    const int expert = expert_of(a, i);
    if (i >= first && i < first + threads) slots[i - first] = expert;
    if (expert < 0) continue;
    atomicAdd(&counts[expert], 1);
    if (i < first) atomicAdd(&starts[expert], 1);
  }
  __syncthreads();

  // Every thread has some experts that follow each other, whose blocks begin behind `end`.
  const int each = (experts + threads - 1) / threads;
  const int from = min(me * each, experts), to = min(from + each, experts);
  const auto padded = [&](int e) { return (counts[e] + a.block_m - 1) / a.block_m * a.block_m; };
  int mine = 0;
  for (int e = from; e < to; ++e) mine += padded(e);
  int end = mine;  // the sum up to these experts
  for (int d = 1; d < 32; d *= 2) {
    const int before = __shfl_up_sync(~0u, end, d);
    if (lane >= d) end += before;
  }
  if (lane == 31) warp_sums[warp] = end;
  __syncthreads();
  int used = 0;
  for (int w = 0; w < threads / 32; ++w) {
    if (w < warp) end += warp_sums[w];
    used += warp_sums[w];
  }
  end -= mine;
  for (int e = from; e < to; ++e) {
    const int start = end, rows_end = start + counts[e];
    end += padded(e);
    starts[e] += start;
    if (e % gridDim.x != cta) continue;
    if (a.ends != nullptr) a.ends[e] = rows_end;
    if (a.sorted_token_ids != nullptr)
      for (int at = rows_end; at < end; ++at) a.sorted_token_ids[at] = static_cast<int>(a.routed);
    if (a.expert_ids != nullptr) {
      const bool named = a.expert_map != nullptr && a.mapped == 0;
      const int owner = named ? __ldg(a.expert_map + e) : e;
      for (int b = start / a.block_m; b < end / a.block_m; ++b) a.expert_ids[b] = owner;
    }
  }
  __syncthreads();

  // Of a slot's warp, those with its expert: before it, and all. Warps take their turns.
  const int expert = slots[me];
  int before = 0, all = 0;
#pragma unroll 8
  for (int d = 0; d < 32; ++d) {
    const bool same = __shfl_sync(~0u, expert, d) == expert;
    all += same, before += same && d < lane;
  }
  const int left = static_cast<int>(min(int64_t{threads}, max(int64_t{0}, a.routed - first)));
  int at = -1;
  for (int w = 0; w < (left + 31) / 32; ++w) {
    if (w == warp && expert >= 0) at = starts[expert] + before;
    __syncwarp();
    if (w == warp && expert >= 0 && before == 0) starts[expert] += all;
    __syncthreads();
  }
  if (me < left) {
    const int slot = static_cast<int>(first) + me;
    if (a.slot_positions != nullptr) a.slot_positions[slot] = at;
    if (at >= 0 && a.sorted_token_ids != nullptr) a.sorted_token_ids[at] = slot;
    if (at >= 0 && a.rows != nullptr) a.rows[at] = slot / a.top_k;
  }
  const int64_t thread = int64_t{cta} * threads + me, step = int64_t{gridDim.x} * threads;
  if (a.sorted_token_ids != nullptr)
    for (int64_t i = used + thread; i < a.positions; i += step)
      a.sorted_token_ids[i] = static_cast<int>(a.routed);
  if (a.expert_ids != nullptr)
    for (int64_t b = used / a.block_m + thread; b < a.blocks; b += step) a.expert_ids[b] = -1;
  if (thread == 0 && a.num_tokens_post_padded != nullptr) *a.num_tokens_post_padded = used;
}

}  // namespace

Status moe_align(const MoeAlignArgs& a) {
  const bool lists = a.sorted_token_ids != nullptr && a.expert_ids != nullptr &&
                     a.num_tokens_post_padded != nullptr;
  if (a.topk_ids == nullptr || (!lists && a.ends == nullptr) || a.experts < 1 || a.block_m < 1 ||
      a.top_k < 1 || a.routed < 0 || (a.mapped > 0 && a.expert_map == nullptr))
    return Status::bad_argument;
  constexpr int64_t kMost = int64_t{1} << 30;
  if (a.experts > kMostExperts || a.positions >= kMost || a.routed >= kMost)
    return Status::unsupported;
  const int threads =
      a.routed < kFewThreads && a.experts <= kFewThreads ? kFewThreads : kMostThreads;
  const dim3 grid(static_cast<unsigned>(a.routed / threads + 1));
  return launch_early(moe_align_kernel, {grid, dim3(threads), a.execution.stream}, a);
}

}  // namespace te_mx::sm90
