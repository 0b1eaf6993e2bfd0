// Sums over rows in the order that te_mx/fused.h fixes: 256 lanes, each adds its elements in
// order, then a tree over the lanes. So normalization has the same bits on every device.
//
// A warp sums a row, on its own: thread i has lanes 8i to 8i + 7, which are a vector of every
// chunk of 256 columns.
#pragma once

#include "fused/activation.cuh"
#include "fused/bands.cuh"
#include "fused/fused_patch.cuh"
#include "fused/fused_task.h"
#include "te_mx/sm90.h"

namespace te_mx::sm90 {

// The sum of 256 lanes, eight in each thread of a warp; all of them get it. While threads have
// several lanes, one of two that add theirs keeps the upper half, the other the lower.
__device__ __forceinline__ float fold_lanes(const float (&s)[8]) {
  const auto other = [](float v, int threads) { return __shfl_xor_sync(~0u, v, threads); };
  const bool upper = threadIdx.x & 16, upper2 = threadIdx.x & 8, upper3 = threadIdx.x & 4;
  float a[4], b[2];
#pragma unroll
  for (int j = 0; j < 4; ++j)
    a[j] = add(upper ? s[4 + j] : s[j], other(upper ? s[j] : s[4 + j], 16));
#pragma unroll
  for (int j = 0; j < 2; ++j)
    b[j] = add(upper2 ? a[2 + j] : a[j], other(upper2 ? a[j] : a[2 + j], 8));
  float sum = add(upper3 ? b[1] : b[0], other(upper3 ? b[0] : b[1], 4));
  // Steps of 16 and 8 lanes, then of 4, 2 and 1, which the halves that threads kept tell apart.
  sum = add(sum, other(sum, 2)), sum = add(sum, other(sum, 1));
  sum = add(sum, other(sum, 16)), sum = add(sum, other(sum, 8));
  return add(sum, other(sum, 4));
}

// How a row is cut into chunks.
struct RowShape {
  int64_t cols;  // from the thread's first one on
  int whole;     // chunks in which every thread has a vector of 8 elements
  int chunks;
  bool vectors;  // there are no others, and they lie aligned

  __device__ __forceinline__ RowShape(int64_t cols, bool vectors)
      : cols(cols - threadIdx.x % 32 * 8),
        whole(vectors ? static_cast<int>(cols / 256) : 0),
        chunks(static_cast<int>((cols + 255) / 256)),
        vectors(vectors) {}
  // Elements that the thread has in a chunk; the last chunks may give it none.
  __device__ __forceinline__ int left(int chunk) const {
    return static_cast<int>(min(max(cols - 256ll * chunk, 0ll), 8ll));
  }
};

// Reads a thread's elements of a row.
template <class In>
struct RowReader {
  using Chunk = Eight<In>;
  const In* from;  // those of chunk 0

  __device__ __forceinline__ RowReader(const Rows& m, int64_t row)
      : from(static_cast<const In*>(m.data) + row * m.stride + threadIdx.x % 32 * 8) {}
  __device__ __forceinline__ void read(Chunk& to, int64_t chunk) const {
#pragma unroll
    for (int j = 0; j < Input<In>::kVectors; ++j)
      to.chunks[j] = __ldg(reinterpret_cast<const uint4*>(from + 256 * chunk) + j);
  }
  __device__ __forceinline__ void read_part(Chunk& to, int64_t chunk, int left,
                                            bool vectors) const {
    load_8(to, from + 256 * chunk, left, vectors);
  }
};

// Calls f(elements, chunk, how many exist) for the chunks of a row in order, and reads kAhead of
// them ahead.
template <int kAhead, class Reader, class F>
__device__ __forceinline__ void each_chunk(const RowShape& shape, const Reader& reader,
                                           const F& f) {
  typename Reader::Chunk w[kAhead];
#pragma unroll
  for (int j = 0; j < kAhead; ++j) {
    if (j < shape.whole) reader.read(w[j], j);
  }
#pragma unroll 1
  for (int c0 = 0; c0 < shape.whole; c0 += kAhead) {
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (c0 + j >= shape.whole) break;
      f(w[j], c0 + j, std::integral_constant<int, 8>{});
      if (c0 + j + kAhead < shape.whole) reader.read(w[j], c0 + j + kAhead);
    }
  }
#pragma unroll 1
  for (int c = shape.whole; c < shape.chunks; ++c) {
    const int left = shape.left(c);
    reader.read_part(w[0], c, left, shape.vectors);
    f(w[0], c, left);
  }
}

struct NormRows {
  Rows x;
  int64_t rows, cols;
  bool rms, vectors;
  float eps, inverse;
  float* mean;
  float* rstd;
};

// Mean and reciprocal deviation of a row; the whole warp calls it, its first thread writes them.
template <class In>
__device__ __forceinline__ void norm_statistics(const NormRows& n, int64_t row) {
  constexpr int kAhead = sizeof(In) == 2 ? 8 : 4;
  const RowShape shape(n.cols, n.vectors);
  const RowReader<In> x(n.x, row);
  float lanes[8]{}, mean = 0.0f;
  if (n.rms) {
    each_chunk<kAhead>(shape, x, [&](const Eight<In>& w, int, auto exist) {
      float v[8];
      w.unpack(v);
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (j < exist) lanes[j] = add(lanes[j], mul(v[j], v[j]));
    });
  } else {
    each_chunk<kAhead>(shape, x, [&](const Eight<In>& w, int, auto exist) {
      float v[8];
      w.unpack(v);
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (j < exist) lanes[j] = add(lanes[j], v[j]);
    });
    mean = mul(fold_lanes(lanes), n.inverse);
#pragma unroll
    for (float& lane : lanes) lane = 0.0f;
    // NOTE: the second time, rows come from the caches.
    each_chunk<kAhead>(shape, x, [&](const Eight<In>& w, int, auto exist) {
      float v[8];
      w.unpack(v);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        v[j] = sub(v[j], mean);
        if (j < exist) lanes[j] = add(lanes[j], mul(v[j], v[j]));
      }
    });
  }
  const float variance = mul(fold_lanes(lanes), n.inverse);
  if (threadIdx.x % 32 != 0) return;
  n.rstd[row] = __frcp_rn(__fsqrt_rn(add(variance, n.eps)));
  if (!n.rms) n.mean[row] = mean;
}

}  // namespace te_mx::sm90
