// Random words by number: Philox4x32-10 (Salmon, Moraes, Dror and Shaw, SC 2011).
#pragma once

#include <cstdint>

namespace mxtile::sm90 {

// Four words of a counter (its lower half; the upper one is 0) and a key.
// kUnroll: rounds at once; code is small with 1, where words are made in many places.
template <int kUnroll>
__device__ __forceinline__ uint4 philox(uint64_t counter, uint2 key) {
  uint4 c = make_uint4(static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), 0, 0);
#pragma unroll kUnroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = static_cast<uint64_t>(c.x) * 0xD2511F53u;
    const uint64_t b = static_cast<uint64_t>(c.z) * 0xCD9E8D57u;
    c = make_uint4(static_cast<uint32_t>(b >> 32) ^ c.y ^ key.x, static_cast<uint32_t>(b),
                   static_cast<uint32_t>(a >> 32) ^ c.w ^ key.y, static_cast<uint32_t>(a));
    key.x += 0x9E3779B9u, key.y += 0xBB67AE85u;
  }
  return c;
}

// The words of eight neighbouring numbers: word i % 4 of the counter i / 4.
template <int kUnroll>
struct EightWords {
  uint32_t of[8];

  __device__ __forceinline__ EightWords(uint64_t first, uint2 key) {
    const uint64_t counter = first / 4;
    const uint32_t skip = static_cast<uint32_t>(first) % 4;
    const uint4 a = philox<kUnroll>(counter, key), b = philox<kUnroll>(counter + 1, key);
    const uint32_t all[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) of[i] = all[i];
    if (skip == 0) return;
    const uint4 c = philox<1>(counter + 2, key);
    const uint32_t more[12] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w, c.x, c.y, c.z, c.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      of[i] = skip == 1 ? more[i + 1] : skip == 2 ? more[i + 2] : more[i + 3];
    }
  }
};

}  // namespace mxtile::sm90
