// Peak of tdpbf16ps: four tiles of sums, operands that stay in tiles.
#include "common/peak.h"
#include "mxtile/amx/tiles.hpp"

namespace te_mx::cpu {

int64_t peak_amx(int64_t rounds, float* sink) {
  alignas(64) float sums[16][16] = {};
  mxtile::amx::Tiles tiles;
  tiles.zero<0>(), tiles.zero<1>(), tiles.zero<2>(), tiles.zero<3>();
  tiles.load<4>(sums, 64), tiles.load<5>(sums, 64), tiles.load<6>(sums, 64),
      tiles.load<7>(sums, 64);
  for (int64_t i = 0; i < rounds; ++i) {
    tiles.dot_bf16<0, 4, 6>();
    tiles.dot_bf16<1, 4, 7>();
    tiles.dot_bf16<2, 5, 6>();
    tiles.dot_bf16<3, 5, 7>();
  }
  tiles.store<0>(sums, 64);
  *sink = sums[0][0];
  return 4 * 2 * 16 * 16 * 32;
}

}  // namespace te_mx::cpu
