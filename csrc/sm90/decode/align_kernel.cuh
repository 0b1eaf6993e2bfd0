// Prepares rows of x for tiles_kernel.cuh.
#pragma once

#include "decode/aligned_rows.cuh"

namespace te_mx::sm90 {

// Half a warp has a row. kFactors: with one fp32 scale, so that nothing is to be aligned.
template <bool kFactors, class Eight>
__device__ __forceinline__ void align_row(const AlignedInput& a) {
  const int quad = static_cast<int>(blockIdx.x), lane = threadIdx.x % 16;
  const int row = static_cast<int>(blockIdx.y) * kAlignRows + static_cast<int>(threadIdx.x) / 16;
  const int k = quad * kDecodeQuad + lane * 8, block = row / a.rows, r = row - block * a.rows;
  DecodeRows rows = a.rows_of;
  if (!rows.begin(block) || rows.group < 0) return;
  const bool there = r < rows.count;
  Eight x;
  x.load(a.in, there ? rows.first + r : 0, k, there ? a.k - k : 0);
  if constexpr (kFactors) {
    const EightMade made = x.made(a.in);
    if (!there) return;
    store_aligned(a.at(block, 0, quad), {made.words.x, made.words.y}, r, lane);
    if (lane == 0) a.scales_at(block, 0, quad)[aligned_scale_place<false>(r)] = made.scale;
    return;
  }
  AlignedEight eight(x, a.in);
  bool more = true;
  int passes = 0;
  const int most = a.beside != nullptr ? 1 : kMostPasses;
#pragma unroll 1
  for (int number = 0; number < most; ++number) {
    uint2 made;
    int e = -1;
    if (more) e = eight.pass(number, a.spread, made), more = eight.more(), ++passes;
    if (!there) continue;
    if (number == 0 || e >= 0) store_aligned(a.at(block, number, quad), made, r, lane);
    if (lane == 0)
      a.scales_at(block, number, quad)[aligned_scale_place<false>(r)] =
          number > 0 && e < 0 ? 0.0f : aligned_scale(e);
  }
  if (a.beside != nullptr) return;
  passes = 1 + (__syncthreads_or(passes > 1)
                    ? 1 + (__syncthreads_or(passes > 2) != 0) + (__syncthreads_or(passes > 3) != 0)
                    : 0);
  if (threadIdx.x == 0)
    a.passes[int64_t{blockIdx.y} * a.quads + quad] = static_cast<uint8_t>(passes);
}

template <bool kFactors, bool kVectors>
__device__ __forceinline__ void align_any(const AlignedInput& a) {
  using Bf16 = AlignedValues<__nv_bfloat16, kVectors, kFactors>;
  using F16 = AlignedValues<__half, kVectors, kFactors>;
  const bool bf16 = a.in.dtype == DType::bf16;
  if (a.in.scales != nullptr)
    return align_row<kFactors, EightCodes<Element::e4m3, kVectors, false, kFactors>>(a);
  if constexpr (kVectors) {
    if (a.in.gate != nullptr) {
      if (bf16) return align_row<kFactors, EightGated<Bf16, __nv_bfloat16>>(a);
      return align_row<kFactors, EightGated<F16, __half>>(a);
    }
  }
  if (bf16) return align_row<kFactors, Bf16>(a);
  if (a.in.dtype == DType::f16) return align_row<kFactors, F16>(a);
  return align_row<kFactors, AlignedValues<float, kVectors, kFactors>>(a);
}

// Prepares all rows. Grid: x = quads, y = 16 rows. NOTE: of few registers, so that this kernel and
// the next product have room beside a product that runs.
__global__ void __launch_bounds__(kAlignThreads, 5)
    align_rows(const __grid_constant__ AlignedInput a) {
  tile::let_dependents_start();
  tile::await_predecessors();
  const bool vectors = a.in.vectors && a.k % 8 == 0;
  if (a.factors) {
    vectors ? align_any<true, true>(a) : align_any<true, false>(a);
  } else {
    vectors ? align_any<false, true>(a) : align_any<false, false>(a);
  }
}

}  // namespace te_mx::sm90
