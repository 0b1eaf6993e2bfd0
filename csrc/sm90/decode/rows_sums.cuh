// Sums of few rows of x times weights that stand still in tiles (sm90_layout.h), of MXFP8 or in
// blocks of 128 x 128 with fp32 scales, with the bits that a row has among any others in
// gemm_kernel.cuh: x of MXFP8 is aligned for 128 of k of a row by itself, and sums of 128 products
// (32 where a tile of weights is spread) times both scales are added up in fp32 from the first k to
// the last. Weights are operand A of wgmma, x is operand B.
#pragma once

#include "decode/aligned_rows.cuh"
#include "decode/decode_out.cuh"
#include "decode/decode_weights.cuh"
#include "gemm/gemm_factors.cuh"
#include "gemm/gemm_gelu.cuh"
#include "mxtile/sm90/wgmma_shared.cuh"

namespace te_mx::sm90 {

inline constexpr int kWideRows = 128;                   // of weights in a tile
inline constexpr int kWideWords = 4 * (kWideRows + 4);  // bytes of the scales of a tile
inline constexpr int kRowsMath = 128;                   // threads of a warpgroup

// Two sums side by side, from column n of a row of out on. NOTE: GELU of a pair as in the GEMM.
__device__ __forceinline__ void write_two(const DecodeOut& out, int64_t row, int n, int64_t bias0,
                                          bool both, float a, float b) {
  if (out.bias != nullptr) {
    a += load_number(out.bias, bias0 + n, out.bias_dtype);
    if (both) b += load_number(out.bias, bias0 + n + 1, out.bias_dtype);
  }
  if (out.activates) {
    const float2 y =
        out.act == Act::gelu ? gelu_forward<Gelu::tanh>({a, b}) : gelu_forward<Gelu::erf>({a, b});
    a = y.x, b = y.y;
  }
  const int64_t i = row * out.ld + n;
  char* const to = static_cast<char*>(out.out) + 2 * i;
  if (both && out.dtype != DType::f32 && reinterpret_cast<uintptr_t>(to) % 4 == 0) {
    *reinterpret_cast<uint32_t*>(to) = pair_of(out.dtype, a, b);
    return;
  }
  store_number(out.out, i, out.dtype, a);
  if (both) store_number(out.out, i + 1, out.dtype, b);
}

// Sums of a lane, which warpgroups hand on in shared memory.
template <int kCount>
struct PassedSums {
  static constexpr int kFloats = kCount;
  float v[kFloats] = {};

  // From the warpgroup before, and to the next one.
  __device__ __forceinline__ void load(uint32_t at) {
#pragma unroll
    for (int i = 0; i < kFloats; i += 4) {
      const uint4 w = tile::load_shared16(at + i / 4 * (kRowsMath * 16));
      v[i] = __uint_as_float(w.x), v[i + 1] = __uint_as_float(w.y);
      v[i + 2] = __uint_as_float(w.z), v[i + 3] = __uint_as_float(w.w);
    }
  }
  __device__ __forceinline__ void store(uint32_t at) const {
#pragma unroll
    for (int i = 0; i < kFloats; i += 4)
      tile::st_shared_u32x4(at + i / 4 * (kRowsMath * 16),
                            {__float_as_uint(v[i]), __float_as_uint(v[i + 1]),
                             __float_as_uint(v[i + 2]), __float_as_uint(v[i + 3])});
  }
};

// Sums of a warp: of lane 4g + t rows g and g + 8 of its 16 of weights, rows 8j + 2t and
// 8j + 2t + 1 of x.
template <class Math>
struct RowsSums : PassedSums<Math::kFloats> {
  using PassedSums<Math::kFloats>::kFloats;
  using PassedSums<Math::kFloats>::v;

  // Scales of the lane's rows of x, in order, which lie at a shared address.
  struct OfX {
    float v[Math::kX / 4];
    __device__ __forceinline__ void load(uint32_t at) {
      if constexpr (Math::kX == 8) {
        const uint2 two = tile::load_shared8(at);
        v[0] = __uint_as_float(two.x), v[1] = __uint_as_float(two.y);
      } else {
#pragma unroll
        for (int i = 0; i < Math::kX / 16; ++i) {
          const uint4 s = tile::load_shared16(at + i * 64);
          v[4 * i] = __uint_as_float(s.x), v[4 * i + 1] = __uint_as_float(s.y);
          v[4 * i + 2] = __uint_as_float(s.z), v[4 * i + 3] = __uint_as_float(s.w);
        }
      }
    }
  };

  // Adds d, which is there, times the scales of the lane's rows of weights and of those of x.
  // NOTE: scales are multiplied with each other first, as in gemm_promote.cuh.
  __device__ __forceinline__ void add(const float (&d)[kFloats], float low, float high,
                                      const OfX& x) {
#pragma unroll
    for (int i = 0; i < kFloats; ++i)
      v[i] = fmaf(d[i], (i % 4 < 2 ? low : high) * x.v[i / 4 * 2 + i % 2], v[i]);
  }
  // The same of a tile of class 3, right for every exponent: those of the lane's rows of weights.
  __device__ __forceinline__ void add_spread_far(const float (&d)[kFloats], int low, int high,
                                                 const OfX& x) {
#pragma unroll
    for (int i = 0; i < kFloats; ++i)
      v[i] = add_far(v[i], d[i],
                     static_cast<int>(__float_as_uint(x.v[i / 4 * 2 + i % 2]) >> 23) +
                         (i % 4 < 2 ? low : high));
  }
  // Times factors of rows of x and of a tile: as TileFactors of gemm_factors.cuh. there: rows of x,
  // from the lane's first on; behind them lies anything.
  __device__ __forceinline__ void add_factors(const float (&d)[kFloats], float tile, const OfX& x,
                                              int there) {
    bool normal = true;
#pragma unroll
    for (int i = 0; i < Math::kX / 4; ++i)
      normal &= i / 2 * 8 + i % 2 >= there || is_normal(x.v[i] * tile);
    if (__builtin_expect(__all_sync(~0u, normal), true)) {
#pragma unroll
      for (int i = 0; i < kFloats; ++i) v[i] = fmaf(d[i], x.v[i / 4 * 2 + i % 2] * tile, v[i]);
      return;
    }
#pragma unroll
    for (int i = 0; i < kFloats; ++i) {
      const float of_x = x.v[i / 4 * 2 + i % 2];
      CarefulFactors factors(of_x, tile);
      if (is_normal(of_x * tile)) factors.first = 1.0f, factors.second = of_x * tile;
      v[i] = factors.add(v[i], d[i]);
    }
  }
  // To `out`, from row n0 of the weights on. Two lanes have neighbours of a row.
  __device__ __forceinline__ void write(const DecodeOut& out, const DecodeBlock& rows, int n0,
                                        int n_end, int lane) const {
    const bool second = lane / 4 % 2 != 0;
#pragma unroll
    for (int i = 0; i < kFloats; i += 2) {
      const float other = __shfl_xor_sync(~0u, second ? v[i] : v[i + 1], 4);
      const int row = i / 4 * 8 + lane % 4 * 2 + second;
      const int n = n0 + i / 2 % 2 * 8 + lane / 8 * 2;
      if (row < rows.count && n < n_end)
        write_two(out, int64_t{rows.first} + row, n, int64_t{rows.group} * n_end, n + 1 < n_end,
                  second ? other : v[i], second ? v[i + 1] : other);
    }
  }
};

}  // namespace te_mx::sm90
