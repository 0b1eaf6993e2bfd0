// Normalization of few rows, each by a CTA of its own: what stands between two products of a
// decoding step. Next to no work, so what counts is the way to it: the kernel starts while the one
// before ends, has its weights in L2 by then, and lets the next one ask for its own.
#include "common/launch.h"
#include "common/numbers.cuh"
#include "fused/activation.cuh"
#include "mxtile/sm90/barrier.cuh"
#include "mxtile/sm90/copy_async.cuh"
#include "quantize/quantize_input.cuh"
#include "te_mx/sm90.h"

namespace te_mx::sm90 {

namespace {

constexpr int kLanes = static_cast<int>(kNormLanes);  // threads are the lanes of te_mx/fused.h

struct NormRowsParams {
  const void* x;
  int64_t stride;
  int cols;
  bool rms, zero_centered;
  float eps, inverse;
  const void* weight;
  const void* bias;
  void* z;
  DType z_dtype;
};

// NOTE: past L1, which may hold what was there before the kernel that wrote it.
template <class T>
__device__ __forceinline__ float read(const void* from, int i) {
  if constexpr (std::is_same_v<T, float>) {
    return __ldcg(static_cast<const float*>(from) + i);
  } else {
    const uint16_t bits = __ldcg(static_cast<const uint16_t*>(from) + i);
    return Input<T>::values(bits).x;
  }
}

// The sum of all lanes, in the tree of te_mx/fused.h; every thread gets it. `room`: for one sum.
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

// Grid: rows. In, W: of x, and of weight and bias. kHeld: elements of a thread in registers.
template <class In, class W, int kHeld>
__global__ void __launch_bounds__(kLanes)
    norm_rows_kernel(const __grid_constant__ NormRowsParams p) {
  __shared__ float room[2][kLanes];
  tile::let_dependents_start();
  constexpr int kLine = 128 / sizeof(W);
  for (int i = static_cast<int>(threadIdx.x) * kLine; i < p.cols; i += kLanes * kLine) {
    tile::prefetch_l2(static_cast<const W*>(p.weight) + i);
    if (p.bias != nullptr) tile::prefetch_l2(static_cast<const W*>(p.bias) + i);
  }
  tile::await_predecessors();
  const int64_t row = blockIdx.x;
  const In* const x = static_cast<const In*>(p.x) + row * p.stride;
  const int own = static_cast<int>(threadIdx.x);
  const int count = (p.cols - own + kLanes - 1) / kLanes;
  // NOTE: all that is read is on its way at once.
  float held[kHeld], weights[kHeld];
#pragma unroll
  for (int j = 0; j < kHeld; ++j) held[j] = j < count ? read<In>(x, own + kLanes * j) : 0.0f;
#pragma unroll
  for (int j = 0; j < kHeld; ++j)
    weights[j] = j < count ? read<W>(p.weight, own + kLanes * j) : 0.0f;
  // Calls f(element) for those of this thread, in order.
  const auto each = [&](const auto& f) {
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      if (j < count) f(held[j]);
    }
    for (int i = own + kLanes * kHeld; i < p.cols; i += kLanes) f(read<In>(x, i));
  };
  float sum = 0.0f, mean = 0.0f;
  if (!p.rms) {
    each([&](float v) { sum = add(sum, v); });
    mean = mul(sum_of_lanes(room[0], sum), p.inverse);
    sum = 0.0f;
  }
  each([&](float v) {
    const float from_mean = p.rms ? v : sub(v, mean);
    sum = add(sum, mul(from_mean, from_mean));
  });
  const float variance = mul(sum_of_lanes(room[1], sum), p.inverse);
  const float rstd = __frcp_rn(__fsqrt_rn(add(variance, p.eps)));
  const auto finish = [&](float v, float weight, int i) {
    if (p.zero_centered) weight = add(weight, 1.0f);
    float z = mul(mul(p.rms ? v : sub(v, mean), rstd), weight);
    if (p.bias != nullptr) z = add(z, read<W>(p.bias, i));
    store_number(p.z, row * p.cols + i, p.z_dtype, z);
  };
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    if (j < count) finish(held[j], weights[j], own + kLanes * j);
  }
  for (int i = own + kLanes * kHeld; i < p.cols; i += kLanes)
    finish(read<In>(x, i), read<W>(p.weight, i), i);
}

template <class In, class W>
Status launch(const NormRowsParams& p, int64_t rows, void* stream) {
  cudaLaunchAttribute early = early_start();
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(rows)), config.blockDim = dim3(kLanes);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &early, config.numAttrs = 1;
  const auto kernel =
      p.cols <= 16 * kLanes ? norm_rows_kernel<In, W, 16> : norm_rows_kernel<In, W, 32>;
  return started(cudaLaunchKernelEx(&config, kernel, p));
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
  const NormRowsParams p{a.x.data,  a.x.row_stride,  static_cast<int>(a.x.cols),
                         a.rms,     a.zero_centered, a.eps,
                         a.inverse, a.weight,        a.bias,
                         a.z,       a.z_dtype};
  return with_dtype(a.x.dtype, [&]<class In>(In*) {
    return with_dtype(a.weight_dtype,
                      [&]<class W>(W*) { return launch<In, W>(p, a.x.rows, a.execution.stream); });
  });
}

}  // namespace te_mx::sm90
