// Peak of fused multiply-add on f32 vectors: enough independent sums to hide its latency.
#pragma once

#include "common/peak.h"

namespace te_mx::cpu {
namespace {

template <class S, int kSums>
int64_t peak_f32(int64_t rounds, float* sink) {
  typename S::F acc[kSums];
  for (auto& sum : acc) sum = S::set(0.0f);
  const auto a = S::set(0.5f), b = S::set(1.0f);
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 24
    for (int s = 0; s < kSums; ++s) acc[s] = S::fma(acc[s], a, b);
  }
  float lanes[S::kLanes], total = 0;
  for (const auto& sum : acc) {
    S::store(lanes, sum);
    total += lanes[0];
  }
  *sink = total;
  return static_cast<int64_t>(kSums) * 2 * S::kLanes;
}

}  // namespace
}  // namespace te_mx::cpu
