// Normalization of rows, each by a CTA of its own: what stands between two products of a
// decoding step. Next to no work, so what counts is the way to it: the kernel starts while the one
// before ends, has its weights in L2 by then, and lets the next one ask for its own.
#include <type_traits>

#include "fused/activation.cuh"
#include "fused/fused_patch.cuh"
#include "mxtile/sm90/copy_async.cuh"
#include "te_mx/sm90.h"

namespace te_mx::sm90 {

namespace {

constexpr int kLanes = static_cast<int>(kNormLanes);  // of te_mx/fused.h: columns of a chunk
constexpr int kWarps = kLanes / 32;

struct NormRowsParams {
  const void* x;
  int64_t stride;
  int cols;
  bool rms, zero_centered, vectors;  // rows are whole vectors of 8 elements, aligned
  float eps, inverse;
  const void* weight;
  const void* bias;
  void* z;
  DType z_dtype, weight_dtype;
};

// Eight elements, of which `left` exist. NOTE: past L1, which may hold what was there before the
// kernel that wrote it.
template <class T>
__device__ __forceinline__ void read_8(Eight<T>& v, const void* of, int64_t at, int left,
                                       bool vectors) {
  const T* const from = static_cast<const T*>(of) + at;
  v.clear();
  if (vectors) {
    if (left <= 0) return;
#pragma unroll
    for (int j = 0; j < Input<T>::kVectors; ++j)
      v.chunks[j] = __ldcg(reinterpret_cast<const uint4*>(from) + j);
    return;
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (j >= left) continue;
    if constexpr (sizeof(T) == 4) {
      reinterpret_cast<float*>(v.words)[j] = __ldcg(reinterpret_cast<const float*>(from) + j);
    } else {
      const uint32_t one = __ldcg(reinterpret_cast<const uint16_t*>(from) + j);
      v.words[j / 2] |= one << (16 * (j % 2));
    }
  }
}

// Eight elements of weight or bias: of the type of x, or of one that is known at run time.
struct Late {};
template <class W>
struct Weights {
  Eight<W> v;
  __device__ __forceinline__ void read(DType, const void* of, int64_t at, int left, bool vectors) {
    read_8(v, of, at, left, vectors);
  }
  __device__ __forceinline__ void unpack(DType, float (&to)[8]) const { v.unpack(to); }
};
template <>
struct Weights<Late> {
  Eight<float> v;  // of 16 bits they are the first four words
  __device__ __forceinline__ void read(DType dtype, const void* of, int64_t at, int left,
                                       bool vectors) {
    if (dtype == DType::f32) return read_8(v, of, at, left, vectors);
    Eight<__half> bits;
    read_8(bits, of, at, left, vectors);
    v.chunks[0] = bits.chunks[0];
  }
  __device__ __forceinline__ void unpack(DType dtype, float (&to)[8]) const {
    if (dtype == DType::f32) return v.unpack(to);
    const auto as = [&]<class T>(Eight<T> bits) {
      bits.chunks[0] = v.chunks[0];
      bits.unpack(to);
    };
    dtype == DType::bf16 ? as(Eight<__nv_bfloat16>()) : as(Eight<__half>());
  }
};

template <class T>
__device__ __forceinline__ void write_8(void* to, int64_t at, const float (&v)[8], int left,
                                        bool vectors) {
  T* const first = static_cast<T*>(to) + at;
  const Eight<T> made(v);
  if (vectors) {
    if (left <= 0) return;
#pragma unroll
    for (int j = 0; j < Input<T>::kVectors; ++j)
      reinterpret_cast<uint4*>(first)[j] = made.chunks[j];
    return;
  }
#pragma unroll
  for (int j = 0; j < 8; ++j)
    if (j < left) first[j] = static_cast<T>(v[j]);
}

// The sum of all lanes, in the tree of te_mx/fused.h; every thread gets it.
__device__ __forceinline__ float sum_of_lanes(float (&room)[kLanes], float own) {
  room[threadIdx.x] = own;
  __syncthreads();
  const float* const from = room + threadIdx.x % 32;
  float four[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) four[i] = add(from[32 * i], from[32 * i + 128]);
  float sum = add(add(four[0], four[2]), add(four[1], four[3]));
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) sum = add(sum, __shfl_xor_sync(~0u, sum, lanes));
  return sum;
}

// Grid: rows. In, W: of x, and of weight and bias, In or Late. A warp has every eighth chunk of 256
// columns, a thread 8 neighbours of each; kHeld of them stay in registers, more are read again.
// What is summed goes by way of shared memory to the threads that are its lanes.
template <class In, class W, int kHeld>
__global__ void __launch_bounds__(kLanes)
    norm_rows_kernel(const __grid_constant__ NormRowsParams p) {
  constexpr int kChunks = kHeld * kWarps;
  __shared__ __align__(16) float room[kChunks][kLanes];
  __shared__ float lanes[kLanes];
  const int warp = static_cast<int>(threadIdx.x) / 32, own = static_cast<int>(threadIdx.x) % 32 * 8;
  const int bytes = !std::is_same_v<W, Late> ? sizeof(In) : p.weight_dtype == DType::f32 ? 4 : 2;
  for (int i = static_cast<int>(threadIdx.x) * 128; i < p.cols * bytes; i += kLanes * 128) {
    tile::prefetch_l2(static_cast<const char*>(p.weight) + i);
    if (p.bias != nullptr) tile::prefetch_l2(static_cast<const char*>(p.bias) + i);
  }
  tile::await_predecessors();
  const int64_t x0 = blockIdx.x * p.stride, z0 = blockIdx.x * int64_t{p.cols};
  // NOTE: all that is read is on its way at once.
  Eight<In> held[kHeld];
  Weights<W> weights[kHeld];
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    const int col = (warp + j * kWarps) * kLanes + own;
    read_8(held[j], p.x, x0 + col, p.cols - col, p.vectors);
  }
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    const int col = (warp + j * kWarps) * kLanes + own;
    weights[j].read(p.weight_dtype, p.weight, col, p.cols - col, p.vectors);
  }
  // Calls f(elements, j, their first column) for those of this thread from column `first` on.
  const auto each = [&](int first, const auto& f) {
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const int col = first + (warp + j * kWarps) * kLanes + own;
      Eight<In> x = held[j];
      if (first > 0) read_8(x, p.x, x0 + col, p.cols - col, p.vectors);
      float v[8];
      x.unpack(v);
      f(v, j, col);
    }
  };
  const auto sum = [&](const auto& f) {
    float all = 0.0f;
    for (int first = 0; first < p.cols; first += kChunks * kLanes) {
      each(first, [&](const float (&v)[8], int j, int) {
        float4* const to = reinterpret_cast<float4*>(&room[warp + j * kWarps][own]);
        to[0] = {f(v[0]), f(v[1]), f(v[2]), f(v[3])};
        to[1] = {f(v[4]), f(v[5]), f(v[6]), f(v[7])};
      });
      __syncthreads();
      const int left = p.cols - first - static_cast<int>(threadIdx.x);
#pragma unroll
      for (int c = 0; c < kChunks; ++c)
        if (c * kLanes < left) all = add(all, room[c][threadIdx.x]);
      if (first + kChunks * kLanes < p.cols) __syncthreads();
    }
    return sum_of_lanes(lanes, all);
  };
  float mean = 0.0f;
  tile::let_dependents_start();
  if (!p.rms) mean = mul(sum([](float v) { return v; }), p.inverse);
  const float squares = sum([&](float v) {
    const float from_mean = p.rms ? v : sub(v, mean);
    return mul(from_mean, from_mean);
  });
  const float rstd = __frcp_rn(__fsqrt_rn(add(mul(squares, p.inverse), p.eps)));
  for (int first = 0; first < p.cols; first += kChunks * kLanes) {
    each(first, [&](float (&v)[8], int j, int col) {
      const int left = p.cols - col;
      Weights<W> of_weight = weights[j];
      if (first > 0) of_weight.read(p.weight_dtype, p.weight, col, left, p.vectors);
      float weight[8], bias[8];
      of_weight.unpack(p.weight_dtype, weight);
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const float factor = p.zero_centered ? add(weight[k], 1.0f) : weight[k];
        v[k] = mul(mul(p.rms ? v[k] : sub(v[k], mean), rstd), factor);
      }
      if (p.bias != nullptr) {
        of_weight.read(p.weight_dtype, p.bias, col, left, p.vectors);
        of_weight.unpack(p.weight_dtype, bias);
#pragma unroll
        for (int k = 0; k < 8; ++k) v[k] = add(v[k], bias[k]);
      }
      if (p.z_dtype == DType::bf16) {
        write_8<__nv_bfloat16>(p.z, z0 + col, v, left, p.vectors);
      } else if (p.z_dtype == DType::f16) {
        write_8<__half>(p.z, z0 + col, v, left, p.vectors);
      } else {
        write_8<float>(p.z, z0 + col, v, left, p.vectors);
      }
    });
  }
}

