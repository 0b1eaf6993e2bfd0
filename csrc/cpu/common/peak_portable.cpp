#include "common/peak_f32.hpp"
#include "mxtile/simd/portable.hpp"

namespace te_mx::cpu {

int64_t peak_portable(int64_t rounds, float* sink) {
  return peak_f32<mxtile::simd::Portable, 8>(rounds, sink);
}

}  // namespace te_mx::cpu
