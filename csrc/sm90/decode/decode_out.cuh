// From the sums of all parts of k to the rows of out.
#pragma once

#include "common/numbers.cuh"
#include "decode/decode_rows.cuh"
#include "fused/activation.cuh"
#include "mxtile/sm90/cluster.cuh"
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

__device__ __forceinline__ void activate(const DecodeOut& out, float (&v)[8]) {
  const ActWords words{out.act, false, 0.0f, 0.0f, 0.0f};
  const auto apply = [&](const auto& f) {
#pragma unroll
    for (float& one : v) one = f(one).value;
  };
  if (out.dtype == DType::f32) {
    with_activation<true>(words, apply);
  } else {
    with_activation<false>(words, apply);
  }
}

// Zeros in columns [first, last) of a block of rows.
template <int kThreads>
__device__ __forceinline__ void clear(const DecodeOut& out, const DecodeBlock& rows, int first,
                                      int last) {
  const int width = last - first;
  for (int i = threadIdx.x; i < rows.count * width; i += kThreads)
    store_number(out.out, int64_t{rows.first + i / width} * out.ld + first + i % width, out.dtype,
                 0.0f);
}

// Where sums of a cluster meet. A fragment has those of 16 rows of weights and 8 of x, 32 lanes of
// float4; its parts of k lie one behind the other in the CTA `fragment % cluster`.
struct SumsPlace {
  int cluster, parts, tiles, rank;
  int factor;  // quotient_factor(cluster)

  template <class Params>
  __device__ __forceinline__ SumsPlace(const Params& p, int rank)
      : cluster(p.split.cluster),
        parts(p.split.cluster * p.slice_parts),
        tiles(p.split.tiles),
        rank(rank),
        factor(p.cluster_factor) {}
  __device__ __forceinline__ int turn(int fragment) const { return fragment * factor >> 16; }
  // Fragments that this CTA adds up.
  __device__ __forceinline__ int mine(int rows) const {
    return turn(tiles * kDecodeTile * (rows / 8) - rank + cluster - 1);
  }
  __device__ __forceinline__ int bytes(int rows) const { return mine(rows) * parts * 512; }
  // In float4.
  __device__ __forceinline__ int of(int fragment, int part) const {
    return (turn(fragment) * parts + part) * 32;
  }
  // Who adds a fragment up.
  __device__ __forceinline__ int owner(int fragment) const {
    return fragment - turn(fragment) * cluster;
  }
};

// Puts the four sums of a fragment that a lane has where owner() of the cluster adds them up, with
// what counts on the barrier there; of a cluster of one without. NOTE: what only a cluster needs is
// worked out behind the branch: ptxas makes other instructions where it comes before.
template <class Bar, class Owner>
__device__ __forceinline__ void send_sums(float4* to, const float* v, int cluster, const Bar& bar,
                                          const Owner& owner) {
  if (cluster == 1) {
    *to = {v[0], v[1], v[2], v[3]};
  } else {
    tile::send(to,
               uint4{__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                     __float_as_uint(v[3])},
               bar(), owner());
  }
}

// The sums of all parts of a fragment, in order, that lie from `sums` on: half a warp has it, a
// lane row lane / 2 of x and eight of the weights, from 8 * (lane % 2) on.
__device__ __forceinline__ void add_parts(const float4* sums, int parts, float (&v)[8]) {
  const int lane = threadIdx.x % 16, half = lane % 2;
  const float* from = reinterpret_cast<const float*>(sums) + lane / 4 * 4 + half * 2 + lane / 2 % 2;
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = from[16 * i];
#pragma unroll 4
  for (int part = 1; part < parts; ++part) {
    from += 128;
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] += from[16 * i];
  }
}

// Eight sums side by side, of which `count` exist, from column n of a row of out on; bias0: where
// the bias of its matrix starts.
__device__ __forceinline__ void write_eight(const DecodeOut& out, int64_t row, int n, int64_t bias0,
                                            int count, float (&v)[8]) {
  if (out.bias != nullptr) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < count) v[i] += load_number(out.bias, bias0 + n + i, out.bias_dtype);
  }
  if (out.activates) activate(out, v);
  store_eight(out.out, row * out.ld + n, out.dtype, v, count);
}

