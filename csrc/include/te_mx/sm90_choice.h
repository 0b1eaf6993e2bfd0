// Which blocks of D the Hopper GEMM computes: a cost model that depends on sizes and the number of
// multiprocessors alone. Host code, for machines without a GPU too. Into how many parts it cuts K:
// sm90_split.h.
#pragma once

#include <cstdint>

#include "te_mx/sm90_split.h"

namespace te_mx::sm90 {

struct GemmTile {
  const char* name;
  int m, n;     // of what a cluster computes at once
  int cluster;  // CTAs
  bool full;    // with GELU, aux and bias gradient
  // One step of K, 128 of it, on an H200 (2026-11-22): cycles where nothing is short, at 8192^3,
  // and microseconds where there are few blocks. 0: not measured.
  int cycles;
  double us;
};

inline constexpr GemmTile kGemmTiles[] = {
    {"192x128, clusters of 2", 192, 256, 2, true, 770, 0.59},
    {"256x128, clusters of 2", 256, 256, 2, false, 1070, 0.8},
    {"128x128", 128, 128, 1, false, 610, 0.38},
    {"64x128", 64, 128, 1, true, 425, 0.27},
    {"256x128", 256, 128, 1, false, 0, 0.0},
    // With fp32 factors of rhs in blocks of 128 x 128 (2026-11-28), and of 1 x 128 (2026-11-23).
    {"192x128, clusters of 2, 128x128 factors", 192, 256, 2, true, 770, 0.0},
    {"256x128, clusters of 2, 128x128 factors", 256, 256, 2, false, 1095, 0.0},
    {"192x128, clusters of 2, 1x128 factors", 192, 256, 2, true, 1230, 0.0},
    {"256x128, clusters of 2, 1x128 factors", 256, 256, 2, false, 1730, 0.0},
};
// Tiles by the configurations of each kind of GEMM.
inline constexpr int kDenseTiles[] = {0, 1, 2, 3};
inline constexpr int kTileFactorTiles[] = {5, 6};
inline constexpr int kRowFactorTiles[] = {7, 8};
inline constexpr int kGroupedTiles[] = {0, 4};
inline constexpr int kSplitTiles[] = {2, 3};  // K in parts

// The configuration of D[m, n], one of `count` tiles; `full`: of D that needs every epilogue.
int choose_config(const int* tiles, int count, int64_t m, int64_t n, bool full, int sms);

// Of groups: of rows, m in all; or of K, each with a D[m, n].
int choose_grouped_config(int64_t m, int64_t n, int64_t groups, bool along_k, int sms);

// The configuration with K in parts: up to 64 rows the smaller blocks, which do not ask for rows
// that are not there.
constexpr int split_config(int64_t m) { return m <= kGemmTiles[kSplitTiles[1]].m ? 1 : 0; }

}  // namespace te_mx::sm90
