// Dequantizes plain MX codes [rows, cols]: code * 2^(byte - 127). In bf16 this is the exact path's
// operand: every value of a block with a scale byte in [4, 246] is a bf16 number.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/device.h"
#include "common/numbers.cuh"
#include "quantize/plain_codes.cuh"
#include "quantize/plain_tasks.h"
#include "te_mx/sm90.h"

namespace te_mx::sm90 {

namespace {

namespace tile = mxtile::sm90;

inline constexpr int kThreads = 256;
inline constexpr int kRows = 4;  // of a thread, under each other: one block where blocks go down
inline constexpr int64_t kMaxY = 32768;

// Two numbers of 16 bits as they lie in memory: bf16, or fp16.
__device__ __forceinline__ uint32_t pair_of(float2 v, bool fp16) {
  if (fp16) {
    const __half2 pair = __float22half2_rn(v);
    return reinterpret_cast<const uint32_t&>(pair);
  }
  const __nv_bfloat162 pair = __float22bfloat162_rn(v);
  return reinterpret_cast<const uint32_t&>(pair);
}

// Codes that are read as those of another element.
template <tile::Fp8 kFmt, bool kDown>
inline constexpr bool kNibbles = kFmt == tile::Fp8::e2m1 && !kDown;
template <tile::Fp8 kFmt>
inline constexpr tile::Fp8 kReadFmt = kFmt == tile::Fp8::e2m1 ? tile::Fp8::e4m3 : kFmt;

// Eight codes from `from` on.
template <tile::Fp8 kFmt, bool kDown>
__device__ __forceinline__ uint2 read_codes(const uint8_t* from) {
  if constexpr (kFmt != tile::Fp8::e2m1) return __ldg(reinterpret_cast<const uint2*>(from));
  uint32_t nibbles;
  if constexpr (kDown) {
    const uint2 w = __ldg(reinterpret_cast<const uint2*>(from));
    nibbles = tile::pack_nibbles(w.x & 0x0F0F0F0Fu, w.y & 0x0F0F0F0Fu);
  } else {
    nibbles = __ldg(reinterpret_cast<const uint32_t*>(from));
  }
  const tile::Fp4Table table(tile::kFp4Headroom);
  return {table.four(nibbles), table.four(nibbles >> 16)};
}

struct Params {
  DequantizeTask a;
  int lane_bits;  // 2^lane_bits threads side by side, 8 columns each
};

// To fp32, or to 16 bits. cols is a multiple of 8 and the addresses are aligned.
template <tile::Fp8 kFmt, bool kWide, bool kDown>
__global__ void __launch_bounds__(kThreads) dequantize_vectors(const __grid_constant__ Params p) {
  const DequantizeTask& a = p.a;
  const int lane = threadIdx.x & ((1 << p.lane_bits) - 1);
  const int64_t group = blockIdx.y + static_cast<int64_t>(gridDim.y) * blockIdx.z;
  const int64_t col = 8 * ((static_cast<int64_t>(blockIdx.x) << p.lane_bits) + lane);
  const int64_t row = kRows * (group * (kThreads >> p.lane_bits) + (threadIdx.x >> p.lane_bits));
  if (col >= a.cols || row >= a.rows) return;
  const int count = static_cast<int>(a.rows - row < kRows ? a.rows - row : kRows);
  const int64_t ld = row_bytes(a.cols, kNibbles<kFmt, kDown>);
  const uint8_t* const from = a.codes + row * ld + row_bytes(col, kNibbles<kFmt, kDown>);
  uint2 codes[kRows];
  uint32_t scale[kRows];
  uint2 scales{};
  if constexpr (kDown) {
    scales = __ldg(reinterpret_cast<const uint2*>(a.scales + row / 32 * a.cols + col));
  }
  const int64_t blocks = (a.cols + 31) / 32;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (i >= count) break;
    codes[i] = read_codes<kFmt, kDown>(from + i * ld);
    if constexpr (!kDown) scale[i] = __ldg(a.scales + (row + i) * blocks + col / 32);
  }
  float factors[8];
  if constexpr (kDown) {
#pragma unroll
    for (int j = 0; j < 8; ++j)
      factors[j] = tile::e8m0_to_float((j < 4 ? scales.x : scales.y) >> (j % 4 * 8) & 0xFF);
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (i >= count) break;
    const float one = kDown ? 0.0f : tile::e8m0_to_float(scale[i]);
    alignas(16) uint32_t out[kWide ? 8 : 4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t word = j < 2 ? codes[i].x : codes[i].y;
      const float2 v = __half22float2(
          tile::fp8x2_to_half2<kReadFmt<kFmt>>(static_cast<uint16_t>(word >> (j % 2 * 16))));
      const float2 y{v.x * (kDown ? factors[2 * j] : one),
                     v.y * (kDown ? factors[2 * j + 1] : one)};
      if constexpr (kWide) {
        out[2 * j] = __float_as_uint(y.x), out[2 * j + 1] = __float_as_uint(y.y);
      } else {
        out[j] = pair_of(y, a.out_dtype == DType::f16);
      }
    }
    uint4* const to = reinterpret_cast<uint4*>(static_cast<uint8_t*>(a.out) +
                                               (kWide ? 4 : 2) * ((row + i) * a.cols + col));
#pragma unroll
    for (int j = 0; j < (kWide ? 2 : 1); ++j) to[j] = reinterpret_cast<const uint4*>(out)[j];
  }
}

// Any size and address, element by element.
__global__ void __launch_bounds__(kThreads)
    dequantize_elements(const __grid_constant__ DequantizeTask a) {
  const int64_t total = a.rows * a.cols, step = static_cast<int64_t>(gridDim.x) * kThreads;
  const bool fp4 = a.element == Element::e2m1, down = a.blocks_along_rows;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < total;
       i += step) {
    const int64_t row = i / a.cols, col = i - row * a.cols;
    const uint32_t scale =
        down ? a.scales[row / 32 * a.cols + col] : a.scales[row * ((a.cols + 31) / 32) + col / 32];
    uint32_t code = a.codes[fp4 && !down ? row * row_bytes(a.cols, true) + col / 2 : i];
    if (fp4) {
      code = (down ? code : code >> col % 2 * 4) & 0xF;
      code = tile::Fp4Table(tile::kFp4Headroom).four(code) & 0xFF;
    }
    store_number(a.out, i, a.out_dtype,
                 value_of(a.element, static_cast<uint8_t>(code)) * tile::e8m0_to_float(scale));
  }
}

