#include "te_mx/sm90_choice.h"

#include <algorithm>

namespace te_mx::sm90 {

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

}  // namespace te_mx::sm90