// Adds the parts of this CTA's fragments up: half a warp has a fragment, a lane a row of x and
// eight of the weights, which lie side by side in a row of out. Fragment rank + i * cluster of a
// tile, which has kWarps of them one below the other, is the i-th in at.sums(), its parts one
// behind the other, kParts of every CTA. n0: the first weights of the tile; rows: of x that there
// are. write(col, n, count, v): row `col` of x, from n on.
template <int kWarps, int kThreads, int kParts, class At, class Write>
__device__ __forceinline__ void finish_fragments(const At& at, int rank, int n0, int rows,
                                                 const Write& write) {
  const int lane = threadIdx.x % 16, half = lane % 2, mine = at.mine();
  for (int slot = static_cast<int>(threadIdx.x) / 16; slot < mine; slot += kThreads / 16) {
    const int fragment = rank + slot * at.p.cluster, col = fragment / kWarps * 8 + lane / 2;
    const int n = n0 + fragment % kWarps * 16 + half * 8, count = min(8, at.p.n - n);
    if (col >= rows || count <= 0) continue;
    const int parts = at.p.cluster * kParts;
    float v[8];
    add_parts(reinterpret_cast<const float4*>(at.sums()) + slot * parts * 32, parts, v);
    write(col, n, count, v);
  }
}

// Rows of a block whose out is written by finish_few(); of more, by finish_wide().
inline constexpr int kFinishRows = 8;

// Adds the parts of this CTA's fragments up and writes them out: half a warp has a fragment, a lane
// a row of x and eight of the weights, which lie side by side in a row of out.
template <int kRows, int kWarps, class Params>
__device__ __forceinline__ void finish_wide(const Params& p, const SumsPlace& place,
                                            const float4* sums, int group0, int groups,
                                            const DecodeBlock& rows) {
  const int lane = threadIdx.x % 16, half = lane % 2, mine = place.mine(kRows);
  const DecodeOut& out = p.out;
  for (int slot = static_cast<int>(threadIdx.x) / 16; slot < mine; slot += 2 * kWarps) {
    const int fragment = place.rank + slot * place.cluster, tile = fragment / kDecodeTile;
    const int group = tile / (kRows / 8) * kDecodeTile + fragment % kDecodeTile;
    const int col = tile % (kRows / 8) * 8 + lane / 2;
    const int n = (group0 + group) * kDecodeRows + half * 8;
    const int count = group < groups ? min(8, p.n - n) : 0;
    if (col >= rows.count || count <= 0) continue;
    float v[8];
    add_parts(sums + slot * place.parts * 32, place.parts, v);
    write_eight(out, rows.first + col, n, int64_t{rows.group} * p.n, count, v);
  }
}

// The same where few rows of x are there: a thread has a number of out at a time.
template <int kThreads, class Params>
__device__ __forceinline__ void finish_few(const Params& p, const SumsPlace& place,
                                           const float4* sums, int group0, int groups,
                                           const DecodeBlock& rows) {
  const DecodeOut& out = p.out;
  const int all = place.mine(8) * 128;
#pragma unroll 1
  for (int i = threadIdx.x; i < all; i += kThreads) {
    const int slot = i >> 7, row = i >> 4 & 7, fragment = place.rank + slot * place.cluster;
    const int n = (group0 + fragment) * kDecodeRows + (i & 15);
    if (row >= rows.count || fragment >= groups || n >= p.n) continue;
    // Lane 4g + t of a fragment, and what of its four numbers.
    const int lane = (i & 7) * 4 + row / 2, part = (i >> 3 & 1) * 2 + row % 2;
    const float* from = reinterpret_cast<const float*>(sums + slot * place.parts * 32 + lane);
    from += part;
    float v = *from;
#pragma unroll 4
    for (int other = 1; other < place.parts; ++other) v += from[other * 128];
    if (out.bias != nullptr)
      v += load_number(out.bias, int64_t{rows.group} * p.n + n, out.bias_dtype);
    if (out.activates) v = activated(out, v);
    store_number(out.out, (rows.first + row) * out.ld + n, out.dtype, v);
  }
}

}  // namespace te_mx::sm90
