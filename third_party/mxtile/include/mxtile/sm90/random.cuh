// Random words by place: Philox4x32-7 (Salmon, Moraes, Dror and Shaw, SC 2011).
#pragma once

#include <cstdint>

namespace mxtile::sm90 {

inline constexpr int kPhiloxRounds = 7;

// Four words of each of the counters (c0, c1 + i, 0, 0) and a key. kUnroll: rounds at once; code is
// small with 1, where words are made in many places.
template <int kUnroll = kPhiloxRounds, int kCount>
__device__ __forceinline__ void philox(uint4 (&c)[kCount], uint32_t c0, uint32_t c1, uint2 key) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) c[i] = make_uint4(c0, c1 + i, 0, 0);
#pragma unroll kUnroll
  for (int round = 0; round < kPhiloxRounds; ++round) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const uint64_t a = static_cast<uint64_t>(c[i].x) * 0xD2511F53u;
      const uint64_t b = static_cast<uint64_t>(c[i].z) * 0xCD9E8D57u;
      c[i] = make_uint4(static_cast<uint32_t>(b >> 32) ^ c[i].y ^ key.x, static_cast<uint32_t>(b),
                        static_cast<uint32_t>(a >> 32) ^ c[i].w ^ key.y, static_cast<uint32_t>(a));
    }
    key.x += 0x9E3779B9u, key.y += 0xBB67AE85u;
  }
}

}  // namespace mxtile::sm90
