// A few rows of x times weights that stand still: out[row, n] = sum over k of x[row, k] w[n, k].
//
// Grid: x = clusters * CTAs of a cluster, y = blocks of at most kRows rows, each of which meets one
// matrix of weights (decode_rows.cuh), or none. Matrix e of several lies at w + e * w_stride bytes,
// its bias at bias + e * n elements.
//
// The transposed product D^T[n, row] on wgmma: weights are operand A, in registers, 64 of their
// rows a warpgroup; x is operand B. First of all lane 0 of each warp asks for its weights, into a
// ring of the warp's own in shared memory, one bulk copy a stage. Meanwhile all threads make x of
// the slice of k, or as much of it as there is room for, pass after pass (decode_input.cuh); more
// than kDecodeOwnRows rows were prepared, and come quad by quad. Sums of parts of k go to the CTA
// of the cluster that adds them up, in order. So the bits of a row depend on n and k, not on the
// other rows of x nor on their number.
//
// A CTA takes half of an SM at most: while the last ones of a product end, those of the next one
// already load their weights.
#pragma once

#include "decode/decode_input.cuh"
#include "decode/decode_out.cuh"
#include "decode/decode_rows.cuh"
#include "decode/decode_sums.cuh"
#include "mxtile/sm90/cluster.cuh"
#include "mxtile/sm90/tma.cuh"
#include "te_mx/sm90_decode.h"

namespace te_mx::sm90 {

struct DecodeParams {
  const uint8_t* w = nullptr;
  int64_t w_stride = 0;  // bytes between the weights of two groups of rows
  int n = 0, k = 0;
  int groups = 0, quads = 0;  // of all weights
  DecodeSplit split;
  int cluster_factor = 0, width_factor = 0;  // quotient_factor() of the cluster, of quads of x
  int part_quads = 0, longer_parts = 0;      // quads of a part; parts that have one more
  DecodeRoom room;
  DecodeInput in;
  DecodeOut out;
};

// The quads of part `part` of k: [first, last). The first parts have one more where they do not
// come out even.
struct QuadRange {
  int first, last;
  __device__ __forceinline__ QuadRange(const DecodeParams& p, int part)
      : first(begin(p, part)), last(begin(p, part + 1)) {}
  static __device__ __forceinline__ int begin(const DecodeParams& p, int part) {
    return part * p.part_quads + min(part, p.longer_parts);
  }
};

// NOTE: an offset takes one register where a pointer takes two.
__device__ __forceinline__ uint64_t* bar_at(int offset, int i) {
  extern __shared__ __align__(1024) uint8_t smem[];
  return reinterpret_cast<uint64_t*>(smem + offset) + i;
}

// The weights of a group on their way through a warp's ring.
template <int kQuadBytes>
struct WeightRing {
  const uint8_t* from;  // what is asked for next
  int left;             // quads not asked for
  // Shared addresses: of the first quad and of its barrier, where the ring ends.
  uint32_t first, first_bar, end;
  uint32_t at, bar;  // what is read
  uint32_t phase = 0;

  __device__ __forceinline__ WeightRing(const uint8_t* from, int left, uint32_t first,
                                        uint32_t first_bar, int stages)
      : from(from),
        left(left),
        first(first),
        first_bar(first_bar),
        end(first + stages * kQuadBytes),
        at(first),
        bar(first_bar) {}

  // Asks for all that there is room for.
  __device__ __forceinline__ void begin() {
    do {
      ask();
      step();
    } while (at != first);
    phase = 0;
  }
  // Before a quad is read.
  __device__ __forceinline__ void wait() const { tile::mbar_wait(bar, phase); }
  // By the whole warp, which has read the quad.
  __device__ __forceinline__ void next() {
    if (left > 0) __syncwarp();
    ask();
    step();
  }

 private:
  __device__ __forceinline__ void ask() {
    if (left <= 0) return;
    if (tile::elect_one()) {
      tile::mbar_arrive_expect(bar, kQuadBytes);
      tile::bulk_load(at, from, kQuadBytes, bar);
    }
    from += kQuadBytes, --left;
  }
  __device__ __forceinline__ void step() {
    at += kQuadBytes, bar += 8;
    if (at == end) at = first, bar = first_bar, phase ^= 1;
  }
};

// Prepared x of a part, quad after quad, in a ring that all warps of the part read.
template <class Math>
struct InputRing {
  uint32_t data, scales;  // shared addresses
  int bars;               // where they lie in dynamic shared memory: of quads that are there, then
                          // of those that were read
  int first, length;      // quads
  int each;               // places
  int place = 0;          // that is read
  uint32_t phase = 0;

