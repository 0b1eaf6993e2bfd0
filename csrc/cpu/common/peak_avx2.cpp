#include "common/peak_f32.hpp"
#include "mxtile/simd/avx2.hpp"

namespace te_mx::cpu {

int64_t peak_avx2(int64_t rounds, float* sink) {
  return peak_f32<mxtile::simd::Avx2, 12>(rounds, sink);
}

}  // namespace te_mx::cpu
