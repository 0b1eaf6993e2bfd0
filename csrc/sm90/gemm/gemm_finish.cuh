// The end of a GEMM whose sums lie in K in parts somewhere: adds the parts up, in their order, and
// applies the epilogue. Used where sums are in global memory (split_finish.cu) and where they are
// in the shared memory of a cluster (gemm_exchange.cuh), with the same bits.
//
// A thread has four neighbours of one row, a warp a row of 128 columns. What it reads is on its way
// before the first number is used.
#pragma once

#include "gemm/gemm_gelu.cuh"
#include "gemm/gemm_launch.h"
#include "gemm/gemm_rows.cuh"
#include "mxtile/sm90/barrier.cuh"

namespace te_mx::sm90 {

inline constexpr int kFinishColumns = 128;  // of a block of kFinishRows rows, a warp a row
inline constexpr int kAtOnce = 8;           // parts

// An array [M, N] beside the sums, or a row that counts for all.
struct Array {
  void* at;    // or null
  int64_t ld;  // elements from row to row
  DType dtype;
  bool fours;  // four neighbours may be read or written at once
};

inline Array array(const void* at, int64_t ld, DType dtype) {
  const int64_t four = dtype == DType::f32 ? 16 : 8;
  const bool fours = ld % 4 == 0 && reinterpret_cast<uintptr_t>(at) % four == 0;
  return {const_cast<void*>(at), ld, dtype, fours};
}

struct FinishParams {
  int parts, m, n;
  Array bias, aux, gelu_in, out;
  float* bias_grad;  // partial sums [ceil(M / kFinishRows), N], or null
  Gelu gelu;
  bool accumulate;
  bool plain;  // the sums are the result, and `out` takes four at once
};

// `partial` is where partial sums of the bias gradient go.
inline FinishParams finish_params(const GemmArgs& a, int parts, float* partial) {
  const int64_t m = a.lhs.rows, n = a.rhs.rows;
  const Epilogue& e = a.epilogue;
  FinishParams p{};
  p.parts = parts, p.m = static_cast<int>(m), p.n = static_cast<int>(n);
  p.bias = array(e.bias, 0, e.bias_dtype), p.aux = array(e.aux, n, e.aux_dtype);
  p.gelu_in = array(e.gelu_in, n, e.gelu_in_dtype), p.out = array(e.out, e.ldo, e.out_dtype);
  p.bias_grad = e.bias_grad == nullptr ? nullptr : partial;
  p.gelu = e.gelu, p.accumulate = e.accumulate;
  p.plain = e.bias == nullptr && e.aux == nullptr && e.gelu_in == nullptr &&
            e.bias_grad == nullptr && e.gelu == Gelu::none && !e.accumulate && p.out.fours &&
            n % 4 == 0;
  return p;
}

template <class T>
struct alignas(4 * sizeof(T)) Four {
  T v[4];
};

__device__ __forceinline__ void read(float (&x)[4], const Array& a, int row, int col, int left) {
  with_type(a.dtype, [&]<class T>(T) {
    const T* const from = static_cast<const T*>(a.at) + row * a.ld + col;
    if (a.fours && left >= 4) {
      const auto four = *reinterpret_cast<const Four<T>*>(from);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = to_float(four.v[i]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i < left) x[i] = to_float(from[i]);
      }
    }
  });
}

__device__ __forceinline__ void write(const float (&v)[4], const Array& a, int row, int col,
                                      int left) {
  with_type(a.dtype, [&]<class T>(T) {
    T* const to = static_cast<T*>(a.at) + row * a.ld + col;
    if (a.fours && left >= 4) {
      Four<T> four;
#pragma unroll
      for (int i = 0; i < 4; ++i) four.v[i] = static_cast<T>(v[i]);
      *reinterpret_cast<Four<T>*>(to) = four;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i < left) to[i] = static_cast<T>(v[i]);
      }
    }
  });
}

