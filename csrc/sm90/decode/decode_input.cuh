// Rows of x on their way to the tensor cores, quad after quad of 128 k, as operand B of wgmma:
// E4M3 codes [rows][128 bytes], or fp16 numbers as two such tiles of 64 k, each under the 128-byte
// swizzle; and their scales in fp32. Values are quantized here, to the bytes of the quantizer; so
// are products of activations and their gates, which nothing else writes or reads.
#pragma once

#include "common/shares.cuh"
#include "decode/decode_values.cuh"
#include "mxtile/sm90/swizzle.cuh"

namespace te_mx::sm90 {

// Where x goes: quads `pass_first` to `pass_first + each` of all parts of a CTA's slice.
struct InputRoom {
  uint8_t* data;
  uint8_t* scales;
  int each, width;   // quads of a part, and of all
  int width_factor;  // quotient_factor(width)
  int each_factor;   // quotient_factor(each)
  int part0;         // the first part
  Shares parts;
  int pass_first;
  int64_t k;  // of x: what lies behind is zero
  int rows;   // that a quad has room for

  // The quad of x that quad q here is, or -1.
  __device__ __forceinline__ int quad(int q) const {
    const int part = q * each_factor >> 16;
    const Range quads(parts, part0 + part);
    const int at = quads.first + pass_first + q - part * each;
    return at < quads.last ? at : -1;
  }
};

// Where scales of row r of x lie among those of a block: what lane 4g + t reads at once, columns
// 8j + 2t and 8j + 2t + 1 of two j's, is in one piece, and the pieces of all t side by side, so
// that they lie in different banks.
template <int kRows>
inline constexpr int kScaleColumns = kRows == 8 ? 2 : 4;  // of a piece
template <int kRows>
__device__ __forceinline__ int scale_place(int r) {
  constexpr int kTogether = kScaleColumns<kRows> / 2;
  const int j = r / 8, t = r % 8 / 2;
  return ((j / kTogether * 4 + t) * kTogether + j % kTogether) * 2 + r % 2;
}
// Bytes from the scales of a block to what lane 4g + t reads at once, of number i.
template <int kRows>
__device__ __forceinline__ int scale_offset(int t, int i) {
  return (4 * i + t) * kScaleColumns<kRows> * 4;
}

// Eight numbers of row r, from 8 * lane of quad q on; lane is one of 16.
template <int kRows, bool kHalves, bool kFactors>
__device__ __forceinline__ void store_eight(const InputRoom& to, const EightMade& x, int q, int r,
                                            int lane) {
  uint8_t* const quad = to.data + q * decode_input_bytes(kRows, kHalves) + r / 8 * 1024;
  const uint4 w = x.words;
  if constexpr (kHalves) {
    // NOTE: pairs of 16 k lie as halves_of_codes() has them.
    uint8_t* const half = quad + lane / 8 * (to.rows * 128);
    const int chunk = lane % 8 / 2 * 2, inside = lane % 2 * 8;
    *reinterpret_cast<uint2*>(half + tile::swizzle128(r % 8, chunk) + inside) = {w.x, w.z};
    *reinterpret_cast<uint2*>(half + tile::swizzle128(r % 8, chunk + 1) + inside) = {w.y, w.w};
  } else {
    *reinterpret_cast<uint2*>(quad + tile::swizzle128(r % 8, lane / 2) + lane % 2 * 8) = {w.x, w.y};
  }
  constexpr int kLanes = kFactors ? 16 : 4;
  if (lane % kLanes == 0) {
    float* const scales = reinterpret_cast<float*>(to.scales + q * decode_scale_bytes(kRows));
    scales[lane / kLanes * to.rows + scale_place<kRows>(r)] = x.scale;
  }
}

// All rows of a pass, a quad of a row to half a warp, of which there are kWorkers; kBatch of them
// are loaded, then made.
template <class Eight, int kRows, bool kHalves, bool kFactors, int kBatch, int kWorkers>
__device__ __forceinline__ void fill_by(const DecodeInput& in, const InputRoom& to,
                                        const DecodeRows& block) {
  const int lane = threadIdx.x % 16, worker = threadIdx.x / 16, count = block.count;
  const int all = count * to.width;
  const int rows_on = kWorkers * to.width_factor >> 16, quads_on = kWorkers - rows_on * to.width;
  int row = worker * to.width_factor >> 16, q = worker - row * to.width;
  // NOTE: both halves of a warp go on together, for their shuffles.
#pragma unroll 1
  for (int at = worker & ~1; at < all; at += kWorkers * kBatch) {
    Eight x[kBatch];
    int rows[kBatch], quads[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int quad = row < count ? to.quad(q) : -1;
      const int64_t k = int64_t{quad} * kDecodeQuad + lane * 8;
      x[j].load(in, block.first + row, k, quad < 0 ? 0 : to.k - k);
      rows[j] = quad < 0 ? -1 : row, quads[j] = q;
      row += rows_on, q += quads_on;
      if (q >= to.width) q -= to.width, ++row;
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (at + j * kWorkers >= all) break;
      const EightMade made = x[j].made(in);
      if (rows[j] >= 0) store_eight<kRows, kHalves, kFactors>(to, made, quads[j], rows[j], lane);
    }
  }
}

// The same of bf16 values in whole vectors. What does not need x comes before wait().
template <int kRows, bool kFactors, int kBatch, int kWorkers, class Wait>
__device__ __forceinline__ void fill_plain(const DecodeInput& in, const InputRoom& to,
                                           const DecodeRows& block, const Wait& wait) {
  using Eight = EightValues<__nv_bfloat16, Element::e4m3, true, false, kFactors>;
  const int lane = threadIdx.x % 16, worker = threadIdx.x / 16, all = block.count * to.width;
  const int rows_on = kWorkers * to.width_factor >> 16, quads_on = kWorkers - rows_on * to.width;
  int row = worker * to.width_factor >> 16, q = worker - row * to.width;
#pragma unroll 1
  for (int at = worker & ~1; at < all; at += kWorkers * kBatch) {
    Eight x[kBatch];
    const __nv_bfloat16* from[kBatch];
    int places[kBatch];  // row and quad, or -1
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int quad = row < block.count ? to.quad(q) : -1;
      const int k = quad * kDecodeQuad + lane * 8;
      const bool there = quad >= 0 && k < to.k;
      from[j] = there ? static_cast<const __nv_bfloat16*>(in.x) + (block.first + row) * in.ld + k
                      : nullptr;
      places[j] = quad < 0 ? -1 : row + (q << 8);
      row += rows_on, q += quads_on;
      if (q >= to.width) q -= to.width, ++row;
    }
    wait();
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
      x[j].v[0] = from[j] == nullptr ? make_uint4(0, 0, 0, 0)
                                     : __ldcg(reinterpret_cast<const uint4*>(from[j]));
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (at + j * kWorkers >= all) break;
      const EightMade made = x[j].made(in);
      if (places[j] >= 0)
        store_eight<kRows, false, kFactors>(to, made, places[j] >> 8, places[j] & 255, lane);
    }
  }
}

