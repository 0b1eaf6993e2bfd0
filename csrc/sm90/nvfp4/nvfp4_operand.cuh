// E2M1 codes times their block scales as operand A of wgmma, bf16 or fp16, exactly.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "mxtile/sm90/mma.cuh"
#include "mxtile/sm90/wgmma_registers.cuh"
#include "te_mx/sm90_nvfp4.h"

namespace te_mx::sm90 {

namespace tile = mxtile::sm90;

// What makes up for operand A, which has every product of a code and a scale times 2^-7.
inline constexpr float kNvfp4Up = 128.0f;

template <class To, class From>
__device__ __forceinline__ To as(From v) {
  static_assert(sizeof(To) == sizeof(From));
  return *reinterpret_cast<const To*>(&v);
}

// The number types of operand A. pairs: magnitudes of eight codes, sign included, times 2^kUp;
// scales: of two bytes, times 2^-7 / 2^kUp.
template <bool kHalf>
struct Nvfp4Operand {
  // Two scales, of words of four; kTwo: the bytes 2 * kTwo and 2 * kTwo + 1.
  template <int kTwo>
  static __device__ __forceinline__ uint32_t scales(uint32_t word) {
    if constexpr (kHalf) {
      return __byte_perm(word, 0, kTwo == 0 ? 0x1404 : 0x3424) >> 1;
    } else {
      // NOTE: a byte of 0 is 2^97 here, less than half a unit in the last place of any scale.
      const uint32_t bits = __byte_perm(word, 0, kTwo == 0 ? 0x4140 : 0x4342) * 16 + 0x70007000u;
      return as<uint32_t>(__hadd2(as<__nv_bfloat162>(bits), as<__nv_bfloat162>(0xF000F000u)));
    }
  }
  // The same of MXFP4, whose bytes are exponents of bf16.
  template <int kTwo>
  static __device__ __forceinline__ uint32_t powers(uint32_t word) {
    static_assert(!kHalf);
    return __byte_perm(word, 0, kTwo == 0 ? 0x4140 : 0x4342) << 7;
  }
  // The low (or high) of two numbers, times a pair of codes.
  static __device__ __forceinline__ uint32_t times(uint32_t codes, uint32_t scales, bool high) {
    if constexpr (kHalf) {
      const __half2 two = as<__half2>(scales);
      return as<uint32_t>(__hmul2(as<__half2>(codes), high ? __high2half2(two) : __low2half2(two)));
    } else {
      const __nv_bfloat162 two = as<__nv_bfloat162>(scales);
      return as<uint32_t>(
          __hmul2(as<__nv_bfloat162>(codes), high ? __high2bfloat162(two) : __low2bfloat162(two)));
    }
  }
  // Codes of a word, and scales of its two rows.
  static __device__ __forceinline__ void make(uint32_t (&a)[4], uint32_t w, uint32_t two) {
    const uint32_t six = __funnelshift_l(w, w, 6);
    if constexpr (kHalf) {
      constexpr uint32_t kSign = 0x80008000u, kRest = 0x0E000E00u;
      a[0] = (w << 3 & kRest) | (w & kSign), a[1] = (six & kRest) | (w << 3 & kSign);
      a[2] = (w << 9 & kRest) | (six & kSign);
      a[3] = ((six & 0x00130013u) * 0x0420u & kRest) | (six << 12 & kSign);
    } else {
      constexpr uint32_t kCode = 0x81C081C0u;
      // NOTE: what puts the bits of pair 3 together is a product, three shifts of which none meet.
      a[0] = w & kCode, a[1] = w << 3 & kCode, a[2] = six & kCode;
      a[3] = (six & 0x001B001Bu) * 0x1084u & kCode;
    }
    a[0] = times(a[0], two, false), a[1] = times(a[1], two, true);
    a[2] = times(a[2], two, false), a[3] = times(a[3], two, true);
    tile::wgmma_pin(a);
  }
  // By a warp alone, with 8 rows of x.
  static __device__ __forceinline__ void multiply_alone(float (&d)[4], const uint32_t (&a)[4],
                                                        uint32_t b0, uint32_t b1) {
    if constexpr (kHalf) {
      tile::mma_f16(d, a, b0, b1);
    } else {
      tile::mma_bf16(d, a, b0, b1);
    }
  }
  template <int kFloats>
  static __device__ __forceinline__ void multiply(float (&d)[kFloats], const uint32_t (&a)[4],
                                                  uint32_t x) {
    if constexpr (kHalf) {
      tile::wgmma_registers_f16<true>(d, a, x);
    } else {
      tile::wgmma_registers_bf16<true>(d, a, x);
    }
  }
};

}  // namespace te_mx::sm90
