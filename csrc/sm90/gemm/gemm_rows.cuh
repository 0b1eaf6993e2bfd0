// A wave, 64 x 128 of D in the registers of a warpgroup, and row-major arrays read and written from
// there element by element.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "gemm/gemm_params.cuh"
#include "mxtile/sm90/swizzle.cuh"

namespace te_mx::sm90 {

namespace tile = mxtile::sm90;

// Where a wave lies: its first row and column in D, and this thread's place in the warpgroup.
struct Wave {
  int m0, n0;
  int m_end;        // rows at and after it are not stored
  int wave;         // of those of this warpgroup in a block
  bool direct;      // stores go element by element,
  bool by_element;  // or take more than the copy engine for another reason
  int thread;       // 0..127
  int barrier;      // named barrier of this warpgroup
  char* staging;
  char* bias;         // kBiasBytes of shared memory
  uint64_t* arrived;  // the epilogue warp gives the staging back (gemm_epilogue_warp.cuh),
  uint64_t* staged;   // and gets it
  uint32_t phase;     // of the first, in a backward GEMM
  char* constants;    // of a backward GEMM (gemm_gelu_table.cuh)
};

// Calls f with the C++ type of `dtype`.
template <class F>
__device__ __forceinline__ void with_type(DType dtype, const F& f) {
  if (dtype == DType::bf16) {
    f(__nv_bfloat16{});
  } else if (dtype == DType::f16) {
    f(__half{});
  } else {
    f(float{});
  }
}

template <class F>
__device__ __forceinline__ void with_16_bit_type(DType dtype, const F& f) {
  if (dtype == DType::bf16) {
    f(__nv_bfloat16{});
  } else {
    f(__half{});
  }
}

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
__device__ __forceinline__ float2 to_float2(float2 v) { return v; }
// NOTE: the CUDA function takes three instructions.
__device__ __forceinline__ float2 to_float2(__nv_bfloat162 v) {
  const uint32_t bits = *reinterpret_cast<const uint32_t*>(&v);
  return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xFFFF0000u));
}
__device__ __forceinline__ float2 to_float2(__half2 v) { return __half22float2(v); }

template <class T>
struct PairOf;
template <>
struct PairOf<float> {
  using type = float2;
  static __device__ __forceinline__ type make(float a, float b) { return make_float2(a, b); }
};
template <>
struct PairOf<__nv_bfloat16> {
  using type = __nv_bfloat162;
  static __device__ __forceinline__ type make(float a, float b) {
    return __floats2bfloat162_rn(a, b);
  }
};
template <>
struct PairOf<__half> {
  using type = __half2;
  static __device__ __forceinline__ type make(float a, float b) { return __floats2half2_rn(a, b); }
};

template <class T>
__device__ __forceinline__ uint32_t pair_bits(float a, float b) {
  const auto v = PairOf<T>::make(a, b);
  return *reinterpret_cast<const uint32_t*>(&v);
}

// One of the two rows that a thread has in a wave: 16 pairs of columns, 8 columns apart. Half h is
// row + 8h.
struct RowPlace {
  int64_t base;  // index of the first pair in a row-major array of `ld` columns
  int left;      // columns of D from the first pair on
  __device__ __forceinline__ RowPlace(const EpilogueParams& p, const Wave& w, int64_t ld, int h) {
    const int row = w.m0 + w.thread / 32 * 16 + w.thread % 32 / 4 + 8 * h,
              col = w.n0 + 2 * (w.thread % 4);
    base = static_cast<int64_t>(row) * ld + col;
    left = row < w.m_end ? p.n - col : 0;
  }
};

// NOTE: a pair at the end of an odd number of columns is read whole; rows of even length have room
// for it.
template <class T, int kCount>
__device__ __forceinline__ void read_pairs(float2 (&x)[kCount], const void* from, int64_t base,
                                           int left, bool even) {
  const T* const source = static_cast<const T*>(from) + base;
  if (even) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (left > 8 * j)
        x[j] = to_float2(*reinterpret_cast<const typename PairOf<T>::type*>(source + 8 * j));
    }
  } else {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (left > 8 * j) x[j].x = to_float(source[8 * j]);
      if (left > 8 * j + 1) x[j].y = to_float(source[8 * j + 1]);
    }
  }
}

// Reads pairs `first` and after of row h of the wave from a row-major array of `ld` columns; what
// lies outside D is 0.
template <int kCount>
__device__ __forceinline__ void read_row(float2 (&x)[kCount], const void* from, DType dtype,
                                         const EpilogueParams& p, const Wave& w, int64_t ld, int h,
                                         int first) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) x[j] = make_float2(0.0f, 0.0f);
  // NOTE: the compiler would otherwise start all reads of a wave at once, and spill.
  tile::compiler_fence();
  Wave here = w;
  here.thread = tile::keep(threadIdx.x) % 128;
  const RowPlace at(p, here, ld, h);
  with_type(dtype, [&]<class T>(T) {
    read_pairs<T>(x, from, at.base + 8 * first, at.left - 8 * first, ld % 2 == 0);
  });
}

template <class T>
__device__ __forceinline__ void write_rows(const float (&v)[64], void* to, const EpilogueParams& p,
                                           const Wave& w, int64_t ld) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const RowPlace at(p, w, ld, h);
    T* const target = static_cast<T*>(to) + at.base;
    if (ld % 2 == 0) {
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const int i = 4 * j + 2 * h;
        if (at.left >= 8 * j + 2) {
          *reinterpret_cast<typename PairOf<T>::type*>(target + 8 * j) =
              PairOf<T>::make(v[i], v[i + 1]);
        } else if (at.left > 8 * j) {
          target[8 * j] = static_cast<T>(v[i]);
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const int i = 4 * j + 2 * h;
        if (at.left > 8 * j) target[8 * j] = static_cast<T>(v[i]);
        if (at.left > 8 * j + 1) target[8 * j + 1] = static_cast<T>(v[i + 1]);
      }
    }
  }
}

}  // namespace te_mx::sm90
