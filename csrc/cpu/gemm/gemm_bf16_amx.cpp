// Kernel::amx_bf16 on real tiles.
#include "gemm/gemm_amx.hpp"
#include "gemm/gemm_decoded.hpp"
#include "mxtile/amx/tiles.hpp"
#include "mxtile/bf16/avx512.hpp"
#include "mxtile/simd/avx512.hpp"

namespace te_mx::cpu {

const KernelImpl* amx_bf16_impl() {
  using Engine = AmxEngine<mxtile::amx::Tiles, mxtile::simd::Avx512, AmxTuning>;
  using Decoder = mxtile::bf16::Avx512Decoder;
  static constexpr KernelImpl impl{
      bf16_panel_bytes,    pack_bf16_panels<Decoder>,    nullptr, run_or_decode<Engine, Decoder>,
      bf16_panel_row_sums, decodes_side<Engine, Decoder>};
  return &impl;
}

}  // namespace te_mx::cpu