// Values in T, or products of activations and gates, where x comes in whole vectors.
template <class Eight, class T, bool kVectors, int kRows, bool kHalves, bool kFactors, int kBatch,
          int kWorkers>
__device__ __forceinline__ void fill_values(const DecodeInput& in, const InputRoom& to,
                                            const DecodeRows& block) {
  if constexpr (kVectors) {
    constexpr int kGated = (kBatch + 1) / 2;
    if (in.gate != nullptr)
      return fill_by<EightGated<Eight, T>, kRows, kHalves, kFactors, kGated, kWorkers>(in, to,
                                                                                       block);
  }
  fill_by<Eight, kRows, kHalves, kFactors, kBatch, kWorkers>(in, to, block);
}

template <Element kFmt, bool kVectors, int kRows, bool kHalves, bool kFactors, int kBatch,
          int kWorkers>
__device__ __forceinline__ void fill_as(const DecodeInput& in, const InputRoom& to,
                                        const DecodeRows& block) {
  constexpr int kWide = (kBatch + 1) / 2;
  if (in.scales != nullptr) {
    fill_by<EightCodes<kFmt, kVectors, kHalves, kFactors>, kRows, kHalves, kFactors, kBatch,
            kWorkers>(in, to, block);
  } else if (in.dtype == DType::bf16) {
    fill_values<EightValues<__nv_bfloat16, kFmt, kVectors, kHalves, kFactors>, __nv_bfloat16,
                kVectors, kRows, kHalves, kFactors, kBatch, kWorkers>(in, to, block);
  } else if (in.dtype == DType::f16) {
    fill_values<EightValues<__half, kFmt, kVectors, kHalves, kFactors>, __half, kVectors, kRows,
                kHalves, kFactors, kBatch, kWorkers>(in, to, block);
  } else {
    fill_by<EightValues<float, kFmt, kVectors, kHalves, kFactors>, kRows, kHalves, kFactors, kWide,
            kWorkers>(in, to, block);
  }
}

