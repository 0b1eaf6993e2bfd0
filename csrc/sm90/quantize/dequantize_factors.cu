// Dequantizes plain codes with one fp32 scale for 1 x 128 or 128 x 128 of them: code * scale.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/device.h"
#include "common/numbers.cuh"
#include "quantize/plain_codes.cuh"
#include "quantize/plain_tasks.h"

namespace te_mx::sm90 {

namespace {

namespace tile = mxtile::sm90;

inline constexpr int kThreads = 256;
inline constexpr int64_t kMostBlocks = 132 * 64;

// A matrix [rows, cols] as it lies. Element (r, c) has scale (r >> row_bits, c >> col_bits).
struct Params {
  const uint8_t* codes;
  const float* scales;
  void* out;
  int64_t rows, cols, scale_ld;
  int row_bits, col_bits;
};

// To fp32, or to 16 bits. A thread takes 8 codes of a row at a time, which start where 8 bytes do.
template <tile::Fp8 kFmt, bool kWide>
__global__ void __launch_bounds__(kThreads)
    dequantize_factor_vectors(const __grid_constant__ Params p, bool fp16) {
  const int64_t pieces = p.cols / 8, total = p.rows * pieces,
                step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < total;
       i += step) {
    const int64_t row = i / pieces, col = (i - row * pieces) * 8;
    const float* const scales = p.scales + (row >> p.row_bits) * p.scale_ld;
    alignas(8) uint8_t codes[8];
    alignas(16) uint16_t out[kWide ? 16 : 8];
    *reinterpret_cast<uint2*>(codes) =
        __ldg(reinterpret_cast<const uint2*>(p.codes + row * p.cols + col));
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float code = __low2float(tile::fp8x2_to_half2<kFmt>(codes[j]));
      const float v = code * __ldg(scales + ((col + j) >> p.col_bits));
      if constexpr (kWide) {
        reinterpret_cast<float*>(out)[j] = v;
      } else {
        out[j] = fp16 ? __half_as_ushort(__float2half_rn(v))
                      : __bfloat16_as_ushort(__float2bfloat16_rn(v));
      }
    }
    uint4* const to = reinterpret_cast<uint4*>(static_cast<uint8_t*>(p.out) +
                                               (kWide ? 4 : 2) * (row * p.cols + col));
#pragma unroll
    for (int j = 0; j < (kWide ? 2 : 1); ++j) to[j] = reinterpret_cast<const uint4*>(out)[j];
  }
}

// Any size and address, element by element.
__global__ void __launch_bounds__(kThreads)
    dequantize_factor_elements(const __grid_constant__ Params p, Element element, DType dtype) {
  const int64_t total = p.rows * p.cols, step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < total;
       i += step) {
    const int64_t row = i / p.cols, col = i - row * p.cols;
    const float scale = __ldg(p.scales + (row >> p.row_bits) * p.scale_ld + (col >> p.col_bits));
    store_number(p.out, i, dtype, value_of(element, p.codes[i]) * scale);
  }
}

unsigned grid_of(int64_t threads) {
  const int64_t blocks = (threads + kThreads - 1) / kThreads;
  return static_cast<unsigned>(blocks < kMostBlocks ? blocks : kMostBlocks);
}

void launch(const Params& p, Element element, DType dtype, cudaStream_t stream) {
  const auto aligned = [](const void* at, uintptr_t bytes) {
    return reinterpret_cast<uintptr_t>(at) % bytes == 0;
  };
  if (p.cols % 8 != 0 || !aligned(p.codes, 8) || !aligned(p.out, 16)) {
    dequantize_factor_elements<<<grid_of(p.rows * p.cols), kThreads, 0, stream>>>(p, element,
                                                                                  dtype);
    return;
  }
  const auto go = [&]<bool kWide>() {
    const auto kernel = element == Element::e4m3
                            ? dequantize_factor_vectors<tile::Fp8::e4m3, kWide>
                            : dequantize_factor_vectors<tile::Fp8::e5m2, kWide>;
    kernel<<<grid_of(p.rows * p.cols / 8), kThreads, 0, stream>>>(p, dtype == DType::f16);
  };
  dtype == DType::f32 ? go.operator()<true>() : go.operator()<false>();
}

}  // namespace

Status dequantize_factors(const DequantizeArgs& args) {
  const Operand& o = args.operand;
  if (!known(o.element) || !known(args.out_dtype) || o.rows < 0 || o.k < 0)
    return Status::bad_argument;
  if (!is_fp8(o.element) || !is_blockwise(o.scaling)) return Status::unsupported;
  const bool down = o.layout == Layout::k_first;
  if (!down && o.layout != Layout::k_last) return Status::unsupported;
  if (o.rows == 0 || o.k == 0) return Status::ok;
  const int row_bits = o.scaling.block_rows == 1 ? 0 : 7;
  Params p{};
  p.codes = o.codes, p.scales = static_cast<const float*>(o.scales), p.out = args.out;
  p.rows = down ? o.k : o.rows, p.cols = down ? o.rows : o.k;
  p.row_bits = down ? 7 : row_bits, p.col_bits = down ? row_bits : 7;
  p.scale_ld = (p.cols + (1ll << p.col_bits) - 1) >> p.col_bits;
  launch(p, o.element, args.out_dtype, static_cast<cudaStream_t>(args.execution.stream));
  return started(cudaGetLastError());
}

}  // namespace te_mx::sm90
