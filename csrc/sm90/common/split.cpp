#include "te_mx/sm90_split.h"

#include <algorithm>
#include <iterator>

#include "te_mx/sm90_choice.h"
#include "te_mx/sm90_decode.h"

namespace te_mx::sm90 {
namespace {

int64_t steps_of(int64_t k) { return ceil_div(k, kStepK); }

// So many clusters of 1 to 6 CTAs run at once, whose CTAs have an SM each: the least of what NVIDIA
// H200s say, on some of which there are 42 of three and 24 of five.
constexpr int kManyMost = 6, kAtOnce[kManyMost] = {132, 66, 39, 30, 22, 17};
static_assert(kManyMost == kMostClusterParts);

// ------------------------------------------------------------------------------------------ tiles
// Measured on an NVIDIA H200, 2026-11-22. What cutting must win where a kernel adds parts up: of 28
// problems timed with up to 16 parts the model found the best number, or one within 1 %, for all
// but one, which it does not cut (10 % slower). With clusters (2026-11-29) it found the best of all
// tiles and parts for eight shapes of 128 to 512 rows, or one within 2 %.
constexpr double kGain = 1.05;
constexpr double kLaunch = 3.0;        // us of a kernel beside its steps
constexpr double kFinish = 3.2;        // us that the kernel which adds parts up takes longer than
constexpr double kTileExchange = 3.5;  // us of sums inside of clusters (2026-11-29),
constexpr double kManyExchange = 1.0;  // and that six CTAs take longer (2026-11-30)
constexpr double kSums = 4.1e6;        // bytes a us of sums, written and read
constexpr double kOperands = 4.8e6;    // bytes a us of operands, at most
constexpr double kHidden = 0.75;  // of the shorter of two: reading operands, and the steps on them

// Microseconds of the main kernel: of its steps, and of reading the operands meanwhile.
double kernel_us(const GemmTile& tile, int64_t m, int64_t n, int64_t k, int sms, int parts) {
  const int64_t blocks = ceil_div(m, tile.m) * ceil_div(n, tile.n) * parts;
  const int64_t waves = ceil_div(blocks * tile.cluster, sms);
  const int64_t steps = ceil_div(steps_of(k), parts);
  const double products = static_cast<double>(waves * steps) * tile.us;
  const double reads = static_cast<double>(m + n) * static_cast<double>(k) / kOperands;
  return kLaunch + std::max(products, reads) + (1 - kHidden) * std::min(products, reads);
}

// With the sums of parts written and read.
double split_us(int64_t m, int64_t n, int64_t k, int sms, int parts) {
  const GemmTile& tile = kGemmTiles[kSplitTiles[split_config(m)]];
  const double sums = 8.0 * parts * static_cast<double>(m) * static_cast<double>(n) / kSums;
  return kernel_us(tile, m, n, k, sms, parts) + kFinish + sums;
}

int parts_of_tiles(const SplitProblem& p) {
  double least = product_us(p.m, p.n, p.k, p.sms, 1);
  int best = 1;
  const int most = static_cast<int>(std::min<int64_t>(kMostParts, steps_of(p.k)));
  for (int parts = 2; parts <= most; ++parts) {
    double us = product_us(p.m, p.n, p.k, p.sms, parts);
    if (!adds_in_clusters(p.m, p.n, parts, p.sms)) us *= kGain;
    if (us < least) least = us, best = parts;
  }
  return best;
}

// ------------------------------------------------------------------------------------------ codes
// Microseconds on an NVIDIA H200 (2026-11-27): a launch, a step of k of a wave. The exchange of
// sums inside a cluster, which computes one block and is launched anew for the next, is kExchange.
constexpr double kCodesLaunch = 5.2, kCodesStep = 0.58, kExchange = 2.0;

int parts_of_codes(const SplitProblem& p) {
  const int most = static_cast<int>(std::min<int64_t>(kMostClusterParts, steps_of(p.k)));
  int best = 1;
  double least = codes_us(p.m, p.n, p.k, p.sms, 1);
  for (int parts = 2; parts <= most; ++parts) {
    const double us = codes_us(p.m, p.n, p.k, p.sms, parts) * kGain;
    if (us < least) least = us, best = parts;
  }
  return best;
}

// --------------------------------------------------------------------------------------- clusters
// The CTAs of a cluster, a part of k each, with which there are about `twice` / 2 CTAs for so many
// tiles of rows of weights.
int cluster_of(int64_t tiles, int64_t twice, int64_t k) {
  const int64_t best = (twice + tiles) / (2 * tiles);
  return static_cast<int>(std::clamp<int64_t>(best, 1, std::min<int64_t>(steps_of(k), 8)));
}

// The most parts with which all blocks run at once.
int parts_of_factors(const SplitProblem& p) {
  const int64_t blocks = ceil_div(p.n, 128) * ceil_div(p.m, p.block);
  int parts = kManyMost;
  while (parts > 1 && blocks > kAtOnce[parts - 1]) --parts;
  return static_cast<int>(std::min<int64_t>(parts, steps_of(p.k)));
}

// Three CTAs for two SMs, more or less, were the fastest of all that there are, of eight shapes
// with 1 to 64 rows (NVIDIA H200, docs/notes/hopper.md). Of groups, however many, 16 are thought to
// have rows.
int parts_of_wide(const SplitProblem& p) {
  const int64_t tiles = ceil_div(p.n, 128) * (p.groups > 0 ? 16 : 1);
  return cluster_of(tiles, 290 * int64_t{p.sms} / 100, p.k);
}

// The same, of tiles of 64. Of groups there are several products. Above 64 rows nothing has to be
// as of others: a CTA for nearly every SM is better than more.
int parts_of_nvfp4_few(const SplitProblem& p) {
  const bool grouped = p.groups > 0, few = grouped || p.m <= 64;
  const int64_t tiles = ceil_div(p.n, 64) * (few ? 1 : ceil_div(p.m, p.block));
  const int64_t whole = p.sms / tiles;
  if (!few && whole > 0 && whole <= 8 && 10 * whole * tiles >= 9 * p.sms)
    return static_cast<int>(std::min(whole, steps_of(p.k)));
  return cluster_of(tiles, 2 * (grouped ? p.sms / 4 : p.sms * 31 / 20), p.k);
}

// Microseconds of blocks of more than 64 rows, whose CTAs have an SM alone, with k in so many parts
// (NVIDIA H200, eight shapes, 72 to 2,048 rows, 2026-11-29): the launch, steps, a CTA's next tile,
// sums that are exchanged; the last three by the area of a tile, in 128 x 128. What it chooses
// takes at most 1 % longer than the fastest of all, in the mean, and 6 % at one size.
constexpr double kManyLaunch = 3.4, kManyStep = 0.15, kManyArea = 0.555, kManyTile = 2.5;
constexpr double kManySums = 4.0, kManyRest = 10;  // what is left, a launch of its own

int64_t tiles_of(const SplitProblem& p) { return ceil_div(p.n, p.tile) * ceil_div(p.m, p.block); }

// The most parts with which so many tiles run at once.
int most_parts(const SplitProblem& p, int64_t tiles) {
  int parts = static_cast<int>(std::min<int64_t>(kManyMost, steps_of(p.k)));
  while (parts > 1 && tiles > kAtOnce[parts - 1]) --parts;
  return parts;
}

// Of `waves` with k in so many parts, beside the launch.
double waves_us(const SplitProblem& p, int64_t waves, int parts) {
  const double area = static_cast<double>(p.tile * p.block) / (128.0 * 128.0);
  const auto steps = static_cast<double>(ceil_div(steps_of(p.k), parts));
  const double tile = steps * (kManyStep + kManyArea * area) + kManyTile * area;
  return static_cast<double>(waves) * tile - kManyTile * area +
         kManySums * area * (parts - 1) / parts;
}

double many_us(const SplitProblem& p, int parts) {
  const int64_t tiles = tiles_of(p);
  const int apart = rest_parts(p);  // of what is left
  if (parts > 1 || apart == 1)
    return kManyLaunch + waves_us(p, ceil_div(tiles, kAtOnce[parts - 1]), parts);
  return kManyLaunch + kManyRest + waves_us(p, tiles / p.sms, 1) + waves_us(p, 1, apart);
}

int parts_of_nvfp4(const SplitProblem& p) {
  if (p.block <= 64 || p.groups > 0) return parts_of_nvfp4_few(p);
  const int64_t tiles = tiles_of(p);
  int best = 1;
  for (int parts = 2; parts <= std::min<int64_t>(kManyMost, steps_of(p.k)); ++parts)
    if (tiles <= kAtOnce[parts - 1] && many_us(p, parts) < many_us(p, best)) best = parts;
  return best;
}

// ----------------------------------------------------------------------------------------- decode
// CTAs of two warpgroups that run at once, two on every SM. Clusters of 4 and more leave a part of
// the SMs of a GPC idle: with 240 and 256 CTAs in them products took a second turn on an H200 with
// 132 SMs.
int64_t at_once(int cluster, int sms, double idle) {
  return 2 * (cluster < 4 ? sms : sms - static_cast<int>(sms * idle));
}

// Microseconds. Of one product: those that take the fastest of all splits, or one within 4 % of it,
// of seven shapes with 1 to 16 rows (docs/notes/hopper.md). Of one of several products in a launch,
// SMs that one leaves idle have others: what shortens one, more CTAs, lengthens all.
struct Costs {
  double quad;      // of a tile of 64 rows, in one CTA of two on an SM
  double input;     // a quad of x
  double exchange;  // of sums, for each CTA of a cluster
  double crowd;     // a CTA more on every SM
  double idle;
};
constexpr Costs kAlone{0.35, 0.05, 0.1, 0.0, 2.0 / 11},
    kAmongOthers{0.15, 0.03, 0.08, 0.5, 1.0 / 11};

DecodeSplit narrow_split(int64_t n, int64_t k, int sms, const Costs& costs) {
  const int64_t tiles = ceil_div(decode_groups(n), kDecodeTile), quads = decode_quads(k);
  const double all = static_cast<double>(tiles * quads) * 8448.0 / 4.27e6;  // from HBM
  DecodeSplit best;
  double least = 1e30;
  for (int i = 0; i < kDecodeNarrow; ++i) {
    const DecodeSplit s = decode_split_of(i, n, sms);
    if (s.cluster > quads || (s.tiles == 1 && s.sums() > quads && quads > 1)) continue;
    const int64_t ctas = ceil_div(tiles, s.tiles) * s.cluster, slice = ceil_div(quads, s.cluster);
    const int64_t waves = ceil_div(ctas, at_once(s.cluster, sms, costs.idle));
    const double work = static_cast<double>(waves * slice * s.tiles) * costs.quad;
    const double input = static_cast<double>(waves * slice) * costs.input;
    const double exchange = s.cluster == 1 ? 0.0 : 0.2 + costs.exchange * s.cluster;
    const double crowd = costs.crowd * std::max(0.0, static_cast<double>(ctas) / sms - 1.1);
    const double time = std::max(all, work) + input + exchange + crowd;
    if (time >= least) continue;
    least = time, best = s;
  }
  return best;
}

// That of four warpgroups with the fewest quads a warp, all CTAs at once, in clusters of two at
// most: those of more do not come to lie on an SM each. Of equals the one with less of x for a CTA;
// cluster 0: there is none.
DecodeSplit wide_split(int64_t n, int64_t k, int sms) {
  DecodeSplit best{0};
  int64_t least = 0;
  for (int i = kDecodeNarrow; i < kDecodeNarrow + 6; ++i) {
    const DecodeSplit s = decode_split_of(i, n, sms);
    const int64_t part = ceil_div(decode_quads(k), s.sums());
    if (s.clusters * s.cluster > sms || s.sums() > decode_quads(k)) continue;
    if (best.cluster != 0 && part > least) continue;
    least = part, best = s;
  }
  return best;
}

// ----------------------------------------------------------------------------------------- routed
// Warps that cut k: so many that each has five steps or more, because an item costs about one.
int parts_of_routed(const SplitProblem& p) {
  int parts = 8;
  while (parts > 1 && steps_of(p.k) < 5 * parts) parts /= 2;
  return parts;
}

}  // namespace

int num_splits(const SplitProblem& p) {
  switch (p.kind) {
    case SplitKind::tiles:
    case SplitKind::codes_before:
      return parts_of_tiles(p);
    case SplitKind::codes:
      return parts_of_codes(p);
    case SplitKind::decode:
      return decode_split(p.n, p.k, p.sms, p.groups > 0).sums();
    case SplitKind::wide:
      return parts_of_wide(p);
    case SplitKind::factors:
      return parts_of_factors(p);
    case SplitKind::nvfp4:
      return parts_of_nvfp4(p);
    case SplitKind::routed:
      return parts_of_routed(p);
  }
  return 1;
}

int rest_parts(const SplitProblem& p) {
  const int64_t tiles = tiles_of(p), rest = tiles % p.sms;
  if (p.groups > 0 || tiles < p.sms || rest == 0) return 1;
  const int parts = most_parts(p, rest);
  const double apart = kManyRest + waves_us(p, 1, parts);
  const double area = static_cast<double>(p.tile * p.block) / (128.0 * 128.0);
  return apart < waves_us(p, 1, 1) + kManyTile * area ? parts : 1;
}

int nvfp4_shape(int64_t m, int64_t n, int64_t k, int sms) {
  int best = 0;
  double least = 0;
  for (int i = 0; i < static_cast<int>(std::size(kNvfp4Shapes)); ++i) {
    const auto [block, tile] = kNvfp4Shapes[i];
    const SplitProblem p{SplitKind::nvfp4, n, k, sms, 0, m, block, tile};
    const double us = many_us(p, parts_of_nvfp4(p));
    if (block > 128 && m <= 128) continue;
    if (i == 0 || us < least) least = us, best = i;
  }
  return best;
}

DecodeSplit decode_split_of(int index, int64_t n, int sms) {
  if (index < kDecodeNarrow) return {index / 2 + 1, index % 2 + 1};
  const int cluster = (index - kDecodeNarrow) / 3 + 1, tiles = 1 << (index - kDecodeNarrow) % 3;
  // NOTE: decode_narrowed() has the parts of one tile in twice as many CTAs.
  if (cluster > kDecodeMaxCluster / (tiles == 1 ? 2 : 1)) return {0};
  const int64_t groups = decode_groups(n), least = ceil_div(groups, kDecodeTile * tiles);
  const int64_t clusters = std::max(least, std::min<int64_t>(groups, sms / cluster));
  return {cluster, tiles, 4, static_cast<int>(clusters)};
}

DecodeSplit decode_split(int64_t n, int64_t k, int sms, bool grouped) {
  if (grouped) return narrow_split(n, k, sms, kAmongOthers);
  const DecodeSplit narrow = narrow_split(n, k, sms, kAlone), wide = wide_split(n, k, sms);
  if (wide.cluster == 0) return narrow;
  // NOTE: up to 8 rows both took 0.6 us for a quad of every warp, and 0.6 us more in CTAs of two
  // warpgroups, of which not all start early.
  const int64_t ahead =
      ceil_div(decode_quads(k), wide.sums()) - ceil_div(decode_quads(k), narrow.sums());
  return ahead <= 1 ? wide : narrow;
}

bool adds_in_clusters(int64_t m, int64_t n, int parts, int sms) {
  if (parts < 2 || parts > kMostClusterParts || split_config(m) != 0) return false;
  return ceil_div(m, 128) * ceil_div(n, 128) <= int64_t{kAtOnce[parts - 1]} * sms / kAtOnce[0];
}

double product_us(int64_t m, int64_t n, int64_t k, int sms, int parts) {
  if (adds_in_clusters(m, n, parts, sms))
    return kernel_us(kGemmTiles[kSplitTiles[0]], m, n, k, sms, parts) + kTileExchange +
           (parts > 5 ? kManyExchange : 0.0);
  if (parts > 1) return split_us(m, n, k, sms, parts);
  double whole = 1e300;
  for (const int index : kDenseTiles)
    whole = std::min(whole, kernel_us(kGemmTiles[index], m, n, k, sms, 1));
  return whole;
}

double codes_us(int64_t m, int64_t n, int64_t k, int sms, int parts) {
  const int64_t blocks = ceil_div(m, 128) * ceil_div(n, 128), steps = steps_of(k);
  int64_t at_once = (parts <= 2 ? sms : sms * kClusterRoom / 100) / parts;
  if (parts <= kManyMost)
    at_once = std::min(at_once, int64_t{kAtOnce[parts - 1]} * sms / kAtOnce[0]);
  const int64_t waves = ceil_div(blocks, std::max<int64_t>(1, at_once));
  if (parts == 1) return kCodesLaunch + static_cast<double>(waves * steps) * kCodesStep;
  return static_cast<double>(waves) *
         (kCodesLaunch + static_cast<double>(ceil_div(steps, parts)) * kCodesStep + kExchange);
}

}  // namespace te_mx::sm90
