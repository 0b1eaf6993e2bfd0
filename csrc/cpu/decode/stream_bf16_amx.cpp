// Kernel::amx_stream on real tiles.
#include "decode/stream_amx.hpp"
#include "mxtile/amx/tiles.hpp"
#include "mxtile/bf16/avx512.hpp"
#include "mxtile/simd/avx512.hpp"

namespace te_mx::cpu {

const KernelImpl* amx_stream_impl() {
  return stream_impl<
      AmxStream<mxtile::amx::Tiles, mxtile::bf16::Avx512Decoder, mxtile::simd::Avx512>>();
}

}  // namespace te_mx::cpu
