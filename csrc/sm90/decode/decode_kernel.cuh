// A few rows of x times weights that stand still: out[row, n] = sum over k of x[row, k] w[n, k].
//
// Grid: x = clusters * CTAs of a cluster, y = blocks of at most kRows rows, each of which meets one
// matrix of weights (decode_rows.cuh), or none. Row r of matrix e of several is row e * n + r of
// the tensor map of their codes, its bias lies at bias + e * n elements.
//
// The transposed product D^T[n, row] on wgmma: weights are operand A, in registers, 64 of their
// rows a warpgroup; x is operand B. First of all each warp asks for its weights, into rings of its
// own in shared memory: lane 0 for codes, one copy of 16 rows a stage, all lanes for scales.
// Meanwhile all threads make x of the slice of k, or as much of it as there is room for, pass after
// pass (decode_input.cuh), or rows were prepared, and come quad by quad. Sums of parts of k go to
// the CTA of the cluster that adds them up, in order. So the bits of a row depend on n and k, not
// on the other rows of x nor on their number.
//
// A CTA takes half of an SM at most, and of a product of few rows each SM has one: while it
// computes, that of the next product loads its weights.
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
  WeightScales w_scales;
  int n = 0, k = 0;
  int groups = 0, quads = 0;  // of all weights
  DecodeSplit split;
  int tile_shift = 0, slice_parts = 1;       // log2 of tiles, parts of a slice
  int cluster_factor = 0, width_factor = 0;  // quotient_factor() of the cluster, of quads of x
  int each_factor = 0;                       // of quads of x of a part
  Shares parts;                              // of quads
  int clusters = 0;
  Shares cluster_groups;
  DecodeRoom room;
  DecodeInput in;
  DecodeOut out;
};

// NOTE: an offset takes one register where a pointer takes two.
__device__ __forceinline__ uint64_t* bar_at(int offset, int i) {
  extern __shared__ __align__(1024) uint8_t smem[];
  return reinterpret_cast<uint64_t*>(smem + offset) + i;
}

// Has parameters in the cache before they are needed: they are new to every launch, and each line
// takes its time.
__device__ __forceinline__ void touch_parameters(const DecodeParams& p) {
  using tile::touch;
  touch(p.w_scales.row), touch(p.k), touch(p.split.warpgroups), touch(p.each_factor);
  touch(p.parts.longer), touch(p.room.bytes), touch(p.in.ld), touch(p.in.scales);
  touch(p.in.gate_ld), touch(p.in.exponent), touch(p.in.made_scales), touch(p.out.ld);
  touch(p.out.activates);
}

// What a warp multiplies: a group of rows of weights, or none, over a part of the slice of k.
template <class Math>
struct WarpPlace {
  int warp, lane, rank, part, own_tile, own_group, group;
  bool there;
  Range quads;

  __device__ __forceinline__ WarpPlace(const DecodeParams& p, int thread)
      // NOTE: a number that the compiler sees is the same in all lanes: addresses stay uniform.
      : warp(__shfl_sync(~0u, thread / 32, 0)),
        lane(thread % 32),
        rank(static_cast<int>(tile::cluster_rank())),
        part(warp / 4 >> p.tile_shift),
        own_tile(warp / 4 - (part << p.tile_shift)),
        own_group(own_tile * kDecodeTile + warp % 4),
        group(p.cluster_groups.begin(static_cast<int>(tile::cluster_index())) + own_group),
        there(group < p.cluster_groups.begin(static_cast<int>(tile::cluster_index()) + 1)),
        quads(p.parts, rank * p.slice_parts + part) {}
};

// The weights of a group on their way through a warp's rings, of codes and of scales.
template <class Math>
struct WeightRing {
  static constexpr int kQuadBytes = Math::kQuadBytes;
  static constexpr int kRowBytes = kQuadBytes / kDecodeRows;
  const CUtensorMap* map;
  int inner, outer;           // what is asked for next
  int left;                   // quads not asked for
  uint32_t first, first_bar;  // shared addresses of the first quad and of its barrier
  int place;                  // of the quad that is read
  uint32_t phase;
  ScaleRing<Math::kFactors> scales;

