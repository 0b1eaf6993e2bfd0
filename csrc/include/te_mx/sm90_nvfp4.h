// NVFP4 weights that stand still for products with inputs that are not quantized, and the call.
// Host code alone, for machines without a GPU too.
//
// Weights [n, k] lie as quads of 16 rows x 128 of k, [n / 64][k / 128][4], a quad in 1,152 bytes:
// 0.5625 bytes a weight. n is filled up to 64, k to 128, with zeros.
//   codes   1,024 bytes: words [2][32 lanes][4]. Lane 4g + t of word 4h + i has the eight codes of
//           the 16 of k from 16 (4h + i) on that are its part of operand A of a product of 16-bit
//           numbers: pairs p = 0 .. 3 of row g + 8 (p % 2), k 2t + 8 (p / 2) and the one after it.
//           Of a pair, the second code lies 16 bits above the first. Bits of a code (sign, then the
//           other three): 15, 8:6 of pair 0; 12, 5:3 of pair 1; 14, 2:0 of pair 2; 13, 11:9 of
//           pair 3.
//   scales  128 bytes: words [8 rows g][4], word i of blocks 2i and 2i + 1: bytes of row g, block
//           2i; row g + 8, block 2i; row g, block 2i + 1; row g + 8, block 2i + 1. A scale that is
//           not zero is an E5M3 number without sign times 2^-22: a byte e * 8 + m is (1 + m / 8) *
//           2^(e - 22), 255 is NaN.
#pragma once

#include <cstdint>

namespace te_mx::sm90 {

inline constexpr int kNvfp4Rows = 64;     // of weights, that a warpgroup multiplies at once
inline constexpr int kNvfp4Quad = 128;    // of k
inline constexpr int kNvfp4Bytes = 1152;  // of a quad
inline constexpr int kNvfp4Block = 4 * kNvfp4Bytes;
constexpr int64_t nvfp4_bytes(int64_t n, int64_t k) {
  return (n + 63) / 64 * ((k + 127) / 128) * kNvfp4Block;
}

}  // namespace te_mx::sm90
