// From the sums of all parts of k to the rows of out.
#pragma once

#include "common/numbers.cuh"
#include "decode/decode_rows.cuh"
#include "fused/activation.cuh"
#include "te_mx/sm90_decode.h"

namespace te_mx::sm90 {

struct DecodeOut {
  void* out = nullptr;  // [rows, n]
  int64_t ld = 0;
  DType dtype = DType::bf16;
  const void* bias = nullptr;  // [groups, n] or null
  DType bias_dtype = DType::bf16;
  bool activates = false;
  Act act = Act::relu;
};

__device__ __forceinline__ float activated(const DecodeOut& out, float v) {
  const ActWords words{out.act, false, 0.0f, 0.0f, 0.0f};
  float to = v;
  const auto apply = [&](const auto& f) { to = f(v).value; };
  if (out.dtype == DType::f32) {
    with_activation<true>(words, apply);
  } else {
    with_activation<false>(words, apply);
  }
  return to;
}

// Zeros in columns [first, last) of a block of rows.
__device__ __forceinline__ void clear(const DecodeOut& out, const DecodeBlock& rows, int first,
                                      int last) {
  const int width = last - first;
  for (int i = threadIdx.x; i < rows.count * width; i += kDecodeThreads)
    store_number(out.out, int64_t{rows.first + i / width} * out.ld + first + i % width, out.dtype,
                 0.0f);
}

// Where sums of a cluster meet. A fragment has those of 16 rows of weights and 8 of x, 32 lanes of
// float4; its parts of k lie one behind the other in the CTA `fragment % cluster`.
struct SumsPlace {
  int cluster, parts, tiles, rank;

  template <class Params>
  __device__ __forceinline__ SumsPlace(const Params& p, int rank)
      : cluster(p.split.cluster),
        parts(p.split.cluster * p.split.parts()),
        tiles(p.split.tiles),
        rank(rank) {}
  // Fragments that this CTA adds up.
  __device__ __forceinline__ int mine(int rows) const {
    return (tiles * kDecodeTile * (rows / 8) - rank + cluster - 1) / cluster;
  }
  __device__ __forceinline__ int bytes(int rows) const { return mine(rows) * parts * 512; }
  // In float4.
  __device__ __forceinline__ int of(int fragment, int part) const {
    return (fragment / cluster * parts + part) * 32;
  }
};

// Adds the parts of this CTA's fragments up and writes them out.
template <int kRows, class Params>
__device__ __forceinline__ void finish(const Params& p, const SumsPlace& place, const float4* sums,
                                       int tile0, const DecodeBlock& rows) {
  const int lane = threadIdx.x % 32, count = rows.count, mine = place.mine(kRows);
  const DecodeOut& out = p.out;
  const int64_t bias0 = int64_t{rows.group} * p.n;
  for (int slot = threadIdx.x / 32; slot < mine; slot += kDecodeWarps) {
    const int fragment = place.rank + slot * place.cluster, tile = fragment / kDecodeTile;
    const int col = tile % (kRows / 8) * 8 + lane % 4 * 2;  // of the block's rows of x
    if (col >= count) continue;
    const float4* const from = sums + slot * place.parts * 32 + lane;
    float4 s = from[0];
    for (int part = 1; part < place.parts; ++part) {
      const float4 v = from[part * 32];
      s.x += v.x, s.y += v.y, s.z += v.z, s.w += v.w;
    }
    const int group = (tile0 + tile / (kRows / 8)) * kDecodeTile + fragment % kDecodeTile;
    const float v[2][2] = {{s.x, s.y}, {s.z, s.w}};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int n = group * kDecodeRows + lane / 4 + 8 * h;
      if (n >= p.n) continue;
      const float bias =
          out.bias == nullptr ? 0.0f : load_number(out.bias, bias0 + n, out.bias_dtype);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (col + c >= count) continue;
        float sum = v[h][c] + bias;
        if (out.activates) sum = activated(out, sum);
        store_number(out.out, int64_t{rows.first + col + c} * out.ld + n, out.dtype, sum);
      }
    }
  }
}

}  // namespace te_mx::sm90
