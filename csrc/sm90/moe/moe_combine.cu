// What the experts made of each token, weighted and added up in the order of its slots. Without
// positions slot r lies in row r, without weights these are 1.
#include <algorithm>

#include "common/device.h"
#include "common/launch.h"
#include "common/numbers.cuh"
#include "mxtile/sm90/barrier.cuh"
#include "te_mx/sm90.h"

namespace te_mx::sm90 {
namespace {

constexpr int kThreads = 256, kAtOnce = 8;  // slots whose numbers are on their way together

struct Four {
  float v[4];
};

// Numbers i .. i + 3 of a row, of which `left` exist.
__device__ __forceinline__ Four load_four(const float* row, int left, bool vectors) {
  Four four{};
  if (vectors) {
    if (left == 0) return four;
    const float4 v = __ldg(reinterpret_cast<const float4*>(row));
    return {{v.x, v.y, v.z, v.w}};
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) four.v[i] = i < left ? __ldg(row + i) : 0.0f;
  return four;
}

// Grid: x = tokens, a part of the columns after the other.
__global__ void __launch_bounds__(kThreads, 4)
    moe_combine_kernel(const __grid_constant__ MoeCombineArgs a, bool vectors, int parts) {
  mxtile::sm90::let_dependents_start();
  mxtile::sm90::await_predecessors();
  const unsigned part = blockIdx.x % static_cast<unsigned>(parts);
  const int64_t token = blockIdx.x / static_cast<unsigned>(parts), slot0 = token * a.top_k;
  const int64_t column = 4 * (int64_t{part} * blockDim.x + threadIdx.x);
  const int left = static_cast<int>(max(int64_t{0}, min(int64_t{4}, a.n - column)));
  const float* const values = a.values + column;
  float sums[4] = {};
#pragma unroll 1
  for (int first = 0; first < a.top_k; first += kAtOnce) {
    // A lane asks for the slot that is its own, of kAtOnce; a row of -1 does not count.
    const int own = first + static_cast<int>(threadIdx.x) % kAtOnce;
    int row = -1;
    float weight = 1.0f;
    if (own < a.top_k) {
      const int64_t slot = slot0 + own;
      row = a.slot_positions == nullptr ? static_cast<int>(slot) : __ldg(a.slot_positions + slot);
      if (a.weights != nullptr) weight = __ldg(a.weights + slot);
      const int expert = a.slot_experts == nullptr ? 0 : __ldg(a.slot_experts + slot);
      if (a.slot_experts != nullptr && (expert < 0 || expert >= a.experts)) row = -1;
    }
    Four four[kAtOnce];
    // NOTE: everything is asked for before anything is looked at.
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int64_t at = max(__shfl_sync(~0u, row, j), 0);
      four[j] = load_four(values + at * a.n, first + j < a.top_k ? left : 0, vectors);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const float by = __shfl_sync(~0u, weight, j);
      if (__shfl_sync(~0u, row, j) < 0) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[i] = __fadd_rn(sums[i], __fmul_rn(four[j].v[i], by));
    }
  }
  if (left == 0) return;
  if (vectors && a.out_dtype != DType::f32) {
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(a.out) + token * a.n + column) = {
        pair_of(a.out_dtype, sums[0], sums[1]), pair_of(a.out_dtype, sums[2], sums[3])};
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (i < left) store_number(a.out, token * a.n + column + i, a.out_dtype, sums[i]);
}

}  // namespace

Status moe_combine(const MoeCombineArgs& a) {
  if (a.values == nullptr || a.out == nullptr || a.top_k < 1 || !known(a.out_dtype))
    return Status::bad_argument;
  if (a.tokens * a.top_k >= int64_t{1} << 30) return Status::unsupported;
  // As few threads as have the columns of a token in so many parts.
  const int64_t quads = (a.n + 3) / 4, parts = (quads + kThreads - 1) / kThreads;
  const int64_t ctas = a.tokens * parts;
  if (ctas == 0) return Status::ok;
  if (ctas > INT32_MAX) return Status::unsupported;
  const bool vectors = a.n % 4 == 0 && reinterpret_cast<uintptr_t>(a.values) % 16 == 0 &&
                       reinterpret_cast<uintptr_t>(a.out) % 8 == 0;
  const auto threads = static_cast<unsigned>(((quads + parts - 1) / parts + 31) / 32 * 32);
  return launch_early(moe_combine_kernel,
                      {dim3(static_cast<unsigned>(ctas)), dim3(threads), a.execution.stream}, a,
                      vectors, static_cast<int>(parts));
}

}  // namespace te_mx::sm90
