// A few rows of x times weights that stand still: out[row, n] = sum over k of x[row, k] w[n, k].
//
// The one kernel of dense layers and of experts. Grid: x = clusters * CTAs of a cluster, y = blocks
// of rows. A block of at most 8 * kTiles rows meets one matrix of weights; a policy `Rows` says
// which rows and which matrix:
//
//   struct Rows {
//     static constexpr bool kEarly;   // expert() may be asked before the kernels that this one
//                                     // follows have finished: weights are asked for at once
//     bool begin(int block);          // by all threads, before the others; false: nothing to do
//                                     // (every CTA of a cluster must get the same answer)
//     int expert() const;             // which matrix of weights, from 0
//     int count() const;              // rows of the block, <= 8 * kTiles; rows behind are not read
//     int64_t in_row(int i) const;    // row of x that row i of the block is, or -1: zeros
//     int64_t out_row(int i) const;   // row of out that it goes to, or -1: nowhere
//     float weight(int i) const;      // what its fp32 sums (after the bias) are multiplied by
//     static constexpr bool kWeighted;  // else weight() is not asked
//   };
//
// A lambda-like object of a few registers, copied from a kernel parameter; it may read global
// memory in begin() (after await_predecessors, unless kEarly) and in its other functions. Dense:
// decode_dense.cu. To make one for experts: instantiate decode_kernel<kFmt, kTiles, YourRows> and
// launch it by launch_decode (decode_launch.cuh) with `blocks` = gridDim.y; expert e's weights lie
// at w + e * w_stride bytes, its bias at bias + e * n elements.
//
// Every warp has a ring of its own in shared memory, into which its lane 0 asks for whole stretches
// of weights (one bulk copy a stage), first of all; meanwhile all warps make the slice of x
// (decode_input.cuh). A warp's piece of work is a unit: 16 rows of weights and a part of k, whose
// blocks it adds up in order: sum of a block by two mma.sync in fp16, exact as the contract wants
// it (c = 1), times the weights' scale, times that of x. Sums of the parts go to the CTA of the
// cluster that adds them up, in order. So the bits of a row depend on n and k, not on the others
// rows of x nor on their number.
#pragma once

#include "decode/decode_fragments.cuh"
#include "decode/decode_input.cuh"
#include "mxtile/sm90/cluster.cuh"
#include "mxtile/sm90/tma.cuh"
#include "te_mx/sm90_decode.h"

namespace te_mx::sm90 {

struct DecodeOut {
  void* out = nullptr;  // [rows, n]
  int64_t ld = 0;
  DType dtype = DType::bf16;
  const void* bias = nullptr;  // [experts, n] or null
  DType bias_dtype = DType::bf16;
};

struct DecodeParams {
  const uint8_t* w = nullptr;
  int64_t w_stride = 0;  // bytes between the weights of two experts
  int n = 0, k = 0;
  int groups = 0, quads = 0;  // of all weights
  DecodeSplit split;
  DecodeRoom room;
  DecodeInput in;
  DecodeOut out;
};

__device__ __forceinline__ float load_number(const void* from, int64_t i, DType dtype) {
  if (dtype == DType::bf16) return __bfloat162float(static_cast<const __nv_bfloat16*>(from)[i]);
  if (dtype == DType::f16) return __half2float(static_cast<const __half*>(from)[i]);
  return static_cast<const float*>(from)[i];
}
__device__ __forceinline__ void store_number(void* to, int64_t i, DType dtype, float v) {
  if (dtype == DType::bf16) {
    static_cast<__nv_bfloat16*>(to)[i] = __float2bfloat16(v);
  } else if (dtype == DType::f16) {
    static_cast<__half*>(to)[i] = __float2half(v);
  } else {
    static_cast<float*>(to)[i] = v;
  }
}

// The quads of part `part` of k: [first, last).
struct QuadRange {
  int first, last;
  __device__ __forceinline__ QuadRange(const DecodeParams& p, int part, int parts = 1) {
    const int all = p.split.cluster * p.split.parts;
    first = part * p.quads / all, last = (part + parts) * p.quads / all;
  }
};

// What a warp walks through: its units, and stages of them.
struct UnitWalk {
  int unit, at, last;  // quads of the unit that are left: [at, last)

  __device__ __forceinline__ void start(const DecodeParams& p, int unit_, int part0) {
    unit = unit_;
    const QuadRange quads(p, part0 + unit % p.split.parts);
    at = quads.first, last = quads.last;
  }
  // The next stage of at most n quads is behind us.
  __device__ __forceinline__ void pass(const DecodeParams& p, int n, int part0) {
    at += n;
    if (at >= last) start(p, unit + p.split.warps, part0);
  }
};

// A warp's ring of stages.
template <Element kFmt>
struct WeightRing {
  static constexpr int kQuad = decode_quad_bytes(kFmt);
  const DecodeParams& p;
  const uint8_t* w;     // of the cluster's first group
  uint32_t data, bars;  // shared addresses
  int units, part0;     // of the CTA
  UnitWalk next;        // what is asked for next
  int asked = 0;        // the stage that it goes to

