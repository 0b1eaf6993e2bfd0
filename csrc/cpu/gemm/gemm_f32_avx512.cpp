#include "gemm/gemm_f32.hpp"
#include "gemm/gemm_f32_isa.h"
#include "mxtile/simd/avx512.hpp"

namespace te_mx::cpu {
namespace {

struct Shape {
  static constexpr int kMr = 8, kVectors = 2, kTileCols = 256, kEpilogueCols = 64;
};

}  // namespace

const KernelImpl* f32_on_avx512() { return f32::PanelGemm<mxtile::simd::Avx512, Shape>::impl(); }

}  // namespace te_mx::cpu
