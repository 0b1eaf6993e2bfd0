// Decoding runs with AVX-512. Scales at the ends of the range and the end of a run go to the
// portable kernel.
#include <cstdint>

#include "mxtile/mx/nibbles.hpp"
#include "mxtile/quant/avx512.hpp"
#include "mxtile/quant/decode_avx512.hpp"
#include "mxtile/quant/decode_portable.hpp"
#include "quantize/dequantize.hpp"

namespace te_mx::cpu::dequantize_run {
namespace {

namespace mx = mxtile::mx;
namespace quant = mxtile::quant;
namespace q = mxtile::quant::avx512;

template <DType D>
inline void put_32(void* out, int64_t i, q::Vector value) {
  if constexpr (D == DType::f32) {
    q::store_f32(static_cast<uint32_t*>(out) + i, value);
  } else if constexpr (D == DType::bf16) {
    q::store_bf16(static_cast<uint16_t*>(out) + i, value);
  } else {
    q::store_f16(static_cast<uint16_t*>(out) + i, value);
  }
}

template <DType D, class F>
void decode(const Run& run) {
  constexpr Element kElement = F::kElement;
  constexpr int64_t kBytes = D == DType::f32 ? 4 : 2;
  const bool packs = is_fp4(kElement) && !run.each;
  for (int64_t i = 0; i < run.n; i += mx::kBlockSize) {
    const uint8_t* codes = run.codes + (packs ? i / 2 : i);
    const uint8_t* scales = run.scales + (run.each ? i : i / mx::kBlockSize);
    const bool whole = i + mx::kBlockSize <= run.n;
    if (run.each && whole &&
        q::all_between(scales, quant::kPlainByteMin<F>, quant::kPlainByteMax<F>)) {
      put_32<D>(run.out, i, q::decode_32<F>(codes, q::scale_steps(scales)));
    } else if (!run.each && whole && quant::plain_byte<F>(*scales)) {
      uint8_t room[mx::kBlockSize];
      if constexpr (is_fp4(kElement)) {
        mx::unpack_nibbles<mx::kBlockSize / 2>(codes, room);
        codes = room;
      }
      put_32<D>(run.out, i, q::decode_32<F>(codes, q::scale_steps(uint32_t{*scales})));
    } else {
      const int64_t n = whole ? mx::kBlockSize : run.n - i;
      find_portable(D, kElement)(
          Run{codes, scales, run.each, n, static_cast<uint8_t*>(run.out) + i * kBytes});
    }
  }
}

template <class F>
Kernel choose(DType dtype) {
  if (dtype == DType::f32) return decode<DType::f32, F>;
  return dtype == DType::bf16 ? decode<DType::bf16, F> : decode<DType::f16, F>;
}

}  // namespace

Kernel find_avx512(DType dtype, Element element) {
  if (element == Element::e4m3) return choose<mx::E4M3>(dtype);
  return element == Element::e5m2 ? choose<mx::E5M2>(dtype) : choose<mx::E2M1>(dtype);
}

}  // namespace te_mx::cpu::dequantize_run
