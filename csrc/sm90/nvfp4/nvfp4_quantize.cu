// bf16, fp16 or fp32 numbers to NVFP4 by the rule of Transformer Engine, along both directions from
// one read: the bytes of te_mx/formats/nvfp4.py, whose steps in fp32 these are.
#include "common/formats.h"
#include "common/launch.h"
#include "common/numbers.cuh"
#include "mxtile/sm90/convert.cuh"
#include "nvfp4/nvfp4_operand.cuh"
#include "te_mx/sm90_nvfp4.h"

namespace te_mx::sm90 {
namespace {

constexpr int kThreads = 256, kTileRows = 64, kTileCols = 64, kPitch = kTileCols + 1;
constexpr uint32_t kInfinite = 0x7F800000u;
constexpr float kLargest = 3.402823466e38f;

struct Nvfp4Quantize {
  Nvfp4QuantizeArgs to;
  bool vectors;  // x is bf16 in whole 16 bytes
};

// Sixteen numbers side by side, of which `count` exist; the others are 0.
__device__ __forceinline__ void load_block(const Nvfp4Quantize& q, int64_t row, int64_t col,
                                           int count, float (&v)[16]) {
  const int64_t at = row * q.to.x.row_stride + col;
  if (count == 16 && q.vectors) {
    uint4 w[2];
    const auto* const from =
        reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(q.to.x.data) + at);
    w[0] = __ldg(from), w[1] = __ldg(from + 1);
    const uint32_t words[8] = {w[0].x, w[0].y, w[0].z, w[0].w, w[1].x, w[1].y, w[1].z, w[1].w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      v[2 * i] = __uint_as_float(words[i] << 16);
      v[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 16; ++i)
    v[i] = i < count ? load_number(q.to.x.data, at + i, q.to.x.dtype) : 0.0f;
}

__device__ __forceinline__ uint32_t magnitude(float v) { return __float_as_uint(v) & 0x7FFFFFFFu; }

// The largest finite magnitude of x, as bits, to *q.to.amax, which is 0.
__global__ void __launch_bounds__(kThreads) nvfp4_amax(const Nvfp4Quantize q) {
  tile::let_dependents_start();
  tile::await_predecessors();
  const int64_t blocks = (q.to.x.cols + 15) / 16, all = q.to.x.rows * blocks;
  uint32_t most = 0;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < all;
       i += int64_t{gridDim.x} * kThreads) {
    const int64_t row = i / blocks, col = (i - row * blocks) * 16;
    float v[16];
    load_block(q, row, col, static_cast<int>(min(int64_t{16}, q.to.x.cols - col)), v);
#pragma unroll
    for (const float one : v)
      if (magnitude(one) < kInfinite) most = max(most, magnitude(one));
  }
  most = __reduce_max_sync(~0u, most);
  if (threadIdx.x % 32 == 0 && most != 0) atomicMax(q.to.amax, most);
}

// A block to its scale, and codes two a byte.
struct Made {
  uint32_t scale;
  uint2 codes;
};
__device__ __forceinline__ uint32_t largest_of(const float (&v)[16]) {
  uint32_t largest = 0;
#pragma unroll
  for (const float one : v) largest = max(largest, magnitude(one));
  return largest;
}
__device__ __forceinline__ Made quantize_block(const float (&v)[16], uint32_t largest, float encode,
                                               float decode) {
  if (largest >= kInfinite) return {0x7F, {0, 0}};
  const float wanted = __uint_as_float(largest) * (encode * 0.16666667163372040f);
  const uint32_t scale = tile::fp8x2<tile::Fp8::e4m3>(wanted, 0.0f) & 0xFF;
  // E4M3 as fp32, exactly: its bits 120 octaves below.
  const float stored = __uint_as_float(scale << 20) * 0x1p120f;
  const float over = fminf(1.0f / (stored * decode), kLargest);
  uint32_t words[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float t = v[i] == 0.0f ? v[i] : v[i] * over;
    const float a = fminf(fabsf(t), 6.0f);
    // The step of the result is 0.5 below 2, 1 below 4, then 2: so many octaves e.
    const uint32_t e = max(__float_as_uint(a), 0x3F800000u) >> 23;
    const float big = __uint_as_float((e + 22) << 23) * 1.5f;
    const uint32_t steps = __float_as_uint(a + big) & 7;
    const uint32_t code = steps + 2 * (e - 127) | (__float_as_uint(t) >> 31) << 3;
    words[i / 8] |= code << (4 * (i % 8));
  }
  return {scale, {words[0], words[1]}};
}

// Eight bytes of codes, of which `count` exist.
__device__ __forceinline__ void store_codes(uint8_t* to, uint2 codes, int count) {
  if (count == 8 && reinterpret_cast<uintptr_t>(to) % 8 == 0) {
    *reinterpret_cast<uint2*>(to) = codes;
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (i < count) to[i] = static_cast<uint8_t>((i < 4 ? codes.x : codes.y) >> (8 * (i % 4)));
}

__global__ void __launch_bounds__(kThreads) nvfp4_quantize_tile(const Nvfp4Quantize q) {
  __shared__ float tile_of[kTileRows * kPitch];
  __shared__ uint32_t square[16];  // the largest of squares of 16 x 16
  if (threadIdx.x < 16) square[threadIdx.x] = 0;
  tile::let_dependents_start();
  tile::await_predecessors();
  const uint32_t bits = __ldcg(q.to.amax);
  const float amax = __uint_as_float(bits);
  const float encode = bits == 0 ? 1.0f : fminf(2688.0f / amax, kLargest), decode = 1.0f / encode;
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *q.to.scale = decode;
  const int64_t row0 = int64_t{blockIdx.y} * kTileRows, col0 = int64_t{blockIdx.x} * kTileCols;
  {
    const int r = static_cast<int>(threadIdx.x) / 4, c = threadIdx.x % 4 * 16;
    const int64_t row = row0 + r, col = col0 + c;
    const int count = row < q.to.x.rows ? static_cast<int>(min(int64_t{16}, q.to.x.cols - col)) : 0;
    float v[16] = {};
    if (count > 0) load_block(q, row, col, count, v);
    uint32_t largest = largest_of(v);
    if (q.to.square) {
      __syncthreads();
      atomicMax(square + r / 16 * 4 + c / 16, largest);
      __syncthreads();
      largest = square[r / 16 * 4 + c / 16];
    }
    if (q.to.col_codes != nullptr) {
#pragma unroll
      for (int i = 0; i < 16; ++i) tile_of[r * kPitch + c + i] = v[i];
    }
    if (q.to.row_codes != nullptr && count > 0) {
      const Made made = quantize_block(v, largest, encode, decode);
      if (!q.to.square || r % 16 == 0)
        q.to.row_scales[(q.to.square ? row / 16 : row) * ((q.to.x.cols + 15) / 16) + col / 16] =
            static_cast<uint8_t>(made.scale);
      store_codes(q.to.row_codes + row * ((q.to.x.cols + 1) / 2) + col / 2, made.codes,
                  (count + 1) / 2);
    }
  }
  if (q.to.col_codes == nullptr) return;
  __syncthreads();
  const int c = threadIdx.x % kTileCols, r = static_cast<int>(threadIdx.x) / kTileCols * 16;
  const int64_t row = row0 + r, col = col0 + c;
  if (col >= q.to.x.cols || row >= q.to.x.rows) return;
  float v[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) v[i] = tile_of[(r + i) * kPitch + c];
  const Made made =
      quantize_block(v, q.to.square ? square[r / 16 * 4 + c / 16] : largest_of(v), encode, decode);
  const int count = static_cast<int>(min(int64_t{16}, q.to.x.rows - row));
  if (!q.to.square || c % 16 == 0)
    q.to.col_scales[(q.to.square ? col / 16 : col) * ((q.to.x.rows + 15) / 16) + row / 16] =
        static_cast<uint8_t>(made.scale);
  store_codes(q.to.col_codes + col * ((q.to.x.rows + 1) / 2) + row / 2, made.codes,
              (count + 1) / 2);
}

}  // namespace

Status nvfp4_quantize(const Nvfp4QuantizeArgs& a) {
  const Matrix& x = a.x;
  if (x.data == nullptr || x.rows < 1 || x.cols < 1 || !known(x.dtype) || a.amax == nullptr ||
      a.scale == nullptr || (a.row_codes == nullptr) != (a.row_scales == nullptr) ||
      (a.col_codes == nullptr) != (a.col_scales == nullptr))
    return Status::bad_argument;
  const int64_t across = (x.cols + kTileCols - 1) / kTileCols,
                down = (x.rows + kTileRows - 1) / kTileRows;
  if (x.col_stride != 1 || across > INT32_MAX || down > 65535) return Status::unsupported;
  const int sms = current_device().sms;
  if (sms == 0) return Status::unsupported;
  const bool whole = reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.row_stride % 8 == 0;
  const Nvfp4Quantize q{a, x.dtype == DType::bf16 && whole};
  const auto stream = static_cast<cudaStream_t>(a.execution.stream);
  const cudaError_t cleared = cudaMemsetAsync(a.amax, 0, 4, stream);
  if (cleared != cudaSuccess) return started(cleared);
  const Status status =
      launch_early(nvfp4_amax, {dim3(static_cast<unsigned>(4 * sms)), dim3(kThreads), stream}, q);
  if (status != Status::ok) return status;
  const dim3 grid(static_cast<unsigned>(across), static_cast<unsigned>(down));
  return launch_early(nvfp4_quantize_tile, {grid, dim3(kThreads), stream}, q);
}

}  // namespace te_mx::sm90
