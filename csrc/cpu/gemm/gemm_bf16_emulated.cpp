// Kernel::amx_bf16 on software tiles, for tests on any CPU.
#include "gemm/gemm_amx.hpp"
#include "gemm/gemm_decoded.hpp"
#include "mxtile/amx/emulated.hpp"
#include "mxtile/simd/portable.hpp"

namespace te_mx::cpu {

const KernelImpl* amx_emulated_impl() {
  using Engine = AmxEngine<mxtile::amx::EmulatedTiles, mxtile::simd::Portable, EmulatedTuning>;
  using Decoder = mxtile::bf16::PortableDecoder;
  static constexpr KernelImpl impl{
      bf16_panel_bytes,    pack_bf16_panels<Decoder>,    nullptr, run_or_decode<Engine, Decoder>,
      bf16_panel_row_sums, decodes_side<Engine, Decoder>};
  return &impl;
}

}  // namespace te_mx::cpu
