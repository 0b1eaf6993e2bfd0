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

// A row of bf16 in whole vectors, or of products of activations and gates, by eight lanes, which
// have sixteen of a quad each.
template <bool kFactors, bool kGated = false>
struct PlainRow {
  using Values = AlignedValues<__nv_bfloat16, true, kFactors>;
  using Eight = std::conditional_t<kGated, EightGated<Values, __nv_bfloat16>, Values>;
  int quad, lane, block, r;
  bool any = false, there = false;  // whether the block has rows, and whether this is one
  Eight x[2];

  __device__ __forceinline__ explicit PlainRow(const AlignedInput& a) {
    quad = static_cast<int>(blockIdx.x), lane = threadIdx.x % 8;
    const int row = static_cast<int>(blockIdx.y) * kAlignRows + static_cast<int>(threadIdx.x) / 8;
    const int k = quad * kDecodeQuad + lane * 16;
    block = row / a.rows, r = row - block * a.rows;
    DecodeRows rows = a.rows_of;
    if (!rows.begin(block) || rows.group < 0) return;
    any = true, there = r < rows.count;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      x[i].load(a.in, there ? rows.first + r : 0, k + 8 * i, there ? a.k - k - 8 * i : 0);
    if constexpr (kGated) x[0].multiply(a.in), x[1].multiply(a.in);
  }
  // The bits of the largest magnitude of so many lanes.
  template <int kLanes>
  __device__ __forceinline__ uint32_t largest() const {
    using In = Input<__nv_bfloat16>;
    auto most = In::larger(x[0].own_most(), x[1].own_most());
#pragma unroll
    for (int lanes = 1; lanes < kLanes; lanes *= 2)
      most = In::larger(most, In::shuffle_xor(most, lanes));
    const float2 two = In::magnitudes(most);
    return max(__float_as_uint(two.x), __float_as_uint(two.y));
  }
};

// A first pass of all blocks of such a row by fewer instructions, and others where some lie far
// apart.
template <bool kGated>
__device__ __forceinline__ void align_plain_row(const AlignedInput& a) {
  using Row = PlainRow<false, kGated>;
  const Row own(a);
  if (!own.any) return;
  const auto& x = own.x;
  const int quad = own.quad, lane = own.lane, block = own.block, r = own.r;
  const bool there = own.there;
  const uint32_t amax = own.template largest<2>();
  const int byte = static_cast<int>(scale_byte(a.in, amax));
  const bool left = amax != 0 && byte != 255;
  int e = left ? byte : -1;
  e = max(e, __shfl_xor_sync(~0u, e, 2));
  e = max(e, __shfl_xor_sync(~0u, e, 4));
  const int down = e - byte;
  const bool taken = left && down <= a.spread;
  // NOTE: codes of NaN stay NaN, others of blocks that are not taken become zeros; so do those that
  // lie 15 octaves further down, as lowered() has them.
  const uint32_t f =
      taken && down < 15 ? 0x3C003C00u - static_cast<uint32_t>(down) * 0x04000400u : 0;
  const uint2 low = x[0].codes_of(byte), high = x[1].codes_of(byte);
  const auto times = [&](uint32_t codes) { return tile::fp8x4_times<Element::e4m3>(codes, f, f); };
  const int place = aligned_scale_place<false>(r);
  if (there) {
    const uint4 made{times(low.x), times(low.y), times(high.x), times(high.y)};
    store_sixteen(a.at(block, 0, quad), made, r, lane);
    // NOTE: rows without further passes have scales of 0 there.
    if (lane < (a.beside != nullptr ? 1 : kMostPasses))
      a.scales_at(block, lane, quad)[place] = lane == 0 ? aligned_scale(e) : 0.0f;
  }
  if (a.beside != nullptr) return;
  int passes = 1;
  if (__syncthreads_or(left && !taken)) {
    AlignedSixteen<typename Row::Eight> blocks(x, a.in, amax);
    int number = 0;
#pragma unroll 1
    for (; number == 0 || blocks.more(); ++number) {
      uint4 made;
      e = blocks.pass(number, a.spread, made);
      if (number == 0 || e < 0 || !there) continue;
      store_sixteen(a.at(block, number, quad), made, r, lane);
      if (lane == 0) a.scales_at(block, number, quad)[place] = aligned_scale(e);
    }
    for (int i = 1; i < kMostPasses; ++i) passes += __syncthreads_or(number > i) != 0;
  }
  if (threadIdx.x == 0)
    a.passes[int64_t{blockIdx.y} * a.quads + quad] = static_cast<uint8_t>(passes);
}

// The same with one fp32 scale for 128 of k.
__device__ __forceinline__ void factor_plain_row(const AlignedInput& a) {
  const PlainRow<true> own(a);
  if (!own.any) return;
  const auto& x = own.x;
  const uint32_t amax = own.largest<8>();
  const Factor f =
      factor_of_block<Element::e4m3>(__uint_as_float(amax), a.in.epsilon, a.in.power_of_two);
  if (!own.there) return;
  const uint2 low = x[0].codes_by(f.factor), high = x[1].codes_by(f.factor);
  store_sixteen(a.at(own.block, 0, own.quad), {low.x, low.y, high.x, high.y}, own.r, own.lane);
  if (own.lane == 0)
    a.scales_at(own.block, 0, own.quad)[aligned_scale_place<false>(own.r)] = f.scale;
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

// The same of plain() rows, or gated ones, by half as many threads.
__global__ void __launch_bounds__(kAlignThreads / 2)
    align_plain(const __grid_constant__ AlignedInput a) {
  tile::let_dependents_start();
  tile::await_predecessors();
  if (a.factors) return factor_plain_row(a);
  a.in.gate == nullptr ? align_plain_row<false>(a) : align_plain_row<true>(a);
}

}  // namespace te_mx::sm90
