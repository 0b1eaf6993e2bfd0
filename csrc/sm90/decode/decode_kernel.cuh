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
//     static constexpr bool kWeighted;
//     float weight(int i) const;      // if kWeighted: what its fp32 sums, with the bias, are
//                                     // multiplied by
//   };
//
// A few registers, copied from a kernel parameter; it may read global memory in all functions but,
// if kEarly, begin() and expert(). An example: decode_dense.cu. For experts: fill DecodeParams in
// (cut_decode of decode_launch.cuh, for matrices [n, k] of one expert; its `sms` may say that many
// blocks share the GPU), and call launch_decode<kFmt, kTiles, kSteps>(p, rows, blocks, stream).
// Expert e's weights lie at w + e * w_stride bytes, its bias at bias + e * n elements.
//
// A warp has two groups of 16 rows of weights and a part of k, whose blocks it adds up in order:
// the sum of a block by two mma.sync in fp16, exact as the contract wants it (c = 1), times the
// weights' scale, times that of x. First of all its lane 0 asks for the weights, into a ring of the
// warp's own in shared memory, one bulk copy a stage. Meanwhile the warps make the slice of x
// (decode_input.cuh); or it was prepared, and one more warp asks for it step by step (kSteps).
// Sums of parts go to the CTA of the cluster that adds them up, in order. So the bits of a row
// depend on n and k, not on the other rows of x nor on their number.
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
  int cluster_bits = 0;                  // 2^cluster_bits CTAs in a cluster
  int part_quads = 0, longer_parts = 0;  // quads of a part; parts that have one more
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

// The quads of part `part` of k, or of several from there on: [first, last). The first parts have
// one more where they do not come out even.
struct QuadRange {
  int first, last;
  __device__ __forceinline__ QuadRange(const DecodeParams& p, int part, int parts = 1)
      : first(begin(p, part)), last(begin(p, part + parts)) {}
  static __device__ __forceinline__ int begin(const DecodeParams& p, int part) {
    return part * p.part_quads + min(part, p.longer_parts);
  }
};

// The weights of two groups on their way through a warp's ring. A stage has `size` quads of the
// first group, then those of the second, which may be missing.
template <Element kFmt>
struct WeightRing {
  static constexpr int kQuad = decode_quad_bytes(kFmt);
  const uint8_t* from;  // what is asked for next
  int64_t apart;        // bytes between the groups, 0: there is one
  uint32_t data, bars;  // shared addresses
  int left;             // quads not asked for
  int size;

  __device__ __forceinline__ uint32_t place(int stage) const {
    return data + stage * size * (2 * kQuad);
  }
  __device__ __forceinline__ void ask(int stage, int lane) {
    if (left <= 0) return;
    const int bytes = min(size, left) * kQuad;
    if (lane == 0) {
      const uint32_t bar = bars + 8 * stage, to = place(stage);
      tile::mbar_arrive_expect(bar, apart == 0 ? bytes : 2 * bytes);
      tile::bulk_load(to, from, bytes, bar);
      if (apart != 0) tile::bulk_load(to + size * kQuad, from + apart, bytes, bar);
    }
    from += bytes, left -= size;
  }
};

// Sums of a warp, of a lane: rows g and g + 8 of two groups of weights, rows 8j + 2t and 8j + 2t +
// 1 of x.
template <Element kFmt, int kTiles>
struct WarpSums {
  float v[2][kTiles][4] = {};
  uint32_t nan[2][2] = {};

  // A quad of both groups at `at` and `apart` behind, x of it at `x`.
  __device__ __forceinline__ void add(uint32_t at, uint32_t apart, uint32_t x, int lane) {
    using Block = WeightBlock<kFmt>;
    const uint32_t scales = x + 256 * 8 * kTiles + lane % 4 * 8;
    x += lane * 16;
    WeightScales<kFmt> ws[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) ws[h].load(at + h * apart + 4 * Block::kBytes, lane, nan[h]);
    // NOTE: all four blocks at once would not fit in the registers.
#pragma unroll(kTiles == 4 ? 1 : kTiles == 2 ? 2 : 4)
    for (int b = 0; b < 4; ++b) {
      Block w[2];
      float low[2], high[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        w[h].load(at + h * apart + b * Block::kBytes, lane);
        low[h] = ws[h].of(ws[h].low, b), high[h] = ws[h].of(ws[h].high, b);
      }
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        const uint4 xs = tile::load_shared16(x + (b * kTiles + j) * 512);
        const uint2 sx = tile::load_shared8(scales + (b * kTiles + j) * 32);
        const float sx0 = __uint_as_float(sx.x), sx1 = __uint_as_float(sx.y);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float (&to)[4] = v[h][j];
          float d[4] = {};
          tile::mma_f16(d, w[h].first, xs.x, xs.y);
          tile::mma_f16(d, w[h].second, xs.z, xs.w);
          to[0] = fmaf(d[0] * low[h], sx0, to[0]), to[1] = fmaf(d[1] * low[h], sx1, to[1]);
          to[2] = fmaf(d[2] * high[h], sx0, to[2]), to[3] = fmaf(d[3] * high[h], sx1, to[3]);
        }
      }
    }
  }

  __device__ __forceinline__ void end() {
    const float none = __uint_as_float(0x7FC00000u);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        if (nan[h][0]) v[h][j][0] = v[h][j][1] = none;
        if (nan[h][1]) v[h][j][2] = v[h][j][3] = none;
      }
    }
  }
};