template <Gelu kKind>
__device__ __forceinline__ void apply_gelu(float (&v)[4], const float (&before)[4], bool backward) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    if (backward) {
      const float2 y = gelu_backward<kKind>(
          make_float2(v[i], v[i + 1]), derivative_input(make_float2(before[i], before[i + 1])));
      v[i] = y.x, v[i + 1] = y.y;
    } else {
      const float2 y = gelu_forward<kKind>(make_float2(v[i], v[i + 1]));
      v[i] = y.x, v[i + 1] = y.y;
    }
  }
}

// `v` becomes the result before it is added to what is there. sums(i): those of part i.
template <class Sums>
__device__ __forceinline__ void finish_four(float (&v)[4], const FinishParams& p, int row, int col,
                                            int left, const Sums& sums) {
  float4 x[kAtOnce];
  const auto start = [&](int first) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i < p.parts) x[i] = sums(first + i);
    }
  };
  const auto add = [&](int first) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i < p.parts) v[0] += x[i].x, v[1] += x[i].y, v[2] += x[i].z, v[3] += x[i].w;
    }
  };
  start(0);
  float bias[4] = {}, before[4] = {}, old[4] = {};
  if (p.bias.at != nullptr) read(bias, p.bias, 0, col, left);
  if (p.gelu_in.at != nullptr) read(before, p.gelu_in, row, col, left);
  if (p.accumulate) read(old, p.out, row, col, left);
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = -0.0f;  // what leaves every number as it is
  add(0);
  for (int first = kAtOnce; first < p.parts; first += kAtOnce) start(first), add(first);

  if (p.bias.at != nullptr) {
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] += bias[i];
  }
  if (p.aux.at != nullptr) write(v, p.aux, row, col, left);
  if (p.gelu == Gelu::tanh) {
    apply_gelu<Gelu::tanh>(v, before, p.gelu_in.at != nullptr);
  } else if (p.gelu == Gelu::erf) {
    apply_gelu<Gelu::erf>(v, before, p.gelu_in.at != nullptr);
  }
  float result[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) result[i] = p.accumulate ? v[i] + old[i] : v[i];
  write(result, p.out, row, col, left);
}

// The same of kFinishRows rows x 16 columns of a warp: lane 16 a + 2 r + b has the sums of four
// neighbours of row r from column 8 a + 4 b on.
__device__ __forceinline__ void finish_unit(const float4& sum, const FinishParams& p, int row,
                                            int col, int lane) {
  float v[4] = {};
  if (row < p.m && col < p.n) finish_four(v, p, row, col, p.n - col, [&](int) { return sum; });
  if (p.bias_grad == nullptr) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float own = v[i];
    const int first = lane & 17;
    v[i] = __shfl_sync(~0u, own, first);
#pragma unroll
    for (int r = 1; r < kFinishRows; ++r) v[i] += __shfl_sync(~0u, own, first + 2 * r);
    if (lane == first && col + i < p.n)
      p.bias_grad[static_cast<int64_t>(row / kFinishRows) * p.n + col + i] = v[i];
  }
}

using FinishSums = float[kFinishRows][kFinishColumns];

// A block of rows from `block` * kFinishRows on, columns from col0 on, by kFinishRows warps. For
// the bias gradient, which needs `rows`, sync() is a barrier of all of them, and nobody reads them
// on return.
template <class Sums, class Sync>
__device__ __forceinline__ void finish_block(const FinishParams& p, FinishSums& rows, int block,
                                             int col0, int thread, const Sums& sums,
                                             const Sync& sync) {
  const int warp = thread / 32, lane = thread % 32;
  const int row = block * kFinishRows + warp, col = col0 + 4 * lane;
  float v[4] = {};
  if (row < p.m && col < p.n) {
    finish_four(v, p, row, col, p.n - col, [&](int part) { return sums(part, row, col); });
  }
  if (p.bias_grad == nullptr) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) rows[warp][4 * lane + i] = v[i];
  sync();
  if (thread < kFinishColumns && col0 + thread < p.n && block * kFinishRows < p.m) {
    float sum = rows[0][thread];
#pragma unroll
    for (int i = 1; i < kFinishRows; ++i) sum += rows[i][thread];
    p.bias_grad[static_cast<int64_t>(block) * p.n + col0 + thread] = sum;
  }
  sync();
}

}  // namespace te_mx::sm90
