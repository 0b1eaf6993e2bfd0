// Random words by place: Philox4x32-7 (Salmon, Moraes, Dror and Shaw, SC 2011).
#pragma once

#include <cstdint>

namespace mxtile::sm90 {

inline constexpr int kPhiloxRounds = 7;

// Four words of a counter (two words, the upper ones are 0) and a key. kUnroll: rounds at once;
// code is small with 1, where words are made in many places.
template <int kUnroll = kPhiloxRounds>
__device__ __forceinline__ uint4 philox(uint2 counter, uint2 key) {
  uint4 c = make_uint4(counter.x, counter.y, 0, 0);
#pragma unroll kUnroll
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t a = static_cast<uint64_t>(c.x) * 0xD2511F53u;
    const uint64_t b = static_cast<uint64_t>(c.z) * 0xCD9E8D57u;
    c = make_uint4(static_cast<uint32_t>(b >> 32) ^ c.y ^ key.x, static_cast<uint32_t>(b),
                   static_cast<uint32_t>(a >> 32) ^ c.w ^ key.y, static_cast<uint32_t>(a));
    key.x += 0x9E3779B9u, key.y += 0xBB67AE85u;
  }
  return c;
}

}  // namespace mxtile::sm90