  // Asks for quad i, by one thread.
  __device__ __forceinline__ void ask(const DecodeParams& p, int i, int to) const {
    constexpr int kScales = decode_scale_bytes(Math::kRows);
    if (i >= length) return;
    const uint32_t bar = tile::smem_addr(bar_at(bars, to));
    const int64_t quad = int64_t{blockIdx.y} * p.quads + first + i;
    tile::mbar_arrive_expect(bar, Math::kInputBytes + kScales);
    tile::bulk_load(data + to * Math::kInputBytes, p.in.made + quad * Math::kInputBytes,
                    Math::kInputBytes, bar);
    tile::bulk_load(scales + to * kScales, p.in.made_scales + quad * kScales, kScales, bar);
  }
  __device__ __forceinline__ void wait() const { tile::mbar_wait(bar_at(bars, place), phase); }
  // By a warp that has read quad i.
  __device__ __forceinline__ void next(const DecodeParams& p, int i, bool asks, int lane) {
    if (each < length) give_back(p, i, asks, lane);
    if (++place == each) place = 0, phase ^= 1;
  }

 private:
  // The warp that asks does so for the place of the quad before, which the others have read by now,
  // more or less.
  __device__ __forceinline__ void give_back(const DecodeParams& p, int i, bool asks,
                                            int lane) const {
    if (i + each < length) {
      __syncwarp();
      if (lane == 0) tile::mbar_arrive(bar_at(bars + kDecodeMaxSteps * 8, place));
    }
    const bool wraps = place == 0;
    const int behind = each == 1 ? 0 : 1, other = behind == 0 ? place
                                                  : wraps     ? each - 1
                                                              : place - 1;
    if (asks && i >= behind && i - behind + each < length) {
      tile::mbar_wait(bar_at(bars + kDecodeMaxSteps * 8, other),
                      behind == 1 && wraps ? phase ^ 1 : phase);
      if (lane == 0) ask(p, i - behind + each, other);
    }
  }
};

template <class Math>
__global__ void __launch_bounds__(kDecodeThreads, Math::kCtas)
    decode_kernel(const __grid_constant__ DecodeParams p,
                  const __grid_constant__ DecodeRows given) {
  extern __shared__ __align__(1024) uint8_t smem[];
  constexpr int kQuad = Math::kQuadBytes, kRows = Math::kRows;
  constexpr int kTileRows = kDecodeTile * kDecodeRows;
  // NOTE: a number that the compiler sees is the same in all lanes: addresses stay uniform. The
  // kernels in fp16 spill then.
  const int own_warp = static_cast<int>(threadIdx.x) / 32;
  const int warp = Math::kHalves ? own_warp : __shfl_sync(~0u, own_warp, 0);
  const int lane = threadIdx.x % 32;
  const int cluster = p.split.cluster, parts = p.split.parts();
  const int rank = static_cast<int>(blockIdx.x) % cluster;
  const int tile0 = static_cast<int>(blockIdx.x) / cluster * p.split.tiles;
  const int own_tile = parts == 1 ? warp / 4 : 0, part = parts == 1 ? 0 : warp / 4;
  const int group = (tile0 + own_tile) * kDecodeTile + warp % 4;
  const bool there = group < p.groups;
  DecodeRows rows = given;

  if (!rows.early()) tile::await_predecessors();
  if (!rows.begin(static_cast<int>(blockIdx.y))) return;
  if (rows.group < 0) {
    if (rank == 0)
      clear(p.out, rows, tile0 * kTileRows, min(p.n, (tile0 + p.split.tiles) * kTileRows));
    return;
  }

  const uint32_t base = tile::smem_addr(smem);
  uint64_t* const bars = reinterpret_cast<uint64_t*>(smem + p.room.bars_at);
  uint64_t* const sums_bar = bars + kDecodeBars - 1;
  // NOTE: until the end it takes no registers.
  DecodeBlock* const block = reinterpret_cast<DecodeBlock*>(bars + kDecodeBars);
  if (threadIdx.x == 0) *block = rows;
  const QuadRange quads(p, rank * parts + part);
  WeightRing<kQuad> ring(
      p.w + rows.group * p.w_stride + (int64_t{group} * p.quads + quads.first) * kQuad,
      there ? quads.last - quads.first : 0, base + p.room.ring_at + warp * p.room.stages * kQuad,
      base + p.room.bars_at + warp * kDecodeMaxStages * 8, p.room.stages);
  if (lane == 0) {
    for (int i = 0; i < p.room.stages; ++i) tile::mbar_init(bars + warp * kDecodeMaxStages + i, 1);
    tile::mbar_init_fence();
  }
  __syncwarp();
  ring.begin();
  if (kRows > kDecodeOwnRows && threadIdx.x == 0) {
    uint64_t* const steps = bars + kDecodeWarps * kDecodeMaxStages;
    for (int i = 0; i < 2 * kDecodeMaxSteps; ++i) {
      const int step = i / kDecodeMaxSteps * 2 * kDecodeMaxSteps + i % kDecodeMaxSteps;
      tile::mbar_init(steps + step, 1);
      tile::mbar_init(steps + kDecodeMaxSteps + step, kDecodeWarps / parts);
    }
    tile::mbar_init_fence();
  }
  const SumsPlace sums_place{p, rank};
  if (cluster > 1) {
    if (threadIdx.x == 0) {
      tile::mbar_init(sums_bar, 1);
      tile::mbar_init_fence();
      tile::mbar_arrive_expect(sums_bar, sums_place.bytes(kRows));
    }
    __syncwarp();
    tile::cluster_arrive_relaxed();  // whoever has waited for it may send
  }
  tile::let_dependents_start();

  const int each = p.room.input_quads, length = quads.last - quads.first;
  const uint32_t own_x = base + part * each * Math::kInputBytes;
  const uint32_t own_scales = base + p.room.scales_at + part * each * decode_scale_bytes(kRows) +
                              scale_offset<kRows>(lane % 4, 0);
  // NOTE: what can be worked out before x is there is; divisions took long behind it.
  float4* const all_sums = reinterpret_cast<float4*>(smem + p.room.sums_at);
  const int fragment0 = own_tile * (kRows / 8) * kDecodeTile + warp % 4;
  const int own_part = rank * parts + part;

  DecodeSums<Math> sums;
  // The next quad of the warp's part times that of x in `place`.
  const auto add_quad = [&](int place) {
    // NOTE: warps without a group multiply whatever lies there, for nobody.
    if (there) ring.wait();
    sums.add(ring.at, tile::wgmma_desc_at(own_x + place * Math::kInputBytes),
             own_scales + place * decode_scale_bytes(kRows), lane, [&] {
               if (there) ring.next();
             });
  };
  if constexpr (kRows > kDecodeOwnRows) {
    __syncthreads();  // barriers are there
    if (rows.early()) tile::await_predecessors();
    InputRing<Math> x{
        own_x,
        base + p.room.scales_at + part * each * decode_scale_bytes(kRows),
        p.room.bars_at + (kDecodeWarps * kDecodeMaxStages + 2 * part * kDecodeMaxSteps) * 8,
        quads.first,
        length,
        each};
    const bool asks = parts == 1 ? warp == 0 : warp % 4 == 0;
    if (asks && lane == 0) {
      for (int i = 0; i < each; ++i) x.ask(p, i, i);
    }
#pragma unroll 1
    for (int i = 0; i < length; ++i) {
      x.wait();
      add_quad(x.place);
      x.next(p, i, asks, lane);
    }
  } else {
    const QuadRange first(p, rank * parts), second(p, rank * parts + parts - 1);
    InputRoom room{smem,
                   smem + p.room.scales_at,
                   each,
                   each * parts,
                   p.width_factor,
                   0,
                   {first.first, second.first},
                   {first.last, second.last},
                   p.k};
    if (rows.early()) tile::await_predecessors();
    // NOTE: the first part is the longest. Its passes are those of the CTA.
    for (; room.pass_first < first.last - first.first; room.pass_first += each) {
      if (room.pass_first > 0) __syncthreads();
      fill_pass<kRows, Math::kHalves, Math::kFactors, 4>(p.in, room, rows);
      tile::fence_async_proxy();
      __syncthreads();
      const int last = min(each, length - room.pass_first);
#pragma unroll 1
      for (int i = 0; i < last; ++i) add_quad(i);
    }
  }
  sums.end();

  if (cluster > 1) tile::cluster_wait();
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
    const int fragment = fragment0 + j * kDecodeTile;
    float4* const to = all_sums + sums_place.of(fragment, own_part) + lane;
    const float* const v = sums.v + 4 * j;
    if (cluster == 1) {
      *to = {v[0], v[1], v[2], v[3]};
    } else {
      tile::send(to,
                 uint4{__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                       __float_as_uint(v[3])},
                 sums_bar, sums_place.owner(fragment));
    }
  }
  Residual residual;
  if constexpr (kRows <= kFinishRows) {
    // NOTE: that of a warp's first fragment is asked for before the sums come.
    const int slot = static_cast<int>(threadIdx.x) / 32;
    residual.load(p, FragmentPlace::of<kRows>(sums_place, slot, tile0), *block);
  }
  if (cluster > 1) {
    tile::mbar_wait_sent(sums_bar, 0);
  } else {
    __syncthreads();
  }
  if constexpr (kRows <= kFinishRows) {
    finish<kRows>(p, sums_place, all_sums, tile0, *block, residual);
  } else {
    finish_wide<kRows>(p, sums_place, all_sums, tile0, *block);
  }
}

}  // namespace te_mx::sm90
