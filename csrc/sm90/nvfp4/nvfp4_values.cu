// NVFP4 and MXFP4 to what they stand for: weights that stand still (sm90_nvfp4.h), and plain codes
// of NVFP4. And what comes behind a product of such values.
#include "common/formats.h"
#include "common/launch.h"
#include "common/numbers.cuh"
#include "mxtile/sm90/convert.cuh"
#include "mxtile/sm90/shared.cuh"
#include "nvfp4/nvfp4_operand.cuh"
#include "te_mx/sm90_nvfp4.h"

namespace te_mx::sm90 {
namespace {

constexpr int kWarps = 8;
constexpr int kRowBytes = 2 * kNvfp4Quad + 16;  // NOTE: so that eight rows meet all banks

struct Nvfp4Values {
  const uint8_t* w;
  const uint8_t* w_scales;
  const float* scale;  // of the tensor, or of each of its rows
  bool scale_rows, mx;
  int64_t quads;
  int n, k;
  uint16_t* out;
  bool half;  // out is fp16
};

// A warp has a quad.
__global__ void __launch_bounds__(32 * kWarps) nvfp4_values(const Nvfp4Values p) {
  using Operand = Nvfp4Operand<false>;
  __shared__ __align__(16) uint8_t room[kWarps][16 * kRowBytes];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = threadIdx.x % 32;
  const int steps = (p.k + kNvfp4Quad - 1) / kNvfp4Quad;
  tile::let_dependents_start();
  tile::await_predecessors();
  const int64_t quad = int64_t{blockIdx.x} * kWarps + warp;
  if (quad >= p.quads) return;
  const int row0 =
      static_cast<int>(quad / 4 / steps) * kNvfp4Rows + static_cast<int>(quad % 4) * 16;
  const int k0 = static_cast<int>(quad / 4 % steps) * kNvfp4Quad + lane % 16 * 8;
  const uint4* const from = reinterpret_cast<const uint4*>(p.w + quad * kNvfp4Codes);
  const uint4 codes[2] = {__ldcs(from + lane), __ldcs(from + 32 + lane)};
  uint4 scales{};
  if (p.mx) {
    const uint8_t* const at = p.w_scales + quad * kMxfp4Scales;
    const uint2 two = __ldcs(reinterpret_cast<const uint2*>(at) + lane / 4);
    scales.x = two.x, scales.y = two.y;
  } else {
    scales = __ldcs(reinterpret_cast<const uint4*>(p.w_scales + quad * kNvfp4Scales) + lane / 4);
  }
  const int low = min(row0 + lane / 4, p.n - 1), high = min(low + 8, p.n - 1);
  float of_rows[2] = {1.0f, 1.0f};
  if (p.scale != nullptr) {
    of_rows[0] = __ldg(p.scale + (p.scale_rows ? low : 0));
    of_rows[1] = __ldg(p.scale + (p.scale_rows ? high : 0));
  }
  const uint32_t words[8] = {codes[0].x, codes[0].y, codes[0].z, codes[0].w,
                             codes[1].x, codes[1].y, codes[1].z, codes[1].w};
  const uint32_t pairs[4] = {scales.x, scales.y, scales.z, scales.w};
  // Lane l gives stmatrix_x4 row l % 8 of matrix l / 8: of the first rows, of the others, 8 of k
  // further on.
  const uint32_t base = tile::smem_addr(room[warp]);
  const uint32_t to = base + lane % 16 * kRowBytes + lane / 16 * 16;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    uint32_t a[4];
    const uint32_t four = pairs[p.mx ? j / 4 : j / 2];
    Operand::make(a, words[j],
                  p.mx ? (j / 2 % 2 == 0 ? Operand::template powers<0>(four)
                                         : Operand::template powers<1>(four))
                       : (j % 2 == 0 ? Operand::template scales<0>(four)
                                     : Operand::template scales<1>(four)));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // NOTE: the first product is exact, the second may round.
      const float even = __uint_as_float(a[i] << 16) * kNvfp4Up * of_rows[i % 2];
      const float odd = __uint_as_float(a[i] & 0xFFFF0000u) * kNvfp4Up * of_rows[i % 2];
      a[i] = p.half ? as<uint32_t>(__floats2half2_rn(even, odd))
                    : as<uint32_t>(__floats2bfloat162_rn(even, odd));
    }
    tile::stmatrix_x4(to + j * 32, a[0], a[1], a[2], a[3]);
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int r = 2 * i + lane / 16, row = row0 + r;
    if (row >= p.n || k0 >= p.k) continue;
    const uint4 v = tile::ld_shared_u32x4(base + r * kRowBytes + lane % 16 * 16);
    uint16_t* const at = p.out + int64_t{row} * p.k + k0;
    if (p.k % 8 == 0) {
      *reinterpret_cast<uint4*>(at) = v;
      continue;
    }
    const uint32_t four[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 8; ++j)
      if (k0 + j < p.k) at[j] = static_cast<uint16_t>(four[j / 2] >> (16 * (j % 2)));
  }
}

