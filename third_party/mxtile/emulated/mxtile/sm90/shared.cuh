// mxtile/sm90/shared.cuh on the CPU.
#pragma once

#include <cstdint>

#include "mxtile/sm90/barrier.cuh"

namespace mxtile::sm90 {

template <bool kTurned = false>
void stmatrix_x4(uint32_t addr, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3) {
  struct Lane {
    uint32_t addr, m[4];
  };
  simt::together(~0u, "stmatrix", Lane{addr, {m0, m1, m2, m3}}, [](const auto& of) {
    const int lane = simt::self().lane;
    // This lane writes the row whose address it gave.
    uint8_t* const to = simt::place(of[lane].addr, 16, 16);
    for (int i = 0; i < 4; ++i) {
      uint32_t v = of[lane % 8 * 4 + i].m[lane / 8];
      if (kTurned) {  // values 2 i and the one after it of column lane % 8
        const int shift = lane % 2 * 16;
        const auto at = [&](int row) {
          return of[row * 4 + lane % 8 / 2].m[lane / 8] >> shift & 0xFFFF;
        };
        v = at(2 * i) | at(2 * i + 1) << 16;
      }
      std::memcpy(to + 4 * i, &v, 4);
    }
    return 0;
  });
  // Nobody reads what others have not written yet.
  simt::leave(simt::gather(~0u, "stmatrix", "", 0));
}

inline void stmatrix_x4_turned(uint32_t addr, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3) {
  stmatrix_x4<true>(addr, m0, m1, m2, m3);
}

inline void ldmatrix_x4(uint32_t (&m)[4], uint32_t addr) {
  simt::together(~0u, "ldmatrix", addr, [&](const auto& of) {
    const int lane = simt::self().lane;
    for (int i = 0; i < 4; ++i)
      std::memcpy(&m[i], simt::place(of[8 * i + lane / 4], 16, 16) + lane % 4 * 4, 4);
    return 0;
  });
}

template <class T>
T ld_shared(uint32_t addr) {
  T v;
  std::memcpy(&v, simt::place(addr, sizeof(T), sizeof(T)), sizeof(T));
  return v;
}
template <class T>
void st_shared(uint32_t addr, const T& v) {
  std::memcpy(simt::place(addr, sizeof(T), sizeof(T)), &v, sizeof(T));
}

inline uint32_t ld_shared_u32(uint32_t addr) { return ld_shared<uint32_t>(addr); }
inline uint2 ld_shared_u32x2(uint32_t addr) { return ld_shared<uint2>(addr); }
inline uint4 ld_shared_u32x4(uint32_t addr) { return ld_shared<uint4>(addr); }

inline uint32_t keep(uint32_t v) {
  asm volatile("" : "+r"(v));
  return v;
}

inline float own_zero() { return 0.0f; }

inline void st_shared_u32(uint32_t addr, uint32_t v) { st_shared(addr, v); }
inline void st_shared_u32x2(uint32_t addr, uint32_t a, uint32_t b) { st_shared(addr, uint2{a, b}); }
inline void st_shared_u32x4(uint32_t addr, uint4 v) { st_shared(addr, v); }
inline void st_shared_f32x2(uint32_t addr, float a, float b) { st_shared(addr, float2{a, b}); }

}  // namespace mxtile::sm90