  // From the warp's first quad on, of which `done` were read; all that there is room for was asked
  // for.
  __device__ __forceinline__ WeightRing(const CUtensorMap& map, const DecodeParams& p,
                                        const WarpPlace<Math>& own, uint32_t base, int matrix,
                                        int done)
      : map(&map),
        scales(p.w_scales, scales_at(p, own, base), matrix, own.group,
               own.quads.first + (done + 2 * kDecodeChunk - 1) / kDecodeChunk * kDecodeChunk,
               own.lane) {
    const int stages = p.room.stages, turns = done == 0 ? 0 : done / stages;
    const int asked = done + stages;
    first = base + p.room.ring_at + own.warp * (stages * kQuadBytes);
    first_bar = base + p.room.bars_at + own.warp * (kDecodeMaxStages * 8);
    place = done - turns * stages, phase = turns & 1;
    inner = (own.quads.first + asked) * kRowBytes, outer = matrix * p.n + own.group * kDecodeRows;
    left = own.quads.last - own.quads.first - asked;
  }
  static __device__ __forceinline__ uint32_t scales_at(const DecodeParams& p,
                                                       const WarpPlace<Math>& own, uint32_t base) {
    return base + p.room.w_scales_at + own.warp * kDecodeScaleRing;
  }

  // Makes the barriers and asks for all that there is room for.
  static __device__ __forceinline__ void start(const CUtensorMap& map, const DecodeParams& p,
                                               const WarpPlace<Math>& place, uint32_t base,
                                               int matrix) {
    const int stages = p.room.stages;
    const uint32_t bar = base + p.room.bars_at + place.warp * (kDecodeMaxStages * 8);
    const uint32_t to = base + p.room.ring_at + place.warp * (stages * kQuadBytes);
    const int quads = min(place.quads.last - place.quads.first, stages);
    if (!place.there) return;
    if (place.lane == 0) {
#pragma unroll 1
      for (int i = 0; i < stages; ++i)
        tile::mbar_init(bar_at(p.room.bars_at, place.warp * kDecodeMaxStages + i), 1);
      tile::mbar_init_fence();
      const int outer = matrix * p.n + place.group * kDecodeRows;
#pragma unroll 1
      for (int i = 0; i < quads; ++i) {
        tile::mbar_arrive_expect(bar + 8 * i, kQuadBytes);
        tile::tma_load(to + i * kQuadBytes, &map, bar + 8 * i, (place.quads.first + i) * kRowBytes,
                       outer);
      }
    }
    __syncwarp();
    const int first = place.quads.first, length = place.quads.last - first;
    if (length > 0)
      ScaleRing<Math::kFactors>(p.w_scales, scales_at(p, place, base), matrix, place.group, first,
                                place.lane)
          .ask(p.w_scales, place.group, p.n, 0, length, first, place.lane);
  }
  // Before quad i of the part is read.
  __device__ __forceinline__ void take_scales(const DecodeParams& p, const WarpPlace<Math>& own,
                                              int i) {
    if (i % kDecodeChunk != 0) return;
    const int next = i + kDecodeChunk, q = own.quads.first + next, left = own.quads.last - q;
    scales.take(p.w_scales, i, own.lane);
    if (left > 0) scales.ask(p.w_scales, own.group, p.n, next, left, q, own.lane);
  }
  __device__ __forceinline__ uint32_t at() const { return first + place * kQuadBytes; }
  __device__ __forceinline__ uint32_t bar() const { return first_bar + place * 8; }
  // Before a quad is read.
  __device__ __forceinline__ void wait() const { tile::mbar_wait(bar(), phase); }
  // By the whole warp, which has read the quad.
  __device__ __forceinline__ void next(int stages) {
    if (left > 0) {
      __syncwarp();
      if (tile::elect_one()) {
        tile::mbar_arrive_expect(bar(), kQuadBytes);
        tile::tma_load(at(), map, bar(), inner, outer);
      }
      inner += kRowBytes, --left;
    }
    if (++place == stages) place = 0, phase ^= 1;
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
  __device__ __forceinline__ void next(const DecodeParams& p, int i, bool asks) {
    if (each < length) give_back(p, i, asks);
    if (++place == each) place = 0, phase ^= 1;
  }

 private:
  static constexpr int kRead = kDecodeMaxSteps * 8;  // to the barriers of what was read

  // The warp that asks does so for the place of the quad before, which the others have read by now,
  // more or less.
  __device__ __forceinline__ void give_back(const DecodeParams& p, int i, bool asks) const {
    if (i + each < length) {
      __syncwarp();
      if (tile::elect_one()) tile::mbar_arrive(bar_at(bars + kRead, place));
    }
    const bool wraps = place == 0;
    const int behind = each == 1 ? 0 : 1, other = behind == 0 ? place
                                                  : wraps     ? each - 1
                                                              : place - 1;
    if (asks && i >= behind && i - behind + each < length) {
      tile::mbar_wait(bar_at(bars + kRead, other), behind == 1 && wraps ? phase ^ 1 : phase);
      if (tile::elect_one()) ask(p, i - behind + each, other);
    }
  }
};

template <class Math>
__global__ void __launch_bounds__(Math::kThreadsAtMost, Math::kCtas)
    decode_kernel(const __grid_constant__ CUtensorMap map, const __grid_constant__ DecodeParams p,
                  const __grid_constant__ DecodeRows given) {
  extern __shared__ __align__(1024) uint8_t smem[];
  constexpr int kRows = Math::kRows, kWarps = Math::kWarps;
  const int cluster = p.split.cluster, parts = p.slice_parts;
  // NOTE: new to every launch, and first in the way of weights.
  if (threadIdx.x == 0) tile::tma_prefetch(&map);
  DecodeRows rows = given;

  if (!rows.early()) tile::await_predecessors();
  if (!rows.begin(static_cast<int>(blockIdx.y))) return;
  // NOTE: read again at the end, takes no registers until then.
  const auto own_groups = [&] {
    return Range(p.cluster_groups, static_cast<int>(tile::cluster_index()));
  };
  if (rows.group < 0) {
    const Range own = own_groups();
    if (tile::cluster_rank() == 0)
      clear<32 * kWarps>(p.out, rows, own.first * kDecodeRows, min(p.n, own.last * kDecodeRows));
    return;
  }

  const uint32_t base = tile::smem_addr(smem);
  uint64_t* const bars = reinterpret_cast<uint64_t*>(smem + p.room.bars_at);
  uint64_t* const sums_bar = bars + decode_bars(kWarps) - 1;
  // NOTE: until the end it takes no registers.
  DecodeBlock* const block = reinterpret_cast<DecodeBlock*>(bars + decode_bars(kWarps));
  {
    const WarpPlace<Math> place(p, threadIdx.x);
    WeightRing<Math>::start(map, p, place, base, rows.group);
    if (threadIdx.x == 0) *block = rows;
    if (Math::kPrepared && threadIdx.x == 0) {
      uint64_t* const steps = bars + kWarps * kDecodeMaxStages;
#pragma unroll 1
      for (int i = 0; i < kDecodeMaxSteps; ++i) {
        tile::mbar_init(steps + i, 1);
        tile::mbar_init(steps + kDecodeMaxSteps + i, kDecodeTile * p.split.tiles);
      }
      tile::mbar_init_fence();
    }
    if (cluster > 1) {
      if (threadIdx.x == 0) {
        tile::mbar_init(sums_bar, 1);
        tile::mbar_init_fence();
        tile::mbar_arrive_expect(sums_bar, SumsPlace{p, place.rank}.bytes(kRows));
      }
      __syncwarp();
      tile::cluster_arrive_relaxed();  // whoever has waited for it may send
    }
  }
  tile::let_dependents_start();
  touch_parameters(p);

  const int each = p.room.input_quads;
  DecodeSums<Math> sums;
  // Quads `first` to `last` of the warp's part, a chunk of scales at a time. each_quad(i, add)
  // calls add(x, its scales), shared addresses.
  const auto add_quads = [&](const WarpPlace<Math>& own, WeightRing<Math>& ring, int first,
                             int last, const auto& each_quad) {
#pragma unroll 1
    for (int i = first; i < last;) {
      if (own.there) ring.take_scales(p, own, i);
      const int stop = min(last, (i / kDecodeChunk + 1) * kDecodeChunk);
      uint32_t w_scales = ring.scales.place(i) + own.lane / 4 * 8;
#pragma unroll 1
      for (; i < stop; ++i, w_scales += kDecodeRows * 4) {
        each_quad(i, [&](uint32_t x, uint32_t x_scales) {
          // NOTE: warps without a group multiply whatever lies there, for nobody.
          if (own.there) ring.wait();
          sums.add(ring.at() + QuadCodes::offset(own.lane), tile::load_shared8(w_scales),
                   tile::wgmma_desc_at(x), x_scales, [&] {
                     if (own.there) ring.next(p.room.stages);
                   });
        });
      }
    }
  };
  if constexpr (Math::kPrepared) {
    const WarpPlace<Math> own(p, threadIdx.x);
    WeightRing<Math> ring(map, p, own, base, rows.group, 0);
    const uint32_t x_at = base + own.part * each * Math::kInputBytes;
    const uint32_t scales_at =
        base + p.room.scales_at + own.part * each * decode_scale_bytes(kRows);
    __syncthreads();  // barriers are there
    if (rows.early()) tile::await_predecessors();
    const int length = own.quads.last - own.quads.first;
    InputRing<Math> x{x_at,
                      scales_at,
                      p.room.bars_at + (kWarps * kDecodeMaxStages + own.part * each) * 8,
                      own.quads.first,
                      length,
                      each};
    const bool asks = own.own_group == 0;
    if (asks && own.lane == 0) {
#pragma unroll 1
      for (int i = 0; i < each; ++i) x.ask(p, i, i);
    }
    const uint32_t own_scales = scales_at + scale_offset<kRows>(own.lane % 4, 0);
    add_quads(own, ring, 0, length, [&](int i, const auto& add) {
      x.wait();
      add(x_at + x.place * Math::kInputBytes, own_scales + x.place * decode_scale_bytes(kRows));
      x.next(p, i, asks);
    });
  } else {
    const int part0 = static_cast<int>(tile::cluster_rank()) * parts;
    const Range longest(p.parts, part0);
    const bool early = rows.early();
    // NOTE: the passes of the first part, the longest, are those of the CTA.
    for (int done = 0; done < longest.last - longest.first; done += each) {
      if (done > 0) __syncthreads();
      const InputRoom room{smem,           smem + p.room.scales_at,
                           each,           each * parts,
                           p.width_factor, p.each_factor,
                           part0,          p.parts,
                           done,           p.k,
                           kRows};
      if constexpr (Math::kPlain) {
        fill_plain<kRows, Math::kFactors, 4, 2 * kWarps>(p.in, room, rows, [&] {
          if (early) tile::await_predecessors();
        });
      } else {
        if (early && done == 0) tile::await_predecessors();
        fill_pass<kRows, Math::kHalves, Math::kFactors, 4, 2 * kWarps>(p.in, room, rows);
      }
      tile::fence_async_proxy();
      __syncthreads();
      // NOTE: worked out again where there are no registers for all that while x is made.
      const int thread = Math::kPlain ? threadIdx.x : tile::opaque(threadIdx.x);
      const WarpPlace<Math> own(p, thread);
      WeightRing<Math> ring(map, p, own, base, block->group, done);
      uint32_t own_x = base + own.part * each * Math::kInputBytes;
      uint32_t own_scales = base + p.room.scales_at + own.part * each * decode_scale_bytes(kRows) +
                            scale_offset<kRows>(own.lane % 4, 0);
      const int last = min(each, own.quads.last - own.quads.first - done);
      add_quads(own, ring, done, done + last, [&](int, const auto& add) {
        add(own_x, own_scales);
        own_x += Math::kInputBytes, own_scales += decode_scale_bytes(kRows);
      });
    }
  }

  const WarpPlace<Math> own(p, Math::kPlain ? threadIdx.x : tile::opaque(threadIdx.x));
  sums.end(own.quads.first, own.there ? own.quads.last : 0, block->count, own.lane, [&](int q) {
    const WeightScales& s = p.w_scales;
    const int low = min(own.group * kDecodeRows + own.lane / 4, p.n - 1),
              high = min(low + 8, p.n - 1);
    if (s.kind == ScaleKind::words) return uint2{0, 0};
    return uint2{s.odd_word(s.at(block->group, q, low), q),
                 s.odd_word(s.at(block->group, q, high), q)};
  });
  const SumsPlace sums_place{p, own.rank};
  float4* const all_sums = reinterpret_cast<float4*>(smem + p.room.sums_at);
  if (cluster > 1) tile::cluster_wait();
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
    const int fragment = (own.own_tile * (kRows / 8) + j) * kDecodeTile + own.warp % 4;
    send_sums(
        all_sums + sums_place.of(fragment, own.rank * parts + own.part) + own.lane, sums.v + 4 * j,
        cluster, [&] { return sums_bar; }, [&] { return sums_place.owner(fragment); });
  }
  const Range cluster_groups = own_groups();
  const int group0 = cluster_groups.first, groups = cluster_groups.last - group0;
  if (cluster > 1) {
    tile::mbar_wait_sent(sums_bar, 0);
  } else {
    __syncthreads();
  }
  if constexpr (kRows <= kFinishRows) {
    finish_few<32 * kWarps>(p, sums_place, all_sums, group0, groups, *block);
  } else {
    finish_wide<kRows, kWarps>(p, sums_place, all_sums, group0, groups, *block);
  }
}

}  // namespace te_mx::sm90
