// The epilogue of one wave, 64 x 128 of D in the registers of a warpgroup: bias, aux, GELU or its
// derivative, bias gradient, accumulation, rounding, and stores through shared memory by the copy
// engine.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "gemm_params.cuh"
#include "mxtile/sm90/swizzle.cuh"
#include "mxtile/sm90/tma.cuh"

namespace te_mx::sm90 {

namespace tile = mxtile::sm90;

enum class Epilogue : int { plain = 0, gelu = 1 };  // plain: bias and accumulate only

inline constexpr int kPanelBytes = 64 * 128;  // 64 rows of 128 bytes: what one TMA store writes

// Where a wave lies: its first row and column in D, and this thread's place in the warpgroup.
struct Wave {
  int m0, n0;
  int m_end;    // rows at and after it are not stored
  bool direct;  // stores go element by element
  int thread;   // 0..127
  int barrier;  // named barrier of this warpgroup
  char* staging;
  float* bias;  // [128] in shared memory, valid when there is a bias
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

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
__device__ __forceinline__ float2 to_float2(float2 v) { return v; }
__device__ __forceinline__ float2 to_float2(__nv_bfloat162 v) { return __bfloat1622float2(v); }
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
template <class T>
__device__ __forceinline__ void read_row(float2 (&x)[16], const void* from, const RowPlace& at,
                                         bool even) {
  const T* const source = static_cast<const T*>(from) + at.base;
  if (even) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      if (at.left > 8 * j)
        x[j] = to_float2(*reinterpret_cast<const typename PairOf<T>::type*>(source + 8 * j));
    }
  } else {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      if (at.left > 8 * j) x[j].x = to_float(source[8 * j]);
      if (at.left > 8 * j + 1) x[j].y = to_float(source[8 * j + 1]);
    }
  }
}

// Reads row h of the wave from a row-major array of `ld` columns; what lies outside D is 0.
__device__ __forceinline__ void read_row(float2 (&x)[16], const void* from, DType dtype,
                                         const EpilogueParams& p, const Wave& w, int64_t ld,
                                         int h) {
#pragma unroll
  for (int j = 0; j < 16; ++j) x[j] = make_float2(0.0f, 0.0f);
  // NOTE: the compiler would otherwise start the reads of both rows at once, and spill.
  tile::compiler_fence();
  const RowPlace at(p, w, ld, h);
  with_type(dtype, [&]<class T>(T) { read_row<T>(x, from, at, ld % 2 == 0); });
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

// GELU(x) = x * sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3); or x/2 (1 + erf(x / sqrt 2)).
template <Gelu kKind>
__device__ __forceinline__ float gelu_forward(float x) {
  if constexpr (kKind == Gelu::tanh) {
    const float u2 = 1.5957691216057308f * (x + 0.044715f * x * x * x);
    return __fdividef(x, 1.0f + __expf(-u2));
  }
  return 0.5f * x * (1.0f + erff(x * 0.7071067811865475f));
}

template <Gelu kKind>
__device__ __forceinline__ float gelu_derivative(float x) {
  if constexpr (kKind == Gelu::tanh) {
    const float u2 = 1.5957691216057308f * (x + 0.044715f * x * x * x);
    const float s = __fdividef(1.0f, 1.0f + __expf(-u2));
    return s + x * s * (1.0f - s) * 1.5957691216057308f * (1.0f + 0.134145f * x * x);
  }
  return 0.5f * (1.0f + erff(x * 0.7071067811865475f)) +
         x * 0.3989422804014327f * __expf(-0.5f * x * x);
}

template <Gelu kKind>
__device__ __forceinline__ void scale_by_derivative(float (&v)[64], const float2 (&x)[16],
                                                    const int h) {
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    v[4 * j + 2 * h] *= gelu_derivative<kKind>(x[j].x);
    v[4 * j + 2 * h + 1] *= gelu_derivative<kKind>(x[j].y);
  }
}

// Brings the bias of a block to shared memory. The barriers keep the previous block's readers and
// the next ones apart.
__device__ __forceinline__ void load_bias(const EpilogueParams& p, const Wave& w, int group) {
  const int col = w.n0 + w.thread;
  float b = 0.0f;
  with_type(p.bias_dtype, [&]<class T>(T) {
    if (col < p.n)
      b = to_float(static_cast<const T*>(p.bias)[static_cast<int64_t>(group) * p.n + col]);
  });
  tile::named_barrier(w.barrier, 128);
  w.bias[w.thread] = b;
  tile::named_barrier(w.barrier, 128);
}

// Column sums of the wave: 16 rows inside each warp, then the four warps, always in the same order.
__device__ __forceinline__ void sum_columns(const float (&v)[64], const EpilogueParams& p,
                                            const Wave& w) {
  float* const partial = reinterpret_cast<float*>(w.staging);  // [4][128]
  const int lane = w.thread % 32, warp = w.thread / 32;
  const int row = w.m0 + warp * 16 + lane / 4;
  if (w.thread == 0) tile::tma_store_wait_read<0>();
  tile::named_barrier(w.barrier, 128);
#pragma unroll
  for (int j = 0; j < 16; ++j) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float s = (row < p.m ? v[4 * j + c] : 0.0f) + (row + 8 < p.m ? v[4 * j + 2 + c] : 0.0f);
      s += __shfl_xor_sync(~0u, s, 4);
      s += __shfl_xor_sync(~0u, s, 8);
      s += __shfl_xor_sync(~0u, s, 16);
      if (lane < 4) partial[warp * 128 + 8 * j + 2 * lane + c] = s;
    }
  }
  tile::named_barrier(w.barrier, 128);
  const int col = w.n0 + w.thread;
  if (col < p.n && w.m0 < p.m) {
    p.bias_grad[static_cast<int64_t>(w.m0 / 64) * p.n + col] =
        (partial[w.thread] + partial[128 + w.thread]) +
        (partial[256 + w.thread] + partial[384 + w.thread]);
  }
  tile::named_barrier(w.barrier, 128);
}

