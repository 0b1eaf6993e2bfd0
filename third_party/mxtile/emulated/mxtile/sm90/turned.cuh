// mxtile/sm90/turned.cuh on the CPU.
#pragma once

#include <cstdint>

#include "mxtile/sm90/barrier.cuh"

namespace mxtile::sm90 {

inline void ldmatrix_x4_turned(uint32_t (&m)[4], uint32_t addr) {
  simt::together(~0u, "ldmatrix", addr, [&](const auto& of) {
    const int lane = simt::self().lane;
    for (int i = 0; i < 4; ++i) {
      uint16_t two[2];
      for (int j = 0; j < 2; ++j)
        std::memcpy(&two[j], simt::place(of[8 * i + lane % 4 * 2 + j], 16, 16) + lane / 4 * 2, 2);
      m[i] = two[0] | static_cast<uint32_t>(two[1]) << 16;
    }
    return 0;
  });
}

}  // namespace mxtile::sm90
