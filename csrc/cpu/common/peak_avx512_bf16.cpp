// Peak of vdpbf16ps: enough independent sums to hide its latency.
#include "common/peak.h"
#include "mxtile/bf16/avx512.hpp"

namespace te_mx::cpu {

int64_t peak_avx512_bf16(int64_t rounds, float* sink) {
  namespace bf16 = mxtile::bf16;
  constexpr int kSums = 24;
  bf16::Vec acc[kSums];
  for (auto& sum : acc) sum = bf16::zero();
  const bf16::Words a = bf16::broadcast_word(0x3A803A80u), b = bf16::broadcast_word(0x3F803F80u);
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 24
    for (int s = 0; s < kSums; ++s) acc[s] = bf16::dot(acc[s], a, b);
  }
  float total = 0;
  for (const auto& sum : acc) total += bf16::sum(sum);
  *sink = total;
  return kSums * 2 * 32;
}

}  // namespace te_mx::cpu
