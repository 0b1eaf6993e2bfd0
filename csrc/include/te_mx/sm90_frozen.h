// Weights of MXFP8 (E4M3) that stand still: the tiles that the GEMM reads (sm90_layout.h, S = 8),
// from which the bytes that they were made of come back. Words of classes 0 and 1 have in their
// lowest 16 bits four numbers of 4 bits, the first block lowest, which products leave out:
//
//   0 .. 8    E - e: a code is what lies here times 2^(E - e); of blocks of zeros up to 11
//   12        a block of zeros whose scale byte lies aside
//   13, 14    a block of zeros with the scale byte 127, 0
//   15        scale byte 255
//
// Those of classes 2 and 3 hold the scale bytes, of blocks of zeros too; in class 2 these are 0
// above kFarExponent, and lie aside. A tile of which kMostAside codes would be rounded is of the
// next class.
//
// aside: what tiles do not tell, place << 8 | byte; in its first part codes (place row * k +
// column), those that were rounded and those of blocks of NaN that are not 0x7F; in its second
// scale bytes (place row * ceil(k/32) + block).
#pragma once

#include <cstdint>

#include "te_mx/sm90_layout.h"
#include "te_mx/types.h"

namespace te_mx::sm90 {

inline constexpr int kMostAside = 16;
inline constexpr uint32_t kZerosUpTo = 11, kByteAside = 12, kByte127 = 13, kByte0 = 14,
                          kByteNan = 15;

struct FrozenArgs {
  uint8_t* codes = nullptr;   // [rows, k], compact
  uint8_t* scales = nullptr;  // [rows, ceil(k/32)], compact
  int64_t rows = 0, k = 0;
  uint8_t* tiles = nullptr;   // [rows, packed_ld(k)], 16-byte aligned
  uint32_t* words = nullptr;  // packed_scale_words(rows, k)
  // Of pack alone. As many entries of each part as fit are written, in any order; counts, zero
  // before, gets the number of all. None are without counts.
  int64_t* aside = nullptr;  // [2, room]
  int64_t room = 0;
  unsigned long long* counts = nullptr;  // [2]
  Execution execution;
};

// Codes and scales to tiles and words.
Status pack_frozen(const FrozenArgs& args);
// The other way, without what lies aside.
Status unpack_frozen(const FrozenArgs& args);

}  // namespace te_mx::sm90
