// The tensor-core instruction of one warp on fp16 registers.
#pragma once

#include <cstdint>

namespace mxtile::sm90 {

// d[16, 8] += a[16, 16] @ b[16, 8] in fp32. Lane 4g + t holds, two numbers a word:
//   a0: row g, k 2t and 2t + 1;  a1: row g + 8, the same k;  a2, a3: the same rows, k 8 further on
//   b0: k 2t and 2t + 1 of column g;  b1: k 8 further on
//   d[0], d[1]: row g, columns 2t and 2t + 1;  d[2], d[3]: row g + 8
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                             uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

}  // namespace mxtile::sm90