// What a code stands for: its bits, as the upper ones of fp32, are that times 2^-126.
__device__ __forceinline__ float number_of(uint32_t code) {
  return __uint_as_float((code & 7) << 22 | (code & 8) << 28) * 0x1p126f;
}
__device__ __forceinline__ float scale_of(uint32_t byte) {
  return __low2float(tile::fp8x2_to_half2<tile::Fp8::e4m3>(static_cast<uint16_t>(byte)));
}

struct PlainNvfp4 {
  Nvfp4Args to;
  int64_t rows, across;  // of memory
  int64_t eights;        // of a row
  int64_t blocks;        // of scales across
  bool vectors;          // eight codes are whole words, eight numbers whole 16 bytes
};

// A thread has eight codes that lie side by side.
__global__ void __launch_bounds__(32 * kWarps)
    nvfp4_plain_values(const __grid_constant__ PlainNvfp4 p) {
  const Nvfp4Args& a = p.to;
  tile::let_dependents_start();
  tile::await_predecessors();
  const int64_t at = int64_t{blockIdx.x} * (32 * kWarps) + threadIdx.x;
  const int64_t row = at / p.eights, col = (at - row * p.eights) * 8;
  if (row >= p.rows) return;
  const auto count = static_cast<int>(min(int64_t{8}, p.across - col));
  float v[8];
  if (a.k_first) {
    const uint8_t* const from = a.w + row * p.across + col;
    const uint8_t* const scales = a.w_scales + row / 16 * p.blocks;
    uint2 codes{0, 0}, bytes{0, 0};
    if (p.vectors) {
      codes = __ldcs(reinterpret_cast<const uint2*>(from));
      if (!a.square) bytes = __ldg(reinterpret_cast<const uint2*>(scales + col));
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      uint32_t code = (i < 4 ? codes.x : codes.y) >> (8 * (i % 4));
      uint32_t byte = (i < 4 ? bytes.x : bytes.y) >> (8 * (i % 4)) & 0xFF;
      float whole = 1.0f;
      if (i < count) {
        if (!p.vectors) code = from[i];
        if (!p.vectors || a.square) byte = __ldg(scales + (a.square ? (col + i) / 16 : col + i));
        if (a.scale != nullptr) whole = __ldg(a.scale + (a.scale_rows ? col + i : 0));
      }
      v[i] = number_of(code) * scale_of(byte) * whole;
    }
  } else {
    const uint8_t* const from = a.w + row * ((p.across + 1) / 2) + col / 2;
    uint32_t codes = 0;
    if (p.vectors) {
      codes = __ldcs(reinterpret_cast<const uint32_t*>(from));
    } else {
      for (int i = 0; 2 * i < count; ++i) codes |= uint32_t{from[i]} << (8 * i);
    }
    const int64_t block = (a.square ? row / 16 : row) * p.blocks + col / 16;
    const float scale = scale_of(__ldg(a.w_scales + block));
    const float whole = a.scale == nullptr ? 1.0f : __ldg(a.scale + (a.scale_rows ? row : 0));
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = number_of(codes >> (4 * i)) * scale * whole;
  }
  const int64_t first = row * p.across + col;
  store_eight(a.out, first, a.out_dtype, v, count);
}

struct Finish {
  Nvfp4FinishArgs to;
  bool vectors;  // four columns of sums are whole 16 bytes, of the result whole 8
};
constexpr int kFinishRows = 4, kFinishCols = 4 * 32 * kWarps;

