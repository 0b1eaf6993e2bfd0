// Decoding runs on any CPU.
#include <cstdint>

#include "mxtile/mx/round.hpp"
#include "mxtile/quant/decode_portable.hpp"
#include "quantize/dequantize.hpp"

namespace te_mx::cpu::dequantize_run {
namespace {

namespace mx = mxtile::mx;
namespace quant = mxtile::quant;

template <DType D>
inline void put(void* out, int64_t i, uint32_t value) {
  if constexpr (D == DType::f32) {
    static_cast<uint32_t*>(out)[i] = value;
  } else {
    static_cast<uint16_t*>(out)[i] =
        D == DType::bf16 ? mx::f32_to_bf16(value) : mx::f32_to_f16(value);
  }
}

// Code i of a run whose blocks have scales.
template <class F>
inline uint8_t code(const Run& run, int64_t i) {
  if constexpr (!is_fp4(F::kElement)) return run.codes[i];
  return run.codes[i / 2] >> (i % 2 * 4) & 0x0F;
}

template <DType D, class F>
void decode(const Run& run) {
  if (run.each) {
    for (int64_t i = 0; i < run.n; ++i) {
      put<D>(run.out, i, quant::decode_any<F>(run.codes[i], run.scales[i]));
    }
    return;
  }
  for (int64_t begin = 0; begin < run.n; begin += mx::kBlockSize) {
    const int64_t end = begin + mx::kBlockSize < run.n ? begin + mx::kBlockSize : run.n;
    const uint32_t byte = run.scales[begin / mx::kBlockSize];
    if (quant::plain_byte<F>(byte)) {
      for (int64_t i = begin; i < end; ++i) {
        put<D>(run.out, i, quant::decode_plain<F>(code<F>(run, i), byte));
      }
    } else {
      for (int64_t i = begin; i < end; ++i)
        put<D>(run.out, i, mx::decode<F>(code<F>(run, i), byte));
    }
  }
}

template <class F>
Kernel choose(DType dtype) {
  if (dtype == DType::f32) return decode<DType::f32, F>;
  return dtype == DType::bf16 ? decode<DType::bf16, F> : decode<DType::f16, F>;
}

}  // namespace

Kernel find_portable(DType dtype, Element element) {
  if (element == Element::e4m3) return choose<mx::E4M3>(dtype);
  return element == Element::e5m2 ? choose<mx::E5M2>(dtype) : choose<mx::E2M1>(dtype);
}

}  // namespace te_mx::cpu::dequantize_run
