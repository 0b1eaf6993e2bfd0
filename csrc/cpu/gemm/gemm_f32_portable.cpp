#include "gemm/gemm_f32.hpp"
#include "gemm/gemm_f32_isa.h"
#include "mxtile/simd/portable.hpp"

namespace te_mx::cpu {
namespace {

struct Shape {
  static constexpr int kMr = 4, kVectors = 2, kTileCols = 256, kEpilogueCols = 64;
};

}  // namespace

const KernelImpl* f32_on_portable() {
  return f32::PanelGemm<mxtile::simd::Portable, Shape>::impl();
}

}  // namespace te_mx::cpu
