// Sums of the rows of a plain MX operand [rows, k] over k: the bias gradient of an operand. Every
// sum has one order, which only the sizes decide.
#include <cuda_runtime_api.h>

#include <cstdint>

#include "gemm/gemm_launch.h"
#include "mxtile/sm90/fp8.cuh"
#include "quantize/plain_tasks.h"
#include "te_mx/sm90.h"

namespace te_mx::sm90 {

namespace {

namespace tile = mxtile::sm90;

inline constexpr int kThreads = 256;
inline constexpr int kWarps = kThreads / 32;
inline constexpr int64_t kChunk = 32 * kWarps;  // of k, in one partial sum of the k-first form

template <tile::Fp8 kFmt>
__device__ __forceinline__ float2 values(uint32_t two) {
  return __half22float2(tile::fp8x2_to_half2<kFmt>(static_cast<uint16_t>(two)));
}

// Sum of the 16 codes of four words.
template <tile::Fp8 kFmt>
__device__ __forceinline__ float sum_16(const uint32_t (&w)[4]) {
  float2 s[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float2 lo = values<kFmt>(w[j]), hi = values<kFmt>(w[j] >> 16);
    s[j] = {lo.x + hi.x, lo.y + hi.y};
  }
  return ((s[0].x + s[1].x) + (s[2].x + s[3].x)) + ((s[0].y + s[1].y) + (s[2].y + s[3].y));
}

// f<format>() of what the call says.
template <class F>
__device__ __forceinline__ void with_format(const RowSumsTask& a, const F& f) {
  if (a.element == Element::e4m3) return f.template operator()<tile::Fp8::e4m3>();
  f.template operator()<tile::Fp8::e5m2>();
}

// Codes [rows, k]: a warp a row, a lane 16 codes at a time, all of one block. kVectors: rows are
// multiples of 16 bytes, aligned.
template <bool kVectors>
__global__ void __launch_bounds__(kThreads) sum_rows(const __grid_constant__ RowSumsTask a) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= a.rows) return;
  const uint8_t* const codes = a.codes + row * a.k;
  const uint8_t* const scales = a.scales + row * ((a.k + 31) / 32);
  float sum = 0.0f;
  constexpr int kAtOnce = 8;
  for (int64_t start = 16 * lane; start < a.k; start += kAtOnce * 512) {
    uint32_t w[kAtOnce][4], scale[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t k = start + 512 * i;
      w[i][0] = w[i][1] = w[i][2] = w[i][3] = 0, scale[i] = 127;
      if (k >= a.k) continue;
      scale[i] = __ldg(scales + k / 32);
      if constexpr (kVectors) {
        const uint4 v = __ldg(reinterpret_cast<const uint4*>(codes + k));
        w[i][0] = v.x, w[i][1] = v.y, w[i][2] = v.z, w[i][3] = v.w;
      } else {
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          if (k + j < a.k) w[i][j / 4] |= static_cast<uint32_t>(codes[k + j]) << (j % 4 * 8);
        }
      }
    }
    with_format(a, [&]<tile::Fp8 kOf>() {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) sum += sum_16<kOf>(w[i]) * tile::e8m0_to_float(scale[i]);
    });
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  if (lane == 0) a.out[row] = sum;
}