__device__ __forceinline__ void add(float4& to, const float4& v) {
  to.x += v.x, to.y += v.y, to.z += v.z, to.w += v.w;
}

// Adds the parts of this CTA's groups up and writes them out.
template <int kTiles, class Rows>
__device__ __forceinline__ void finish(const DecodeParams& p, const float4* sums, int group0,
                                       int groups, int rank, const Rows& rows) {
  const int cluster = p.split.cluster, parts = cluster * p.split.parts, count = rows.count();
  const int64_t bias0 = int64_t{rows.expert()} * p.n;
  const int mine = (groups - rank + cluster - 1) >> p.cluster_bits;
  for (int i = threadIdx.x; i < mine * kTiles * 32; i += blockDim.x) {
    const int slot = i / (kTiles * 32), place = i % (kTiles * 32), lane = place % 32;
    const int col = place / 32 * 8 + lane % 4 * 2;  // of the block's rows of x
    if (col >= count) continue;
    const float4* from = sums + slot * parts * kTiles * 32 + place;
    float4 s = from[0];  // of what one CTA has, then all of these
    for (int part = 1; part < p.split.parts; ++part) add(s, from[part * kTiles * 32]);
    for (int cta = 1; cta < cluster; ++cta) {
      const float4* const next = from + cta * p.split.parts * kTiles * 32;
      float4 t = next[0];
      for (int part = 1; part < p.split.parts; ++part) add(t, next[part * kTiles * 32]);
      add(s, t);
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

// x in steps: quad i of every part is in stage i % stages, asked for by a warp of its own.
struct InputSteps {
  uint32_t data, bars;       // shared addresses: `full` of every stage, then `empty`
  int stages, parts, bytes;  // of a quad

  // Asks for all steps of the CTA's slice; by one thread.
  __device__ __forceinline__ void ask(const DecodeParams& p, int part0) const {
    const uint8_t* const from = p.in.made + int64_t{blockIdx.y} * p.quads * bytes;
    int stage = 0;
    uint32_t phase = 1;
    for (int i = 0;; ++i) {
      int quads = 0;
      for (int j = 0; j < parts; ++j) {
        const QuadRange part(p, part0 + j);
        quads += part.first + i < part.last;
      }
      if (quads == 0) return;
      tile::mbar_wait_asleep(bars + 8 * (stages + stage), phase);
      tile::mbar_arrive_expect(bars + 8 * stage, quads * bytes);
      for (int j = 0; j < parts; ++j) {
        const QuadRange part(p, part0 + j);
        if (part.first + i >= part.last) continue;
        tile::bulk_load(data + (stage * parts + j) * bytes, from + int64_t{part.first + i} * bytes,
                        bytes, bars + 8 * stage);
      }
      if (++stage == stages) stage = 0, phase ^= 1;
    }
  }
};

// kSteps: x was prepared and comes in steps.
template <Element kFmt, int kTiles, bool kSteps, class Rows>
__global__ void __launch_bounds__(kDecodeThreads, 1)
    decode_kernel(const __grid_constant__ DecodeParams p, const __grid_constant__ Rows given) {
  extern __shared__ __align__(1024) uint8_t smem[];
  constexpr int kQuad = decode_quad_bytes(kFmt), kRows = 8 * kTiles;
  constexpr int kInput = decode_input_bytes(kRows);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int cluster = p.split.cluster, parts = p.split.parts;
  const int rank = static_cast<int>(blockIdx.x) & (cluster - 1), part0 = rank * parts;
  const int group0 = (static_cast<int>(blockIdx.x) >> p.cluster_bits) * p.split.groups;
  const int groups = min(p.split.groups, p.groups - group0);
  const int warps = p.split.warps();  // that multiply, if they have a group
  const int group = warp / parts * 2, part = warp % parts;
  const bool busy = group < groups && warp < warps;
  Rows rows = given;

  if constexpr (!Rows::kEarly) tile::await_predecessors();
  if (!rows.begin(blockIdx.y)) {
    if constexpr (Rows::kEarly) tile::await_predecessors();
    return;
  }

  const uint32_t base = tile::smem_addr(smem);
  uint64_t* const all_bars = reinterpret_cast<uint64_t*>(smem + p.room.bars_at);
  uint64_t* const bars = all_bars + warp * kDecodeMaxStages;
  uint64_t* const steps_bars = all_bars + warps * kDecodeMaxStages;
  uint64_t* const sums_bar = steps_bars + 2 * kDecodeMaxStages;
  const int stages = p.room.stages;
  const QuadRange quads(p, part0 + part);
  WeightRing<kFmt> ring{
      p.w + rows.expert() * p.w_stride + (int64_t{group0 + group} * p.quads + quads.first) * kQuad,
      group + 1 < groups ? int64_t{p.quads} * kQuad : 0,
      base + warp * stages * p.room.stage_quads * (2 * kQuad),
      tile::smem_addr(bars),
      quads.last - quads.first,
      p.room.stage_quads};
  if (busy) {
    if (lane < stages) tile::mbar_init(bars + lane, 1);
    tile::mbar_init_fence();
    __syncwarp();
    for (int i = 0; i < stages; ++i) ring.ask(i, lane);
  }
  const InputSteps steps{base + p.room.x_at, tile::smem_addr(steps_bars), p.room.input_stages,
                         parts, kInput};
  if constexpr (kSteps) {
    if (threadIdx.x < p.room.input_stages) {
      tile::mbar_init(steps_bars + threadIdx.x, 1);
      tile::mbar_init(steps_bars + p.room.input_stages + threadIdx.x, (groups + 1) / 2 * parts);
    }
    tile::mbar_init_fence();
  }
  if (cluster > 1) {
    if (threadIdx.x == 0) {
      const int mine = (groups - rank + cluster - 1) >> p.cluster_bits;
      tile::mbar_init(sums_bar, 1);
      tile::mbar_init_fence();
      tile::mbar_arrive_expect(sums_bar, mine * cluster * parts * kTiles * 512);
    }
    __syncwarp();
    tile::cluster_arrive_relaxed();  // whoever has waited for it may send
  }
  tile::let_dependents_start();
  if constexpr (Rows::kEarly) tile::await_predecessors();
  const QuadRange slice(p, part0, parts);
  if constexpr (!kSteps) {
    const InputRoom room{smem + p.room.x_at, kRows, int64_t{slice.first} * kDecodeQuad,
                         (slice.last - slice.first) * kDecodeQuad, p.k};
    fill_slice<8>(p.in, room, rows.count(), [&](int i) { return rows.in_row(i); });
  }
  __syncthreads();

  WarpSums<kFmt, kTiles> sums;
  if (busy) {
    uint32_t x = base + p.room.x_at + (kSteps ? part : quads.first - slice.first) * kInput;
    const uint32_t apart = p.room.stage_quads * kQuad;
    int stage = 0, step = 0;
    uint32_t phase = 0, step_phase = 0;
    for (int at = quads.first; at < quads.last; at += p.room.stage_quads) {
      const int n = min(p.room.stage_quads, quads.last - at);
      tile::mbar_wait(bars + stage, phase);
      uint32_t data = ring.place(stage);
      for (int i = 0; i < n; ++i, data += kQuad) {
        if constexpr (kSteps) {
          tile::mbar_wait(steps_bars + step, step_phase);
          sums.add(data, apart, x + step * parts * kInput, lane);
          __syncwarp();
          if (lane == 0) tile::mbar_arrive(steps_bars + p.room.input_stages + step);
          if (++step == p.room.input_stages) step = 0, step_phase ^= 1;
        } else {
          sums.add(data, apart, x, lane);
          x += kInput;
        }
      }
      __syncwarp();
      ring.ask(stage, lane);
      if (++stage == stages) stage = 0, phase ^= 1;
    }
    sums.end();
  } else if (kSteps && threadIdx.x == 32 * warps) {
    steps.ask(p, part0);
  }
  __syncwarp();
  if (cluster > 1) tile::cluster_wait();
  if constexpr (kSteps) {  // sums lie where the rings were
    if (cluster > 1) {
      tile::cluster_sync();
    } else {
      __syncthreads();
    }
  }
  float4* const all_sums = reinterpret_cast<float4*>(smem + p.room.sums_at);
  if (busy) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int one = group + h;
      if (one >= groups) break;
      const int place = (one >> p.cluster_bits) * cluster * parts + part0 + part;
      float4* const to = all_sums + place * kTiles * 32 + lane;
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        const float (&v)[4] = sums.v[h][j];
        if (cluster == 1) {
          to[j * 32] = {v[0], v[1], v[2], v[3]};
        } else {
          tile::send(to + j * 32,
                     uint4{__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                           __float_as_uint(v[3])},
                     sums_bar, one & (cluster - 1));
        }
      }
    }
  }
  if (cluster > 1) {
    tile::mbar_wait_sent(sums_bar, 0);
  } else {
    __syncthreads();
  }
  finish<kTiles>(p, all_sums, group0, groups, rank, rows);
}

}  // namespace te_mx::sm90
