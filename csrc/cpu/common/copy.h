// Copies of a few bytes. memcpy() of a size that the compiler does not know is a call, which costs
// more than such a copy.
#pragma once

#include <cstdint>
#include <cstring>

namespace te_mx::cpu {

// static: files with different flags call it.
[[gnu::always_inline]] static inline void copy_few(uint8_t* to, const uint8_t* from, int64_t n) {
  if (n >= 16) {
    if (n > 128) return static_cast<void>(std::memcpy(to, from, static_cast<size_t>(n)));
    for (int64_t i = 0; i + 16 < n; i += 16) std::memcpy(to + i, from + i, 16);
    std::memcpy(to + n - 16, from + n - 16, 16);  // may overlap the last one
  } else if (n >= 8) {
    uint64_t low, high;
    std::memcpy(&low, from, 8);
    std::memcpy(&high, from + n - 8, 8);
    std::memcpy(to, &low, 8);
    std::memcpy(to + n - 8, &high, 8);
  } else if (n >= 4) {
    uint32_t low, high;
    std::memcpy(&low, from, 4);
    std::memcpy(&high, from + n - 4, 4);
    std::memcpy(to, &low, 4);
    std::memcpy(to + n - 4, &high, 4);
  } else if (n > 0) {  // without a loop, which compilers make a call of memcpy() again
    const uint8_t first = from[0], middle = from[n / 2], last = from[n - 1];
    to[0] = first, to[n / 2] = middle, to[n - 1] = last;
  }
}

}  // namespace te_mx::cpu