  // Asks for the next stage, if there is one.
  __device__ __forceinline__ void ask(int lane) {
    if (next.unit >= units) return;
    const int n = min(p.room.stage_quads, next.last - next.at);
    if (lane == 0) {
      const int64_t quad = int64_t{next.unit / p.split.parts} * p.quads + next.at;
      const uint32_t bar = bars + 8 * asked;
      tile::mbar_arrive_expect(bar, n * kQuad);
      tile::bulk_load(data + asked * p.room.stage_quads * kQuad, w + quad * kQuad, n * kQuad, bar);
    }
    next.pass(p, n, part0);
    asked = asked + 1 == p.room.stages ? 0 : asked + 1;
  }
};

// Sums of a unit, of a lane: rows g and g + 8 of the weights, rows 8j + 2t and 8j + 2t + 1 of x.
template <Element kFmt, int kTiles>
struct UnitSums {
  float v[kTiles][4] = {};
  uint32_t nan[2] = {};

  // A quad at `at`; x of its first block at `x`, scales of x at `scales`, both of this lane.
  __device__ __forceinline__ void add(uint32_t at, uint32_t x, uint32_t scales, int lane) {
    using Block = WeightBlock<kFmt>;
    WeightScales<kFmt> ws;
    ws.load(at + 4 * Block::kBytes, lane, nan);
    // NOTE: all four blocks at once would not fit in the registers beside 64 rows' sums.
#pragma unroll(kTiles == 8 ? 1 : 4)
    for (int b = 0; b < 4; ++b) {
      Block w;
      w.load(at + b * Block::kBytes, lane);
      const float low = ws.of(ws.low, b), high = ws.of(ws.high, b);
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        const uint4 xs = load_shared16(x + (b * kTiles + j) * 512);
        const uint2 sx = load_shared8(scales + (b * kTiles + j) * 32);
        const float sx0 = __uint_as_float(sx.x), sx1 = __uint_as_float(sx.y);
        float d[4] = {};
        mma_f16(d, w.first, xs.x, xs.y);
        mma_f16(d, w.second, xs.z, xs.w);
        v[j][0] = fmaf(d[0] * low, sx0, v[j][0]), v[j][1] = fmaf(d[1] * low, sx1, v[j][1]);
        v[j][2] = fmaf(d[2] * high, sx0, v[j][2]), v[j][3] = fmaf(d[3] * high, sx1, v[j][3]);
      }
    }
  }

  __device__ __forceinline__ void end() {
    const float none = __uint_as_float(0x7FC00000u);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      if (nan[0]) v[j][0] = v[j][1] = none;
      if (nan[1]) v[j][2] = v[j][3] = none;
    }
  }
};

// Stores four sums at a shared address of CTA `cta` of the cluster.
__device__ __forceinline__ void store_sums(uint32_t at, uint32_t cta, const float (&v)[4]) {
  asm volatile(
      "{\n"
      ".reg .b32 place;\n"
      "mapa.shared::cluster.u32 place, %0, %1;\n"
      "st.shared::cluster.v4.f32 [place], {%2, %3, %4, %5};\n"
      "}\n" ::"r"(at),
      "r"(cta), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
      : "memory");
}

// Adds the parts of this CTA's groups up and writes them out.
template <int kTiles, class Rows>
__device__ __forceinline__ void finish(const DecodeParams& p, const float4* sums, int group0,
                                       int groups, int rank, const Rows& rows) {
  const int cluster = p.split.cluster, parts = cluster * p.split.parts, count = rows.count();
  const int64_t bias0 = int64_t{rows.expert()} * p.n;
  const int mine = (groups - rank + cluster - 1) / cluster;
  for (int i = threadIdx.x; i < mine * kTiles * 32; i += blockDim.x) {
    const int slot = i / (kTiles * 32), place = i % (kTiles * 32), lane = place % 32;
    const int col = place / 32 * 8 + lane % 4 * 2;  // of the block's rows of x
    if (col >= count) continue;
    const float4* from = sums + slot * parts * kTiles * 32 + place;
    float4 s = *from;
    for (int part = 1; part < parts; ++part) {
      const float4 more = from[part * kTiles * 32];
      s.x += more.x, s.y += more.y, s.z += more.z, s.w += more.w;
    }
    const int row = (group0 + rank + slot * cluster) * kDecodeRows + lane / 4;  // of the weights
    const float v[2][2] = {{s.x, s.y}, {s.z, s.w}};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int n = row + 8 * h;
      if (n >= p.n) continue;
      const float bias =
          p.out.bias == nullptr ? 0.0f : load_number(p.out.bias, bias0 + n, p.out.bias_dtype);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int64_t to = col + c < count ? rows.out_row(col + c) : -1;
        if (to < 0) continue;
        float sum = v[h][c] + bias;
        if constexpr (Rows::kWeighted) sum *= rows.weight(col + c);
        store_number(p.out.out, to * p.out.ld + n, p.out.dtype, sum);
      }
    }
  }
}

