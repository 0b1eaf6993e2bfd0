// The range of scale bytes on vectors against a loop. The build adds the AVX-512 flags where the
// compiler knows them.
#include <cstdint>
#include <cstdio>
#include <vector>

#include "mxtile/simd/cpu.hpp"
#if defined(__AVX512BW__)
#include "mxtile/quant/scale_range_avx512.hpp"
#endif

int run() {  // by main.cpp
  int failures = 0;
#if defined(__AVX512BW__)
  if (!mxtile::cpu_features().avx512) return 0;  // built for more than this CPU has
  uint32_t state = 1;
  for (int count = 1; count <= 200; ++count) {
    for (const int spread : {1, 3, 40, 256}) {
      std::vector<uint8_t> bytes(static_cast<size_t>(count));
      int largest = -1, smallest = 255;
      for (uint8_t& byte : bytes) {
        state = state * 1664525u + 1013904223u;
        byte = static_cast<uint8_t>(state >> 24);
        byte = static_cast<uint8_t>(byte % 5 == 0 ? 255 : 250 - byte % spread % 251);
        if (byte == 255) continue;
        largest = byte > largest ? byte : largest;
        smallest = byte < smallest ? byte : smallest;
      }
      const auto got = mxtile::quant::avx512::scale_range_of(bytes.data(), count);
      if (got.largest_plus_one == largest + 1 && got.smallest == smallest) continue;
      if (++failures <= 20) std::printf("%d bytes, spread %d: wrong range\n", count, spread);
    }
  }
#endif
  return failures == 0 ? 0 : 1;
}