// A thread has four columns of some rows.
__global__ void __launch_bounds__(32 * kWarps) nvfp4_finish_sums(const __grid_constant__ Finish p) {
  const Nvfp4FinishArgs& a = p.to;
  tile::let_dependents_start();
  tile::await_predecessors();
  const int64_t n = a.n, col = int64_t{blockIdx.y} * kFinishCols + 4 * threadIdx.x;
  if (col >= n) return;
  const auto count = static_cast<int>(min(int64_t{4}, n - col));
  const float left = a.of_lhs == nullptr || a.lhs_rows ? 1.0f : __ldg(a.of_lhs);
  float right[4], bias[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const bool there = j < count;
    right[j] = there && a.of_rhs != nullptr ? __ldg(a.of_rhs + (a.rhs_rows ? col + j : 0)) : 1.0f;
    bias[j] = there && a.bias != nullptr ? load_number(a.bias, col + j, a.bias_dtype) : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < kFinishRows; ++i) {
    const int64_t row = int64_t{blockIdx.x} * kFinishRows + i, at = row * n + col;
    if (row >= a.m) return;
    const float of_row = a.of_lhs != nullptr && a.lhs_rows ? __ldg(a.of_lhs + row) : left;
    float v[4] = {0, 0, 0, 0};
    if (p.vectors) {
      const float4 four = __ldcs(reinterpret_cast<const float4*>(a.sums + at));
      v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
    } else {
      for (int j = 0; j < count; ++j) v[j] = a.sums[at + j];
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      v[j] = __fmul_rn(v[j], __fmul_rn(of_row, right[j]));
      if (a.bias != nullptr) v[j] = __fadd_rn(v[j], bias[j]);
      if (a.accumulate && j < count)
        v[j] = __fadd_rn(v[j], load_number(a.out, at + j, a.out_dtype));
    }
    if (p.vectors && a.out_dtype == DType::f32) {
      *reinterpret_cast<float4*>(static_cast<float*>(a.out) + at) =
          make_float4(v[0], v[1], v[2], v[3]);
    } else if (p.vectors) {
      *reinterpret_cast<uint2*>(static_cast<uint16_t*>(a.out) + at) =
          make_uint2(pair_of(a.out_dtype, v[0], v[1]), pair_of(a.out_dtype, v[2], v[3]));
    } else {
      for (int j = 0; j < count; ++j) store_number(a.out, at + j, a.out_dtype, v[j]);
    }
  }
}

}  // namespace

Status nvfp4_finish(const Nvfp4FinishArgs& a) {
  if (a.m < 1 || a.n < 1 || a.sums == nullptr || a.out == nullptr || !known(a.out_dtype) ||
      !known(a.bias_dtype))
    return Status::bad_argument;
  const int64_t down = (a.m + kFinishRows - 1) / kFinishRows;
  const int64_t across = (a.n + kFinishCols - 1) / kFinishCols;
  if (down > INT32_MAX || across > 65535) return Status::unsupported;
  const auto whole = [](const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; };
  const Finish p{a, a.n % 4 == 0 && whole(a.sums) && whole(a.out)};
  const dim3 grid(static_cast<unsigned>(down), static_cast<unsigned>(across));
  return launch_early(nvfp4_finish_sums, {grid, dim3(32 * kWarps), a.execution.stream}, p);
}

Status nvfp4_to_values(const Nvfp4Args& a) {
  if (a.w == nullptr || a.w_scales == nullptr || a.out == nullptr || a.n < 1 || a.k < 1)
    return Status::bad_argument;
  constexpr int64_t kMost = (int64_t{1} << 31) - 257;
  const auto whole = [](const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; };
  if (a.n > kMost || a.k > kMost || a.out_dtype == DType::f32 || a.groups.count != 0 ||
      a.ldo != a.k || !whole(a.w) || !whole(a.w_scales) || !whole(a.out))
    return Status::unsupported;
  const Nvfp4Values p{a.w,
                      a.w_scales,
                      a.scale,
                      a.scale_rows,
                      a.mx,
                      4 * nvfp4_blocks(a.n, a.k),
                      static_cast<int>(a.n),
                      static_cast<int>(a.k),
                      static_cast<uint16_t*>(a.out),
                      a.out_dtype == DType::f16};
  const int64_t ctas = (p.quads + kWarps - 1) / kWarps;
  if (ctas > kMost) return Status::unsupported;
  const Launch at{dim3(static_cast<unsigned>(ctas)), dim3(32 * kWarps), a.execution.stream};
  return launch_early(nvfp4_values, at, p);
}

Status nvfp4_from_rows(const Nvfp4Args& a) {
  if (a.w == nullptr || a.w_scales == nullptr || a.out == nullptr || a.n < 1 || a.k < 1 ||
      !known(a.out_dtype))
    return Status::bad_argument;
  if (a.groups.count != 0) return Status::unsupported;
  const auto starts_at = [](const void* at, int64_t bytes) {
    return reinterpret_cast<uintptr_t>(at) % static_cast<uintptr_t>(bytes) == 0;
  };
  const int64_t rows = a.k_first ? a.k : a.n, across = a.k_first ? a.n : a.k;
  const bool whole = across % 8 == 0 && starts_at(a.w, a.k_first ? 8 : 4) && starts_at(a.out, 16) &&
                     (!a.k_first || starts_at(a.w_scales, 8));
  const PlainNvfp4 p{
      a,    rows, across, (across + 7) / 8, a.k_first && !a.square ? across : (across + 15) / 16,
      whole};
  const int64_t ctas = (rows * p.eights + 32 * kWarps - 1) / (32 * kWarps);
  if (ctas > INT32_MAX) return Status::unsupported;
  return launch_early(nvfp4_plain_values,
                      {dim3(static_cast<unsigned>(ctas)), dim3(32 * kWarps), a.execution.stream},
                      p);
}

}  // namespace te_mx::sm90