template <class In, class W>
Status launch(const NormRowsParams& p, int64_t rows, void* stream) {
  const auto kernel =
      p.cols <= 16 * kLanes ? norm_rows_kernel<In, W, 2> : norm_rows_kernel<In, W, 4>;
  return launch_early(kernel, {static_cast<unsigned>(rows), kLanes, stream}, p);
}

// Calls f with a null pointer to the type of a dtype.
template <class F>
Status with_dtype(DType dtype, const F& f) {
  if (dtype == DType::bf16) return f(static_cast<__nv_bfloat16*>(nullptr));
  if (dtype == DType::f16) return f(static_cast<__half*>(nullptr));
  return f(static_cast<float*>(nullptr));
}

}  // namespace

Status normalize_rows(const NormRowsArgs& a) {
  if (!known(a.x.dtype) || !known(a.weight_dtype) || !known(a.z_dtype)) return Status::bad_argument;
  if (a.x.rows < 0 || a.x.cols < 0) return Status::bad_argument;
  if (a.x.rows == 0 || a.x.cols == 0) return Status::ok;
  if (a.x.data == nullptr || a.weight == nullptr || a.z == nullptr) return Status::bad_argument;
  const int64_t most = (int64_t{1} << 31) - 65536;
  if (a.x.col_stride != 1 || a.x.rows > most || a.x.cols > most) return Status::unsupported;
  NormRowsParams p{};
  p.x = a.x.data, p.stride = a.x.row_stride, p.cols = static_cast<int>(a.x.cols);
  p.rms = a.rms, p.zero_centered = a.zero_centered, p.eps = a.eps, p.inverse = a.inverse;
  p.weight = a.weight, p.bias = a.bias, p.weight_dtype = a.weight_dtype;
  p.z = a.z, p.z_dtype = a.z_dtype;
  const auto aligned = [](const void* from) { return reinterpret_cast<uintptr_t>(from) % 16 == 0; };
  const int64_t bytes = a.x.dtype == DType::f32 ? 4 : 2;
  p.vectors = a.x.cols % 8 == 0 && a.x.row_stride * bytes % 16 == 0 && aligned(a.x.data) &&
              aligned(a.weight) && aligned(a.bias) && aligned(a.z);
  return with_dtype(a.x.dtype, [&]<class In>(In*) {
    const bool same = a.weight_dtype == a.x.dtype;
    return same ? launch<In, In>(p, a.x.rows, a.execution.stream)
                : launch<In, Late>(p, a.x.rows, a.execution.stream);
  });
}

}  // namespace te_mx::sm90
