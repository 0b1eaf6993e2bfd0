// Into how many parts the kernels of Hopper cut K: the one place that says so. Parts are whole
// steps of 128, all as long as each other or one step longer (sm90/common/shares.cuh), and are
// added up in their order: their number is all of it that the bits of a sum depend on. Host code
// alone, for machines without a GPU too.
//
// It follows from n, k, the format (`kind`) and the multiprocessors of the GPU, so that a row has
// the same bits whatever stands beside it. Rows are read where blocks of D alone do not fill the
// GPU: of `factors`, of `tiles` and `codes`, of which callers say whether K may be cut at all
// (split_k), and of `nvfp4` above 64 rows. By n and k alone 110 sizes of `tiles` of 1 to 1,024 rows
// took 5 % longer, up to 2.2 times, and 21 of `nvfp4` 35 %, up to 1.8 times (NVIDIA H200,
// 2026-11-29).
#pragma once

#include <cstdint>

namespace te_mx::sm90 {

enum class SplitKind : int32_t {
  tiles,         // operands in tiles; reads m
  codes,         // weights of 4 bits that become tiles in the main loop; reads m
  codes_before,  // and in a kernel before; reads m
  decode,        // few rows, plain weights, or MXFP4 and E5M2 beside them: decode_split()
  wide,          // few rows, MXFP8 in tiles: 128 rows of weights a CTA
  factors,       // more rows, blockwise FP8 in tiles: 128 rows of weights a CTA; reads m and block
  nvfp4,         // values times weights of 4 bits; reads m and block above 64 rows
  routed,        // rows by the lists of te_mx.moe
};
inline constexpr int kSplitKinds = 8;

// D[m, n] over k; groups: how many matrices [n, k] there are, 0: one that has no groups. block:
// rows of x that a CTA meets at once, tile: of weights.
struct SplitProblem {
  SplitKind kind = SplitKind::tiles;
  int64_t n = 0, k = 0;
  int sms = 1;
  int64_t groups = 0, m = 0, block = 0, tile = 128;
};

// 1: K in one piece.
int num_splits(const SplitProblem& p);

// What a CTA of `nvfp4` has above 64 rows: `block` rows of x, `tile` of weights.
struct Nvfp4Shape {
  int64_t block, tile;
};
inline constexpr Nvfp4Shape kNvfp4Shapes[] = {{128, 128}, {256, 128}, {128, 192}};
int nvfp4_shape(int64_t m, int64_t n, int64_t k, int sms);  // one of these
// Of tiles that are not as many for every multiprocessor, k in one piece: parts of k of what is
// left; 1: it is not treated apart.
int rest_parts(const SplitProblem& p);

// Parts that one kind may have, and of clusters: more CTAs do not all find room beside each other
// in a GPC, and so do fewer multiprocessors than there are, in percent, where a cluster has more
// than two.
inline constexpr int64_t kStepK = 128;
inline constexpr int kMostParts = 16;
inline constexpr int kMostCodesParts = 8;  // of the kernel; as many as fill clusters are chosen
inline constexpr int kMostClusterParts = 6, kClusterRoom = 90;
inline constexpr int kDecodeMaxCluster = 8;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How SplitKind::decode is cut: a cluster of CTAs has some groups of 16 rows of weights, each CTA a
// slice of k. Its warpgroups have a tile of 64 rows each, or there are fewer tiles and they have
// parts of the slice.
struct DecodeSplit {
  int cluster = 1;     // at most kDecodeMaxCluster; 0: there is no such split
  int tiles = 1;       // 1, 2 or 4
  int warpgroups = 2;  // of a CTA: 2, or 4; at least one a tile
  int clusters = 0;    // of the grid, at least: groups are spread evenly
  constexpr int parts() const { return warpgroups / tiles; }  // of a slice
  constexpr int sums() const { return cluster * parts(); }    // that are added up
};
// grouped: of one of several products in a launch.
DecodeSplit decode_split(int64_t n, int64_t k, int sms, bool grouped = false);
// The same sums by CTAs of two warpgroups.
constexpr DecodeSplit decode_narrowed(const DecodeSplit& s) {
  if (s.warpgroups == 2) return s;
  return {s.tiles == 1 ? 2 * s.cluster : s.cluster, s.tiles == 1 ? 1 : s.tiles / 2};
}
// One split as a number from 0, as Execution::kernel has it, and how many there are: with two
// warpgroups, then with four, where a CTA for every SM is aimed at.
inline constexpr int kDecodeNarrow = 2 * kDecodeMaxCluster;
inline constexpr int kDecodeSplits = kDecodeNarrow + 3 * kDecodeMaxCluster;
DecodeSplit decode_split_of(int index, int64_t n, int sms);

// Whether parts of `tiles` are added up inside of clusters, each of which has a block of 128 x 128:
// where all of them find room at the same time. Else a second kernel adds them up in memory.
bool adds_in_clusters(int64_t m, int64_t n, int parts, int sms);

// Microseconds with K in `parts` of `tiles`, as they run: in one piece, or added up where
// adds_in_clusters() says; and of `codes`.
double product_us(int64_t m, int64_t n, int64_t k, int sms, int parts);
double codes_us(int64_t m, int64_t n, int64_t k, int sms, int parts);

}  // namespace te_mx::sm90