template <Element kFmt, int kTiles, class Rows>
__global__ void __launch_bounds__(kDecodeMaxWarps * 32, 1)
    decode_kernel(const __grid_constant__ DecodeParams p, const __grid_constant__ Rows given) {
  extern __shared__ __align__(1024) uint8_t smem[];
  constexpr int kQuad = decode_quad_bytes(kFmt), kRows = 8 * kTiles;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int cluster = p.split.cluster, rank = static_cast<int>(blockIdx.x) % cluster;
  const int group0 = static_cast<int>(blockIdx.x) / cluster * p.split.groups;
  const int groups = min(p.split.groups, p.groups - group0), units = groups * p.split.parts;
  const int part0 = rank * p.split.parts;
  Rows rows = given;
  const uint32_t base = tile::smem_addr(smem);

  if constexpr (!Rows::kEarly) tile::await_predecessors();
  if (!rows.begin(blockIdx.y)) {
    if constexpr (Rows::kEarly) tile::await_predecessors();
    return;
  }
  if (cluster > 1) tile::cluster_arrive();  // whoever waits for it may write here

  const int stages = p.room.stages;
  uint64_t* const bars = reinterpret_cast<uint64_t*>(smem + p.room.bars_at) +
                         warp * kDecodeMaxStages;
  if (lane < stages) tile::mbar_init(bars + lane, 1);
  tile::mbar_init_fence();
  __syncwarp();
  WeightRing<kFmt> ring{
      p, p.w + rows.expert() * p.w_stride + int64_t{group0} * p.quads * kQuad,
      base + warp * stages * p.room.stage_quads * kQuad, tile::smem_addr(bars), units, part0};
  ring.next.start(p, warp, part0);
  for (int i = 0; i < stages; ++i) ring.ask(lane);
  tile::let_dependents_start();
  if constexpr (Rows::kEarly) tile::await_predecessors();

  const QuadRange slice(p, part0, p.split.parts);
  const InputRoom room{reinterpret_cast<uint4*>(smem + p.room.x_at),
                       reinterpret_cast<float*>(smem + p.room.scales_at),
                       kRows,
                       int64_t{slice.first} * kDecodeQuad,
                       (slice.last - slice.first) * kDecodeQuad,
                       p.k};
  fill_slice(p.in, room, rows.count(), [&](int i) { return rows.in_row(i); });
  if (cluster > 1) tile::cluster_wait();
  __syncthreads();

  // Of this lane: 16 bytes of every 8 rows, and two scales.
  const uint32_t x0 = base + p.room.x_at + lane * 16;
  const uint32_t scales0 = base + p.room.scales_at + lane % 4 * 8;
  int stage = 0;
  uint32_t phase = 0;
  for (int unit = warp; unit < units; unit += p.split.warps) {
    const int part = part0 + unit % p.split.parts, group = unit / p.split.parts;
    const QuadRange quads(p, part);
    UnitSums<kFmt, kTiles> sums;
    for (int at = quads.first; at < quads.last; at += p.room.stage_quads) {
      const int n = min(p.room.stage_quads, quads.last - at);
      tile::mbar_wait(bars + stage, phase);
      uint32_t data = ring.data + stage * p.room.stage_quads * kQuad;
      uint32_t x = x0 + (at - slice.first) * (4 * kRows * 64);
      uint32_t scales = scales0 + (at - slice.first) * (4 * kRows * 4);
      for (int i = 0; i < n; ++i) {
        sums.add(data, x, scales, lane);
        data += kQuad, x += 4 * kRows * 64, scales += 4 * kRows * 4;
      }
      __syncwarp();
      ring.ask(lane);
      if (++stage == stages) stage = 0, phase ^= 1;
    }
    sums.end();
    const int slot = group / cluster;
    const uint32_t to = base + p.room.sums_at +
                        ((slot * cluster * p.split.parts + part) * kTiles * 32 + lane) * 16;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) store_sums(to + j * 512, group % cluster, sums.v[j]);
  }
  if (cluster > 1) {
    tile::cluster_sync();
  } else {
    __syncthreads();
  }
  finish<kTiles>(p, reinterpret_cast<const float4*>(smem + p.room.sums_at), group0, groups, rank,
                 rows);
}

}  // namespace te_mx::sm90
