// Packed operands of the Hopper backend (Layout::tiles, group_rows, group_k), what its GEMM reads.
//
// An operand [rows, K] is cut into tiles of 128 rows x 128 K. A tile has four blocks of 32 a row; a
// block counts when its scale byte is not 255 and it has a nonzero code. e is a block's scale byte,
// E the largest e of the counting blocks of the tile (127 without any), S the allowed spread
// (0..8).
//
//   class 0, tile-shared   every e >= E - S: codes times 2^(e - E), rounded to nearest even;
//                          one exponent E
//   class 1, row-shared    the same inside each row's group of four: one exponent a row (E for a
//                          row without blocks)
//   class 2, spread        codes untouched, four exponents a row; all e >= 1
//   class 3, far           the same, for tiles with an e of 0, or any tile with E > 190: careful
//                          arithmetic
//
// MXFP4 lies as codes of E4M3, which has every E2M1 number times 2^-8 .. 2^6: S is 14 whatever is
// asked for, nothing is rounded, and blocks share max(E - 6, 0) in place of E below. Classes 2 and
// 3 hold the numbers themselves.
//
// kByRows in the place of S is for products whose rows keep their bits beside any others: tiles are
// of class 1 (without blocks 0), every row shares the largest e of its own blocks, and has 127
// without any. Blocks that lie more than 14 below become zeros.
//
// Blocks of zeros keep their codes and never count. Blocks of scale 255 become code 0x7F and never
// count.
//
//   codes    uint8 [rows, ld], ld = K rounded up to 16; bytes at and after K hold anything and are
//            not read
//   scales   uint32 [ceil(K/128)][tiles][132], tiles = ceil(rows/128) rounded up to even: what one
//            tile needs lies together and arrives with its codes. Word r < 128 is row r of the
//            tile. class 0, 1: the fp32 number 2^(E - 127); class 2, 3: four scale bytes, the first
//            block lowest, 0 for blocks of zeros and missing blocks, 255 for NaN. Word 128: the
//            class. Word 129: E. Words 130, 131: 0. Rows past the end have no blocks.
//
// Tokens of groups. Every group has tiles of its own, with the bytes of packing the group alone,
// from tile start_i / 128 + i on: a closed form, no two groups meet, and group_tiles(rows, groups)
// are enough for all splits. Tiles of no group hold anything.
//
//   group_rows  codes uint8 [rows, packed_ld(cols)], row r of the matrix in row r: the codes of a
//               tile may end in those of the next group, which nobody stores products of
//               scales uint32 [ceil(cols/128)][group_tiles rounded up to even][132]
//   group_k     (the columns, whose K are the rows) codes uint8 [cols, group_tiles * 128], zero
//               from the end of a group
//               to the end of its last tile
//               scales uint32 [group_tiles][packed_tiles(cols)][132]
//
// Operands whose scales are fp32 factors, one for 1 x 128 or for 128 x 128 codes, have the same
// codes as the plain operand, and the same places for them. Scales:
//
//   1 x 128    float [ceil(K/128)][tiles][128]: word r of a tile is that of its row r, 1 for rows
//              past the end; group_rows and group_k as above with 128 words a tile
//   128 x 128  float [ceil(K/128)][block_tiles(rows)], 1 past the end
//
// Weights of groups, one matrix a group, all of one size: the packed operands of all groups behind
// each other.
#pragma once

#include <cstdint>

namespace te_mx::sm90 {

inline constexpr int64_t kTile = 128;
inline constexpr int64_t kScaleWords = 132;  // of one tile
inline constexpr int kFarExponent = 190;
inline constexpr int kMaxSpread = 8;
inline constexpr int kByRows = 9;

constexpr int64_t packed_ld(int64_t k) { return (k + 15) / 16 * 16; }
constexpr int64_t packed_tiles(int64_t rows) { return (rows + 2 * kTile - 1) / (2 * kTile) * 2; }
constexpr int64_t packed_scale_words(int64_t rows, int64_t k) {
  return (k + kTile - 1) / kTile * packed_tiles(rows) * kScaleWords;
}
constexpr int64_t block_tiles(int64_t rows) { return ((rows + kTile - 1) / kTile + 3) / 4 * 4; }
constexpr int64_t group_tiles(int64_t rows, int64_t groups) { return rows / kTile + groups; }

}  // namespace te_mx::sm90
