// mxtile/sm90/math.cuh on the CPU.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "mxtile/sm90/barrier.cuh"
#include "simt/async.hpp"
#include "simt/packed.hpp"

namespace mxtile::sm90 {

// Subnormals count as zero.
inline float flushed(float v) { return std::fabs(v) < 0x1p-126f ? std::copysign(0.0f, v) : v; }

inline float exp2_approx(float x) { return flushed(std::exp2(flushed(x))); }
inline float rcp_approx(float x) { return flushed(1.0f / flushed(x)); }
inline float max_nan(float a, float b) { return a != a ? a : b != b ? b : std::fmax(a, b); }
inline float limit_f32(float x, float most) { return simt::min_xorsign(x, most); }
inline uint32_t limit_bf16x2(uint32_t x, uint32_t most) {
  return simt::halves(x, most, simt::min_xorsign_16<0x7F80>);
}
inline uint32_t limit_f16x2(uint32_t x, uint32_t most) {
  return simt::halves(x, most, simt::min_xorsign_16<0x7C00>);
}
inline uint32_t magnitude_bf16x2(uint32_t x, uint32_t least) {
  return simt::halves(x, least, [](uint16_t a, uint16_t b) -> uint16_t {
    // Magnitudes are ordered like their bits; `least` is positive.
    const uint16_t m = a & 0x7FFF;
    return m > 0x7F80 ? b : m < b ? b : m;
  });
}

inline void copy_word_async(void* smem, const void* gmem, int bytes) {
  simt::copy_async(smem, gmem, 4, static_cast<uint32_t>(bytes));
}
inline void copy_words_wait() { simt::copy_async_wait_all(); }

}  // namespace mxtile::sm90
