#include "te_mx/sm90_choice.h"

#include <algorithm>

namespace te_mx::sm90 {

namespace {

// Of K in parts, measured on an NVIDIA H200, 2026-11-22. What cutting must win: of 28 problems
// timed with up to 16 parts the model found the best number, or one within 1 %, for all but one,
// which it does not cut (10 % slower).
constexpr double kGain = 1.05;
constexpr double kLaunch = 3.0;      // us of a kernel beside its steps
constexpr double kFinish = 3.2;      // us that the kernel which adds parts up takes longer than
constexpr double kExchange = 2.0;    // us of sums inside of clusters (2026-11-27)
constexpr double kSums = 4.1e6;      // bytes a us of sums, written and read
constexpr double kOperands = 4.8e6;  // bytes a us of operands, at most
constexpr double kHidden = 0.75;  // of the shorter of two: reading operands, and the steps on them

// Microseconds of the main kernel: of its steps, and of reading the operands meanwhile.
double kernel_us(const GemmTile& tile, int64_t m, int64_t n, int64_t k, int sms, int parts) {
  const int64_t blocks = ceil_div(m, tile.m) * ceil_div(n, tile.n) * parts;
  const int64_t waves = ceil_div(blocks * tile.cluster, sms);
  const int64_t steps = ceil_div(ceil_div(k, kStepK), parts);
  const double products = static_cast<double>(waves * steps) * tile.us;
  const double reads = static_cast<double>(m + n) * static_cast<double>(k) / kOperands;
  return kLaunch + std::max(products, reads) + (1 - kHidden) * std::min(products, reads);
}

}  // namespace

// The steps of K of all waves that the clusters of the problem make, in cycles.
int choose_config(const int* tiles, int count, int64_t m, int64_t n, bool full, int sms) {
  int best = 0;
  int64_t least = INT64_MAX;
  for (int now = 0; now < count; ++now) {
    const GemmTile& tile = kGemmTiles[tiles[now]];
    if (full && !tile.full) continue;
    const int64_t blocks = ceil_div(m, tile.m) * ceil_div(n, tile.n);
    const int64_t waves = ceil_div(blocks, std::max(1, sms / tile.cluster));
    if (waves * tile.cycles < least) least = waves * tile.cycles, best = now;
  }
  return best;
}

// As for one product, by the areas of blocks, with half a block wasted at the end of a group: how
// rows are shared out is not known here. Along K, blocks without clusters take 5 % longer than
// that, measured.
int choose_grouped_config(int64_t m, int64_t n, int64_t groups, bool along_k, int sms) {
  int best = 0, config = 0;
  double least = 1e300;
  for (const int index : kGroupedTiles) {
    const GemmTile& tile = kGemmTiles[index];
    const double m_blocks = along_k ? static_cast<double>(groups * ceil_div(m, tile.m))
                                    : static_cast<double>(m) / tile.m + 0.5 * groups;
    const double blocks = m_blocks * static_cast<double>(ceil_div(n, tile.n));
    const int64_t waves = static_cast<int64_t>(blocks * tile.cluster / sms) + 1;
    const double cost = static_cast<double>(waves * tile.m * tile.n / tile.cluster) *
                        (along_k && tile.cluster == 1 ? 1.05 : 1.0);
    if (cost < least) least = cost, best = config;
    ++config;
  }
  return best;
}

bool adds_in_clusters(int64_t m, int64_t n, int parts, int sms) {
  if (parts < 2 || parts > kMostClusterParts || split_config(m) != 0) return false;
  const int64_t room = parts == 2 ? sms / 2 : int64_t{sms} * kClusterRoom / 100 / parts;
  return ceil_div(m, 128) * ceil_div(n, 128) <= room;
}

double split_us(int64_t m, int64_t n, int64_t k, int sms, int parts) {
  const GemmTile& tile = kGemmTiles[kSplitTiles[split_config(m)]];
  const double sums = 8.0 * parts * static_cast<double>(m) * static_cast<double>(n) / kSums;
  return kernel_us(tile, m, n, k, sms, parts) + kFinish + sums;
}

double product_us(int64_t m, int64_t n, int64_t k, int sms, int parts) {
  if (adds_in_clusters(m, n, parts, sms))
    return kernel_us(kGemmTiles[kSplitTiles[0]], m, n, k, sms, parts) + kExchange;
  if (parts > 1) return split_us(m, n, k, sms, parts);
  double whole = 1e300;
  for (const int index : kDenseTiles)
    whole = std::min(whole, kernel_us(kGemmTiles[index], m, n, k, sms, 1));
  return whole;
}

int choose_parts(int64_t m, int64_t n, int64_t k, int sms) {
  double least = product_us(m, n, k, sms, 1) / kGain;
  int best = 1;
  const int most = static_cast<int>(std::min<int64_t>(kMostParts, ceil_div(k, kStepK)));
  for (int parts = 2; parts <= most; ++parts) {
    const double us = split_us(m, n, k, sms, parts);
    if (us < least) least = us, best = parts;
  }
  return best;
}

}  // namespace te_mx::sm90
