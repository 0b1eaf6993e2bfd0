// Kernel::amx_stream on software tiles, for tests on any CPU.
#include "decode/stream_amx.hpp"
#include "mxtile/amx/emulated.hpp"
#include "mxtile/bf16/codes.hpp"
#include "mxtile/simd/portable.hpp"

namespace te_mx::cpu {

const KernelImpl* amx_emulated_stream_impl() {
  return stream_impl<AmxStream<mxtile::amx::EmulatedTiles, mxtile::bf16::PortableDecoder,
                               mxtile::simd::Portable>>();
}

}  // namespace te_mx::cpu
