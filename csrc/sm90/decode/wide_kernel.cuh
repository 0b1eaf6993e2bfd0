// Rows of x that a CTA makes by itself, aligned for 128 of k (rows_kernel.cuh).
#pragma once

#include "common/shares.cuh"
#include "decode/aligned_rows.cuh"
#include "decode/decode_out.cuh"
#include "decode/decode_weights.cuh"
#include "mxtile/sm90/cluster.cuh"
#include "mxtile/sm90/tma.cuh"

namespace te_mx::sm90 {

inline constexpr int kWideMath = 256;
inline constexpr int kWideRows = 128;                   // of weights in a tile
inline constexpr int kWideWords = 4 * (kWideRows + 4);  // bytes of the scales of a tile

// Calls quads(x, quads, rows) for the CTA's slice of x, bf16 values in whole vectors, kBatch parts
// of a row at a time: quads of the slice, rows of the block, -1 of nothing. By the warps that
// multiply; half a warp has a part.
inline constexpr int kMakeBatch = 4;
using MadeEight = AlignedValues<__nv_bfloat16, true>;

template <class Eight, template <class> class Place, class Math, class Quads>
__device__ __forceinline__ void each_quad(const Place<Math>& at, const Quads& quads) {
  constexpr int kWorkers = Place<Math>::kWorkers;
  const AlignedInput& a = at.p.x;
  const int worker = static_cast<int>(threadIdx.x) / 16, lane = threadIdx.x % 16;
  // NOTE: both halves of a warp have a row of the same quad.
  const int count = at.rows().count, even = (count + 1) & ~1;
  const int all = at.length * even;
  struct Batch {
    Eight x[kMakeBatch];
    int quad[kMakeBatch], row[kMakeBatch];
  };
  const auto load = [&](Batch& to, int begin) {
#pragma unroll
    for (int j = 0; j < kMakeBatch; ++j) {
      const int one = begin + j * kWorkers, q = one / even, r = one - q * even;
      const int k = (at.first + q) * kDecodeQuad + lane * 8;
      const bool there = one < all && r < count;
      to.quad[j] = q, to.row[j] = there ? r : -1;
      to.x[j].load(a.in, at.rows().first + (there ? r : 0), k, there ? a.k - k : 0);
    }
  };
  // NOTE: the next batch is on its way while one is made.
  Batch now, next;
  load(now, worker);
#pragma unroll 1
  for (int begin = worker; begin < all; begin += kWorkers * kMakeBatch) {
    load(next, begin + kWorkers * kMakeBatch);
    quads(now.x, now.quad, now.row);
    now = next;
  }
}

template <template <class> class Place, class Math>
__device__ __forceinline__ void store_made(const Place<Math>& at, uint2 made, int e, int quad,
                                           int row, int lane) {
  if (row < 0) return;
  store_aligned(at.smem + at.room.x_at + quad * Math::kCodes, made, row, lane);
  if (lane == 0)
    reinterpret_cast<float*>(at.smem + at.room.x_scales_at +
                             quad * Math::kScales)[aligned_scale_place<Math::kX == 8>(row)] =
        aligned_scale(e);
}

// Makes the CTA's slice of x, and counts passes. NOTE: each step for all parts before the next, as
// each waits for lanes.
template <template <class> class Place, class Math>
__device__ __forceinline__ void make_first(const Place<Math>& at) {
  using In = Input<__nv_bfloat16>;
  const AlignedInput& a = at.p.x;
  const int lane = threadIdx.x % 16;
  each_quad<MadeEight>(at, [&](MadeEight(&x)[kMakeBatch], const int (&quad)[kMakeBatch],
                               const int (&row)[kMakeBatch]) {
    decltype(x[0].own_most()) most[kMakeBatch];
    uint2 codes[kMakeBatch];
    int byte[kMakeBatch], e[kMakeBatch];
    bool left[kMakeBatch];
#pragma unroll
    for (int j = 0; j < kMakeBatch; ++j) most[j] = x[j].own_most();
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2)
#pragma unroll
      for (int j = 0; j < kMakeBatch; ++j)
        most[j] = In::larger(most[j], In::shuffle_xor(most[j], lanes));
#pragma unroll
    for (int j = 0; j < kMakeBatch; ++j) {
      const float2 two = In::magnitudes(most[j]);
      const uint32_t amax = max(__float_as_uint(two.x), __float_as_uint(two.y));
      byte[j] = static_cast<int>(scale_byte(a.in, amax));
      codes[j] = x[j].codes_of(byte[j]);
      // NOTE: of codes that are all rounded to zero, too; their scale is the least that there is.
      left[j] = amax != 0 && byte[j] != 255, e[j] = left[j] ? byte[j] : -1;
    }
#pragma unroll
    for (int lanes = 4; lanes < 16; lanes *= 2)
#pragma unroll
      for (int j = 0; j < kMakeBatch; ++j) e[j] = max(e[j], __shfl_xor_sync(~0u, e[j], lanes));
    bool more = false;
#pragma unroll
    for (int j = 0; j < kMakeBatch; ++j) {
      const int down = e[j] - byte[j];
      const bool taken = left[j] && down <= a.spread;
      const uint2 made = lowered(codes[j], taken ? down : 0);
      more |= left[j] && !taken;
      store_made(at,
                 byte[j] == 255 ? nan_codes()
                 : taken        ? made
                                : uint2{0, 0},
                 e[j], quad[j], row[j], lane);
    }
    if (!__any_sync(~0u, more)) return;
#pragma unroll
    for (int j = 0; j < kMakeBatch; ++j) {
      AlignedEight eight(x[j], a.in);
      uint2 made;
      int passes = 0;
#pragma unroll 1
      for (; passes == 0 || eight.more(); ++passes) eight.pass(passes, a.spread, made);
      if (row[j] >= 0 && passes > 1)
        atomicMax(at.passes + quad[j], passes), atomicMax(at.most_passes, passes);
    }
  });
  tile::fence_async_proxy();
}

}  // namespace te_mx::sm90
