#include "gemm/gemm_f32.hpp"
#include "gemm/gemm_f32_isa.h"
#include "mxtile/simd/avx2.hpp"

namespace te_mx::cpu {
namespace {

struct Shape {
  static constexpr int kMr = 4, kVectors = 3, kTileCols = 240, kEpilogueCols = 48;
};

}  // namespace

const KernelImpl* f32_on_avx2() { return f32::PanelGemm<mxtile::simd::Avx2, Shape>::impl(); }

}  // namespace te_mx::cpu