// Codes [k, rows]: a warp sums one block of k of 256 rows, eight a lane; a CTA the blocks of a
// chunk. kVectors: rows is a multiple of 8 and the codes are aligned.
template <bool kVectors>
__global__ void __launch_bounds__(kThreads) sum_chunks(const __grid_constant__ RowSumsTask a) {
  __shared__ float sums[kWarps][256 + 8];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t r0 = static_cast<int64_t>(blockIdx.x) * 256, row = r0 + 8 * lane;
  const int64_t chunk = blockIdx.y + static_cast<int64_t>(gridDim.y) * blockIdx.z;
  if (chunk * kChunk >= a.k) return;
  const int64_t k0 = chunk * kChunk + 32 * warp;
  float sum[8] = {};
  if (row < a.rows && k0 < a.k) {
    const int count = static_cast<int>(min(a.k - k0, int64_t{32}));
    const int width = static_cast<int>(min(a.rows - row, int64_t{8}));
    const uint8_t* from = a.codes + k0 * a.rows + row;
    const uint8_t* const scales = a.scales + k0 / 32 * a.rows + row;
    float factor[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) factor[j] = j < width ? tile::e8m0_to_float(__ldg(scales + j)) : 1;
    constexpr int kAtOnce = 16;
    for (int i0 = 0; i0 < count; i0 += kAtOnce) {
      uint2 v[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i, from += a.rows) {
        v[i] = make_uint2(0, 0);
        if (i0 + i >= count) continue;
        if constexpr (kVectors) {
          v[i] = __ldg(reinterpret_cast<const uint2*>(from));
        } else {
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            const uint32_t code = j < width ? from[j] : 0;
            (j < 4 ? v[i].x : v[i].y) |= code << (j % 4 * 8);
          }
        }
      }
      with_format(a, [&]<tile::Fp8 kOf>() {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float2 two = values<kOf>((j < 2 ? v[i].x : v[i].y) >> (j % 2 * 16));
            sum[2 * j] += two.x, sum[2 * j + 1] += two.y;
          }
        }
      });
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) sum[j] *= factor[j];
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) sums[warp][8 * lane + j] = sum[j];
  __syncthreads();
  if (r0 + threadIdx.x >= a.rows) return;
  float total = sums[0][threadIdx.x];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) total += sums[w][threadIdx.x];
  a.workspace[chunk * a.rows + r0 + threadIdx.x] = total;
}

Status launch(const RowSumsTask& a, cudaStream_t stream) {
  if (!a.k_first) {
    const int64_t grid = (a.rows + kWarps - 1) / kWarps;
    if (grid > INT32_MAX) return Status::unsupported;
    const bool vectors = a.k % 16 == 0 && reinterpret_cast<uintptr_t>(a.codes) % 16 == 0;
    const auto kernel = vectors ? sum_rows<true> : sum_rows<false>;
    kernel<<<static_cast<unsigned>(grid), kThreads, 0, stream>>>(a);
    return started(cudaGetLastError());
  }
  const int64_t columns = (a.rows + 255) / 256, chunks = (a.k + kChunk - 1) / kChunk;
  if (columns > INT32_MAX) return Status::unsupported;
  constexpr int64_t kMaxY = 32768;
  const dim3 grid(static_cast<unsigned>(columns),
                  static_cast<unsigned>(chunks < kMaxY ? chunks : kMaxY),
                  static_cast<unsigned>((chunks + kMaxY - 1) / kMaxY));
  const bool vectors = a.rows % 8 == 0 && reinterpret_cast<uintptr_t>(a.codes) % 8 == 0;
  const auto kernel = vectors ? sum_chunks<true> : sum_chunks<false>;
  kernel<<<grid, kThreads, 0, stream>>>(a);
  const Status status = started(cudaGetLastError());
  if (status != Status::ok) return status;
  return reduce_columns(a.workspace, a.out, chunks, a.rows, stream);
}

}  // namespace

int64_t row_sums_workspace_bytes(int64_t rows, int64_t k, bool k_first) {
  return k_first ? (k + kChunk - 1) / kChunk * rows * static_cast<int64_t>(sizeof(float)) : 0;
}

Status row_sums(const RowSumsArgs& args) {
  const Status status = check_plain(args.operand);
  if (status != Status::ok) return status;
  if (!is_fp8(args.operand.element)) return Status::unsupported;
  const RowSumsTask a = task_of(args);
  if (args.execution.workspace_bytes < row_sums_workspace_bytes(a.rows, a.k, a.k_first))
    return Status::small_workspace;
  if (a.rows == 0) return Status::ok;
  const auto stream = static_cast<cudaStream_t>(a.stream);
  if (a.k == 0) return started(cudaMemsetAsync(a.out, 0, a.rows * sizeof(float), stream));
  return launch(a, stream);
}

}  // namespace te_mx::sm90