// v[] := what is stored, in place, but for accumulation. Columns and rows outside D hold anything.
template <Epilogue kEpilogue>
__device__ __forceinline__ void epilogue_values(float (&v)[64], const EpilogueParams& p,
                                                const Wave& w) {
  if (p.bias != nullptr) {
    const float* const bias = w.bias + 2 * (w.thread % 4);
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const float2 b = *reinterpret_cast<const float2*>(bias + 8 * j);
      v[4 * j] += b.x, v[4 * j + 1] += b.y, v[4 * j + 2] += b.x, v[4 * j + 3] += b.y;
    }
  }
  if constexpr (kEpilogue == Epilogue::gelu) {
    if (p.aux != nullptr) {
      with_type(p.aux_dtype, [&]<class T>(T) { write_rows<T>(v, p.aux, p, w, p.n); });
    }
    if (p.gelu_in != nullptr) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float2 x[16];
        read_row(x, p.gelu_in, p.gelu_in_dtype, p, w, p.n, h);
        if (p.gelu == Gelu::tanh) {
          scale_by_derivative<Gelu::tanh>(v, x, h);
        } else {
          scale_by_derivative<Gelu::erf>(v, x, h);
        }
      }
    } else if (p.gelu == Gelu::tanh) {
#pragma unroll
      for (int i = 0; i < 64; ++i) v[i] = gelu_forward<Gelu::tanh>(v[i]);
    } else if (p.gelu == Gelu::erf) {
#pragma unroll
      for (int i = 0; i < 64; ++i) v[i] = gelu_forward<Gelu::erf>(v[i]);
    }
    if (p.bias_grad != nullptr) sum_columns(v, p, w);
  }
}

// One panel, 64 rows x 128 bytes, from registers to staging slot `slot` and on to D.
template <int kSlots, class T>
__device__ __forceinline__ void store_panel(const float (&v)[64], const int panel, const int slot,
                                            const EpilogueParams& p, const CUtensorMap* map,
                                            const Wave& w) {
  constexpr int kCols = 128 / sizeof(T);
  const int lane = w.thread % 32, warp = w.thread / 32;
  char* const smem = w.staging + slot * kPanelBytes;
  const uint32_t base = tile::smem_addr(smem);
  if (w.thread == 0) tile::tma_store_wait_read<kSlots - 1>();
  tile::named_barrier(w.barrier, 128);
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = panel * 16 + 4 * j;
      const uint32_t row = warp * 16 + lane / 4;
      const uint32_t chunk = 2 * j + (lane % 4) / 2, offset = 8 * (lane % 2);
      tile::st_shared_f32x2(base + tile::swizzle128(row, chunk) + offset, v[i], v[i + 1]);
      tile::st_shared_f32x2(base + tile::swizzle128(row + 8, chunk) + offset, v[i + 2], v[i + 3]);
    }
  } else {
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const int i = panel * 32 + 4 * j;
      const uint32_t row = warp * 16 + lane % 16, chunk = j + lane / 16;
      tile::stmatrix_x4(base + tile::swizzle128(row, chunk), pair_bits<T>(v[i], v[i + 1]),
                        pair_bits<T>(v[i + 2], v[i + 3]), pair_bits<T>(v[i + 4], v[i + 5]),
                        pair_bits<T>(v[i + 6], v[i + 7]));
    }
  }
  tile::fence_async_proxy();
  tile::named_barrier(w.barrier, 128);
  if (w.thread == 0) {
    const int n0 = w.n0 + panel * kCols;
    if (w.m0 < w.m_end && n0 < p.n) {
      if (sizeof(T) == 4 && p.accumulate) {
        tile::tma_reduce_add(map, smem, n0, w.m0);
      } else {
        tile::tma_store(map, smem, n0, w.m0);
      }
    }
    tile::tma_store_commit();
  }
}

template <Epilogue kEpilogue, int kSlots>
__device__ __forceinline__ void epilogue_wave(float (&v)[64], const int wave,
                                              const EpilogueParams& p, const CUtensorMap* map,
                                              const Wave& w) {
  epilogue_values<kEpilogue>(v, p, w);
  // fp32 sums are added by the copy engine on the way out.
  if (p.accumulate && (w.direct || p.out_dtype != DType::f32)) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float2 old[16];
      read_row(old, p.out, p.out_dtype, p, w, p.ldo, h);
#pragma unroll
      for (int j = 0; j < 16; ++j) v[4 * j + 2 * h] += old[j].x, v[4 * j + 2 * h + 1] += old[j].y;
    }
  }
  with_type(p.out_dtype, [&]<class T>(T) {
    if (w.direct) {
      write_rows<T>(v, p.out, p, w, p.ldo);
    } else {
      constexpr int kPanels = sizeof(T);  // 128 columns in panels of 128 bytes
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        store_panel<kSlots, T>(v, panel, (wave * kPanels + panel) % kSlots, p, map, w);
      }
    }
  });
}

}  // namespace te_mx::sm90
