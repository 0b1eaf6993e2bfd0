// AMX tile words. Include only from files compiled with -mamx-tile -mamx-bf16.
//
// The words are inline assembly because the compilers' intrinsics take the tile number as a literal
// token and, in gcc 12, tell the optimizer nothing about the memory they read.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mxtile::amx {

// Eight tiles of 16 rows for as long as the object lives; one object a thread at a time. Tiles 4
// and 5 (A) have rows of 64 bytes; C (0-3) and B (6, 7) have rows of 4 bytes a column.
class Tiles {
 public:
  __attribute__((always_inline)) explicit Tiles(int columns = 16) {
    Config config{};
    config.palette = 1;
    for (int t = 0; t < 8; ++t) {
      config.column_bytes[t] = static_cast<uint16_t>(t == 4 || t == 5 ? 64 : 4 * columns);
      config.rows[t] = 16;
    }
    asm volatile("ldtilecfg %0" : : "m"(config));
  }
  __attribute__((always_inline)) ~Tiles() { asm volatile("tilerelease" : : : "memory"); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  template <int T>
  __attribute__((always_inline)) void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(T));
  }
  template <int T>
  __attribute__((always_inline)) void load(const void* p, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(T) : "memory");
  }
  // The same for data that is read once.
  template <int T>
  __attribute__((always_inline)) void load_once(const void* p, int64_t stride) {
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(T) : "memory");
  }
  template <int T>
  __attribute__((always_inline)) void store(void* p, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(T) : "memory");
  }
  // C[16][columns] f32 += A[16 rows][32 k] * B[16 k pairs][columns][2], bf16.
  template <int C, int A, int B>
  __attribute__((always_inline)) void dot_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
  }

 private:
  struct alignas(64) Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t column_bytes[16];
    uint8_t rows[16];
  };
  static_assert(sizeof(Config) == 64);
};

}  // namespace mxtile::amx
