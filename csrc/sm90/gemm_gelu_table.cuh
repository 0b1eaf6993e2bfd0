// GELU' of bf16 numbers from a table in shared memory, which takes fewer instructions than its
// formula.
//
// The entry of y > 0 is g(y) = (GELU'(y) - 1/2) / y, so GELU'(x) = 1/2 + x g(|x|) for either sign.
// Below 0.02 g is nearly constant, and from 8 on GELU' is 0 or 1 in fp32, so one entry for every
// bf16 number between the two is enough. The error is below 1e-6.
#pragma once

#include "gemm_gelu.cuh"

namespace te_mx::sm90 {

inline constexpr uint32_t kTableFirst = 0x3CB0, kTableLast = 0x4100;  // bf16: 0.0215 and kGeluMost
inline constexpr int kTableEntries = kTableLast - kTableFirst + 1;

// What a backward GEMM has in shared memory from its start: 16-bit ones, for column sums, and the
// table.
inline constexpr int kOnesBytes = 256, kTableBytes = kTableEntries * 4;
inline constexpr int kConstantBytes = kOnesBytes + kTableBytes;

// (GELU'(y) - 1/2) / y. With p = exp(-2u) and s = 1 / (1 + p), GELU' is s + y s^2 p 2u'.
__device__ __forceinline__ float table_entry(Gelu kind, float y) {
  if (kind == Gelu::erf)
    return fmaf(expf(y * y * -0.5f), 0.3989422804014327f, 0.5f * erff(y * 0.7071067811865475f) / y);
  constexpr float kTwo = 1.5957691216057308f;  // 2 sqrt(2/pi)
  const float twice = y * fmaf(y * y, kTwo * 0.044715f, kTwo), p = expf(-twice);
  const float s = 1.0f / (1.0f + p), inner = fmaf(y * y, 3.0f * kTwo * 0.044715f, kTwo);
  return fmaf(s * s, p * inner, 0.5f * tanhf(0.5f * twice) / y);
}

// By all threads of a block, before any of them needs it.
__device__ __forceinline__ void make_constants(char* constants, const EpilogueParams& p) {
  const bool bf16 = p.out_dtype == DType::bf16;
  uint32_t* const ones = reinterpret_cast<uint32_t*>(constants);
  if (threadIdx.x < kOnesBytes / 4) ones[threadIdx.x] = bf16 ? 0x3F803F80u : 0x3C003C00u;
  tile::fence_async_proxy();
  if (!bf16) return;
  float* const table = reinterpret_cast<float*>(constants + kOnesBytes);
  for (int i = threadIdx.x; i < kTableEntries; i += blockDim.x) {
    const float y = __uint_as_float((kTableFirst + i) << 16);
    // The first entry is for smaller numbers, too. At sqrt(3/4) of y it is off the least.
    table[i] = table_entry(p.gelu, i == 0 ? 0.8660254f * y : y);
  }
}

// v GELU'(x) of a pair of bf16 numbers.
__device__ __forceinline__ float2 gelu_backward_by_table(float2 v, uint32_t x, char* constants) {
  const uint32_t table = tile::smem_addr(constants) + kOnesBytes - 4 * kTableFirst;
  const uint32_t y = tile::limit_bf16x2(x, kTableLast * 0x10001u);
  // Of NaN it is the first entry, by which NaN is multiplied.
  const uint32_t at = tile::magnitude_bf16x2(y, kTableFirst * 0x10001u);
  // One instruction each for 4 times one half of a word, and a sum.
  const float first = __uint_as_float(tile::ld_shared_u32(__dp2a_lo(at, 0x0004u, table)));
  const float second = __uint_as_float(tile::ld_shared_u32(__dp2a_lo(at, 0x0400u, table)));
  return make_float2(v.x * fmaf(__uint_as_float(y << 16), first, 0.5f),
                     v.y * fmaf(__uint_as_float(y & 0xFFFF0000u), second, 0.5f));
}

}  // namespace te_mx::sm90