template <bool kVectors, int kRows, bool kHalves, bool kFactors, int kBatch, int kWorkers>
__device__ __forceinline__ void fill_any(const DecodeInput& in, const InputRoom& to,
                                         const DecodeRows& block) {
  if constexpr (kHalves) {
    if (in.as_is && in.dtype == DType::bf16) {
      fill_by<EightAsTheyAre<__nv_bfloat16, kVectors, kFactors>, kRows, true, kFactors, kBatch,
              kWorkers>(in, to, block);
    } else if (in.as_is) {
      fill_by<EightAsTheyAre<__half, kVectors, kFactors>, kRows, true, kFactors, kBatch, kWorkers>(
          in, to, block);
    } else if (in.e5m2) {
      fill_as<Element::e5m2, kVectors, kRows, true, kFactors, kBatch, kWorkers>(in, to, block);
    } else {
      fill_as<Element::e4m3, kVectors, kRows, true, kFactors, kBatch, kWorkers>(in, to, block);
    }
  } else {
    fill_as<Element::e4m3, kVectors, kRows, false, kFactors, kBatch, kWorkers>(in, to, block);
  }
}

// By all threads, each of which loads kBatch vectors before it uses the first. Rows with other than
// whole vectors take their time.
template <int kRows, bool kHalves, bool kFactors, int kBatch, int kWorkers>
__device__ __forceinline__ void fill_pass(const DecodeInput& in, const InputRoom& to,
                                          const DecodeRows& block) {
  if (in.vectors && to.k % 8 == 0) {
    fill_any<true, kRows, kHalves, kFactors, kBatch, kWorkers>(in, to, block);
  } else {
    fill_any<false, kRows, kHalves, kFactors, 1, kWorkers>(in, to, block);
  }
}

// Prepares blocks of `kept` rows, 16 or more, for kernels that follow. Grid: x = quads, y = blocks,
// z = 16 rows of a block.
inline constexpr int kPrepareThreads = 256, kPrepareRows = kPrepareThreads / 16;
template <bool kHalves, bool kFactors>
__global__ void __launch_bounds__(kPrepareThreads)
    prepare_rows(const __grid_constant__ DecodeInput in, const __grid_constant__ DecodeRows given,
                 int64_t k, int quads, int kept) {
  tile::let_dependents_start();
  DecodeRows rows = given;
  if (!rows.early()) tile::await_predecessors();
  if (!rows.begin(static_cast<int>(blockIdx.y)) || rows.group < 0) return;
  const int quad = static_cast<int>(blockIdx.x), row = static_cast<int>(blockIdx.z) * kPrepareRows;
  rows.first += row, rows.count = min(rows.count - row, kPrepareRows);
  if (rows.count <= 0) return;
  const int64_t place = int64_t{blockIdx.y} * quads + quad;
  const InputRoom room{in.made + place * decode_input_bytes(kept, kHalves) + row * 128,
                       in.made_scales + place * decode_scale_bytes(kept) + row * 4,
                       1,
                       1,
                       quotient_factor(1),
                       quotient_factor(1),
                       quad,
                       {1, 0},
                       0,
                       k,
                       kept};
  if (rows.early()) tile::await_predecessors();
  fill_pass<kPrepareRows, kHalves, kFactors, 1, kPrepareRows>(in, room, rows);
}

}  // namespace te_mx::sm90