bool aligned(const void* p, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

template <tile::Fp8 kFmt, bool kWide>
void launch(const DequantizeTask& a) {
  const auto stream = static_cast<cudaStream_t>(a.stream);
  if (a.cols % 8 != 0 || !aligned(a.codes, 8) || !aligned(a.out, 16) ||
      (a.blocks_along_rows && !aligned(a.scales, 8))) {
    const int64_t blocks = (a.rows * a.cols + kThreads - 1) / kThreads;
    const auto grid = static_cast<unsigned>(blocks < 132 * 64 ? blocks : 132 * 64);
    dequantize_elements<<<grid, kThreads, 0, stream>>>(a);
    return;
  }
  Params p{a, 0};
  while (p.lane_bits < 5 && (int64_t{8} << p.lane_bits) < a.cols) ++p.lane_bits;
  const int64_t width = int64_t{8} << p.lane_bits, height = kRows * (kThreads >> p.lane_bits);
  const int64_t groups = (a.rows + height - 1) / height;
  const dim3 grid(static_cast<unsigned>((a.cols + width - 1) / width),
                  static_cast<unsigned>(groups < kMaxY ? groups : kMaxY),
                  static_cast<unsigned>((groups + kMaxY - 1) / kMaxY));
  if (a.blocks_along_rows) {
    dequantize_vectors<kFmt, kWide, true><<<grid, kThreads, 0, stream>>>(p);
  } else {
    dequantize_vectors<kFmt, kWide, false><<<grid, kThreads, 0, stream>>>(p);
  }
}

}  // namespace

Status dequantize(const DequantizeArgs& args) {
  if (is_blockwise(args.operand.scaling)) return dequantize_factors(args);
  const Status status = check_plain(args.operand);
  if (status != Status::ok) return status;
  if (!known(args.out_dtype)) return Status::bad_argument;
  const DequantizeTask a = task_of(args);
  if (a.rows == 0 || a.cols == 0) return Status::ok;
  with_element(a.element, [&]<tile::Fp8 kFmt>() {
    a.out_dtype == DType::f32 ? launch<kFmt, true>(a) : launch<kFmt, false>(a);
    return Status::ok;
  });
  return started(cudaGetLastError());
}

}  // namespace te_mx::sm90
