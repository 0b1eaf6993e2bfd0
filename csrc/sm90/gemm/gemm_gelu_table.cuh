// GELU' of bf16 numbers from a table in shared memory, which takes fewer instructions than its
// formula.
//
// The entry of y > 0 is g(y) = (GELU'(y) - 1/2) / y, so GELU'(x) = 1/2 + x g(|x|) for either sign.
// Below 0.02 g is nearly constant, and from 8 on GELU' is 0 or 1 in fp32, so one entry for every
// bf16 number between the two is enough. The error is below 1e-6.
#pragma once

#include "gemm/gemm_gelu.cuh"

namespace te_mx::sm90 {

inline constexpr uint32_t kTableFirst = 0x3CB0;  // 0.0215 in bf16
inline constexpr int kTableEntries = kGeluMostBf16 - kTableFirst + 1;

// What a backward GEMM has in shared memory from its start: 16-bit ones, for column sums, and the
// table.
inline constexpr int kOnesBytes = 256, kTableBytes = kTableEntries * 4;
inline constexpr int kConstantBytes = kOnesBytes + kTableBytes;

__device__ __forceinline__ float table_entry(Gelu kind, float y) {
  const float2 one = make_float2(1.0f, 1.0f), at = make_float2(y, y);
  const float2 slope =
      kind == Gelu::tanh ? gelu_backward<Gelu::tanh>(one, at) : gelu_backward<Gelu::erf>(one, at);
  return (slope.x - 0.5f) / y;
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

// v GELU'(x) of a pair of bf16 numbers, x as it came.
__device__ __forceinline__ float2 gelu_backward_by_table(float2 v, uint32_t x, char* constants) {
  const uint32_t table = tile::smem_addr(constants) + kOnesBytes - 4 * kTableFirst;
  const auto y = derivative_input(*reinterpret_cast<const __nv_bfloat162*>(&x));
  // Of NaN it is the first entry, by which NaN is multiplied.
  const uint32_t at =
      tile::magnitude_bf16x2(*reinterpret_cast<const uint32_t*>(&y), kTableFirst * 0x10001u);
  // One instruction each for 4 times one half of a word, and a sum.
  const float first = __uint_as_float(tile::ld_shared_u32(__dp2a_lo(at, 0x0004u, table)));
  const float second = __uint_as_float(tile::ld_shared_u32(__dp2a_lo(at, 0x0400u, table)));
  const float2 of = to_float2(y);
  return make_float2(v.x * fmaf(of.x, first, 0.5f), v.y * fmaf(of.y, second, 0.5f));
}

}  // namespace te_mx::sm90
