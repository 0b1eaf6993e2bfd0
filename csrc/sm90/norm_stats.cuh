// Sums over rows in the order that te_mx/cpu_fused.h fixes: 256 lanes, each adds its elements in
// order, then a tree over the lanes. So normalization has the same bits on every device.
//
// 128 threads work on a row, two rows at a time in a CTA: thread t has lanes 2t and 2t + 1.
#pragma once

#include "activation.cuh"
#include "bands.cuh"
#include "fused_patch.cuh"
#include "te_mx/sm90_fused.h"

namespace te_mx::sm90 {

// Words of shared memory of a kernel that sums rows.
struct RowSumSmem {
  uint32_t ticket;
  float2 parts[2][2][4][32];  // of alternating calls, of two rows
};

// The sum of 256 lanes, two in each of 128 threads; all of them get it. The whole CTA calls it;
// calls alternate in `turn`.
__device__ __forceinline__ float fold_lanes(RowSumSmem& s, float2 lanes, int turn) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, row = threadIdx.x / 128;
  float2(&parts)[4][32] = s.parts[turn & 1][row];
  parts[warp][lane] = lanes;
  __syncthreads();
  const float2 a = parts[0][lane], b = parts[1][lane], c = parts[2][lane], d = parts[3][lane];
  float x = add(add(a.x, c.x), add(b.x, d.x)), y = add(add(a.y, c.y), add(b.y, d.y));
#pragma unroll
  for (int i = 16; i > 0; i /= 2) {
    x = add(x, __shfl_xor_sync(~0u, x, i)), y = add(y, __shfl_xor_sync(~0u, y, i));
  }
  return add(x, y);
}

// Elements of a row as a thread sees them: pairs, 256 columns apart.
template <class In>
struct RowPairs {
  const In* from;  // the thread's first pair
  int64_t cols;    // of the row, from there on
  bool vectors;    // pairs lie aligned, and there are no halves

  __device__ __forceinline__ RowPairs(const void* x, int64_t stride, int64_t row, int64_t cols,
                                      bool vectors)
      : from(static_cast<const In*>(x) + row * stride + 2 * (threadIdx.x % 128)),
        cols(cols - 2 * (threadIdx.x % 128)),
        vectors(vectors) {}
  __device__ __forceinline__ bool first(int64_t chunk) const { return 256 * chunk < cols; }
  __device__ __forceinline__ bool second(int64_t chunk) const { return 256 * chunk + 1 < cols; }
  // Half of a word where the second element does not exist.
  __device__ __forceinline__ typename Input<In>::Word word(int64_t chunk) const {
    typename Input<In>::Word w{};
    const In* const at = from + 256 * chunk;
    if (!first(chunk)) return w;
    if (vectors) return __ldg(reinterpret_cast<const typename Input<In>::Word*>(at));
    reinterpret_cast<In*>(&w)[0] = at[0];
    if (second(chunk)) reinterpret_cast<In*>(&w)[1] = at[1];
    return w;
  }
};

template <class In>
inline constexpr int kKeptChunks = sizeof(In) == 2 ? 32 : 16;  // of a row, in registers

// Calls f(chunk, word) for the chunks of a row in order, those below kKeptChunks from `kept`, which
// is filled on the way when kRead.
template <bool kRead, class In, class F>
__device__ __forceinline__ void each_chunk(const RowPairs<In>& row, int chunks,
                                           typename Input<In>::Word (&kept)[kKeptChunks<In>],
                                           const F& f) {
  constexpr int kAtOnce = 8;
#pragma unroll
  for (int c0 = 0; c0 < kKeptChunks<In>; c0 += kAtOnce) {
    if (c0 < chunks) {
      if constexpr (kRead) {
#pragma unroll
        for (int c = c0; c < c0 + kAtOnce; ++c) kept[c] = row.word(c);
      }
#pragma unroll
      for (int c = c0; c < c0 + kAtOnce; ++c) f(c, kept[c]);
    }
  }
#pragma unroll 1
  for (int c0 = kKeptChunks<In>; c0 < chunks; c0 += kAtOnce) {
    typename Input<In>::Word w[kAtOnce];
#pragma unroll
    for (int c = 0; c < kAtOnce; ++c) w[c] = row.word(c0 + c);
#pragma unroll
    for (int c = 0; c < kAtOnce; ++c) f(c0 + c, w[c]);
  }
}

struct NormRows {
  Matrix x;
  int64_t rows, cols;
  bool rms, vectors;
  float eps, inverse;
  float* mean;
  float* rstd;
};

// Mean and reciprocal deviation of kStatRows rows, from `row` on.
template <class In>
__device__ __forceinline__ void norm_statistics(RowSumSmem& s, const NormRows& n, int64_t row) {
  const int chunks = static_cast<int>((n.cols + 255) / 256);
  int turn = 0;
#pragma unroll 1
  for (int i = 0; i < kStatRows; i += 2) {
    const int64_t r = row + i + threadIdx.x / 128;
    const RowPairs<In> pairs(n.x.data, n.x.stride, r, r < n.rows ? n.cols : 0, n.vectors);
    typename Input<In>::Word kept[kKeptChunks<In>];
    float mean = 0.0f;
    float2 lanes = {0.0f, 0.0f};
    const auto squares = [&](int chunk, typename Input<In>::Word w) {
      const float2 v = Input<In>::values(w);
      const float x = sub(v.x, mean), y = sub(v.y, mean);
      if (pairs.first(chunk)) lanes.x = add(lanes.x, mul(x, x));
      if (pairs.second(chunk)) lanes.y = add(lanes.y, mul(y, y));
    };
    if (n.rms) {
      each_chunk<true>(pairs, chunks, kept, squares);
    } else {
      each_chunk<true>(pairs, chunks, kept, [&](int, typename Input<In>::Word w) {
        const float2 v = Input<In>::values(w);
        lanes.x = add(lanes.x, v.x), lanes.y = add(lanes.y, v.y);
      });
      mean = mul(fold_lanes(s, lanes, turn++), n.inverse);
      lanes = {0.0f, 0.0f};
      each_chunk<false>(pairs, chunks, kept, squares);
    }
    const float variance = mul(fold_lanes(s, lanes, turn++), n.inverse);
    const float rstd = __frcp_rn(__fsqrt_rn(add(variance, n.eps)));
    if (threadIdx.x % 128 == 0 && r < n.rows) {
      n.rstd[r] = rstd;
      if (!n.rms) n.mean[r] = mean;
    }
  }
}

}  // namespace te_mx::sm90
