#include "common/peak_f32.hpp"
#include "mxtile/simd/avx512.hpp"

namespace te_mx::cpu {

int64_t peak_avx512(int64_t rounds, float* sink) {
  return peak_f32<mxtile::simd::Avx512, 24>(rounds, sink);
}

}  // namespace te_mx::cpu
