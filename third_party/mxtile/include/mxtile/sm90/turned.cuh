// Matrices of 8 x 8 from shared memory, turned.
#pragma once

#include <cstdint>

namespace mxtile::sm90 {

// Loads four 8x8 matrices of 16-bit values; lane l gives the address of row l % 8 of matrix l / 8
// and gets rows 2 (l % 4), + 1 of column l / 4 of each.
__device__ __forceinline__ void ldmatrix_x4_turned(uint32_t (&m)[4], uint32_t addr) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(addr)
               : "memory");
}

}  // namespace mxtile::sm90
