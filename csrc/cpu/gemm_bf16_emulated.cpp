// Kernel::amx_bf16 on software tiles, for tests on any CPU.
#include "gemm_amx.hpp"
#include "mxtile/amx/emulated.hpp"
#include "mxtile/simd/portable.hpp"

namespace te_mx {

const KernelImpl* amx_emulated_impl() {
  using Engine = AmxEngine<mxtile::amx::EmulatedTiles, mxtile::simd::Portable, EmulatedTuning>;
  static constexpr KernelImpl impl{bf16_panel_bytes,
                                   pack_bf16_panels<mxtile::bf16::PortableDecoder>, nullptr,
                                   PanelGemm<Engine>::run, bf16_panel_row_sums};
  return &impl;
}

}  // namespace te_mx
