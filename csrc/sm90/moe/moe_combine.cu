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
    const float4 v = __ldg(reinterpret_cast<const float4*>(row));
    return {{v.x, v.y, v.z, v.w}};
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) four.v[i] = i < left ? __ldg(row + i) : 0.0f;
  return four;
}

__global__ void __launch_bounds__(kThreads, 4)
    moe_combine_kernel(const __grid_constant__ MoeCombineArgs a, bool vectors) {
  mxtile::sm90::let_dependents_start();
  mxtile::sm90::await_predecessors();
  const int64_t quads = (a.n + 3) / 4;
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= a.tokens * quads) return;
  const int64_t token = at / quads, column = at % quads * 4;
  const int left = static_cast<int>(min(int64_t{4}, a.n - column));
  const int64_t slot0 = token * a.top_k;
  float sums[4] = {};
  for (int first = 0; first < a.top_k; first += kAtOnce) {
    Four values[kAtOnce];
    float weights[kAtOnce];
    bool there[kAtOnce];
    // NOTE: everything is asked for before anything is looked at.
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      there[j] = first + j < a.top_k;
      if (!there[j]) continue;
      const int64_t slot = slot0 + first + j;
      const int at =
          a.slot_positions == nullptr ? static_cast<int>(slot) : __ldg(a.slot_positions + slot);
      values[j] = load_four(a.values + int64_t{max(at, 0)} * a.n + column, left, vectors);
      weights[j] = a.weights == nullptr ? 1.0f : __ldg(a.weights + slot);
      const int expert = a.slot_experts == nullptr ? 0 : __ldg(a.slot_experts + slot);
      there[j] = at >= 0 && (a.slot_experts == nullptr || (expert >= 0 && expert < a.experts));
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (!there[j]) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sums[i] = __fadd_rn(sums[i], __fmul_rn(values[j].v[i], weights[j]));
    }
  }
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
  const int64_t threads = a.tokens * ((a.n + 3) / 4), ctas = (threads + kThreads - 1) / kThreads;
  if (ctas == 0) return Status::ok;
  if (ctas > INT32_MAX) return Status::unsupported;
  const bool vectors = a.n % 4 == 0 && reinterpret_cast<uintptr_t>(a.values) % 16 == 0 &&
                       reinterpret_cast<uintptr_t>(a.out) % 8 == 0;
  const dim3 grid(static_cast<unsigned>(ctas));
  return launch_early(moe_combine_kernel, {grid, kThreads, a.execution.stream}, a, vectors);
}

}  // namespace te_mx::sm90
