// Kernel::amx_bf16 on real tiles.
#include "gemm_amx.hpp"
#include "mxtile/amx/tiles.hpp"
#include "mxtile/bf16/avx512.hpp"
#include "mxtile/simd/avx512.hpp"

namespace te_mx {

const KernelImpl* amx_bf16_impl() {
  using Engine = AmxEngine<mxtile::amx::Tiles, mxtile::simd::Avx512, AmxTuning>;
  static constexpr KernelImpl impl{bf16_panel_bytes, pack_bf16_panels<mxtile::bf16::Avx512Decoder>,
                                   nullptr, PanelGemm<Engine>::run, bf16_panel_row_sums};
  return &impl;
}

}  // namespace te_mx
