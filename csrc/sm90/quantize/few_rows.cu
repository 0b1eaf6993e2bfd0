// Rows of 16-bit numbers, along them alone, to tiles of MXFP8 (te_mx/sm90_layout.h): a thread has
// eight numbers of a row at a time, so that a product of such rows waits for little more than their
// way through memory. A cluster has a tile where there are few, else a CTA. Classes, words and
// codes are the quantizer's.
#include "quantize/few_rows.h"

#include "common/launch.h"
#include "decode/decode_values.cuh"
#include "mxtile/sm90/cluster.cuh"
#include "quantize/tile_classes.cuh"

namespace te_mx::sm90 {
namespace {

constexpr Element kFmt = Element::e4m3;
// Tiles up to which CTAs of a cluster share each, and beyond which the quantizer is as fast: in
// graphs of layers with weights that stand still, by the time of the layer (NVIDIA H200).
constexpr int64_t kShared = 176, kMost = 4096;

struct Params {
  DecodeInput in;
  int rows, cols, row_tiles, spread;
  int group_bits;  // 2^group_bits row tiles are walked together
  int64_t ld;
  Packed to;
};

// The tile of a CTA, of which a tile has kCtas; rows as in find_tile() of the quantizer, below 0
// where there is none.
template <int kCtas>
struct Place {
  int rt, step;
  __device__ __forceinline__ explicit Place(const Params& p) {
    const int number = static_cast<int>(blockIdx.x) / kCtas;
    const int before =
        (static_cast<int>(blockIdx.y) << p.group_bits) + (number & ((1 << p.group_bits) - 1));
    rt = p.row_tiles - 1 - before, step = number >> p.group_bits;
  }
};

// What every warp of a tile says of it: its range, and whether a row of it is ragged.
template <int kCtas, int kThreads>
struct Said {
  static constexpr int kWarps = kThreads / 32, kAll = kWarps * kCtas;
  uint64_t there[2];  // of a cluster
  alignas(16) uint32_t words[2][kAll];

  // The largest halves of all, once they are there: so nobody leaves while others send to it. The
  // whole CTA calls it.
  __device__ __forceinline__ uint2 largest(int which, uint32_t own) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if constexpr (kCtas == 1) {
      if (lane == 0) words[which][warp] = own;
      __syncthreads();
    } else {
      if (threadIdx.x == 0) tile::mbar_arrive_expect(&there[which], sizeof(words[which]));
      if (lane < kCtas)
        tile::send(&words[which][static_cast<int>(tile::cluster_rank()) * kWarps + warp], own,
                   &there[which], lane);
      tile::mbar_wait_sent(&there[which], 0);
    }
    uint32_t most = words[which][lane % kAll];
#pragma unroll
    for (int i = 32; i < kAll; i += 32) most = __vmaxu2(most, words[which][i + lane]);
    return {__reduce_max_sync(~0u, most & 0xFFFF), __reduce_max_sync(~0u, most >> 16)};
  }
};

// The range of a row's blocks, an entry of which each lane has.
__device__ __forceinline__ ScaleRange range_of_row(uint32_t entry) {
  ScaleRange row;
  row.add(entry);
#pragma unroll
  for (int lanes = 4; lanes < 16; lanes *= 2) {
    row.high = max(row.high, __shfl_xor_sync(~0u, row.high, lanes));
    row.low = min(row.low, __shfl_xor_sync(~0u, row.low, lanes));
  }
  return row;
}

__device__ __forceinline__ uint32_t shared_word(uint32_t e) {
  return e == 0 ? 0x00400000u : e << 23;
}

template <class T, int kCtas, int kThreads>
__device__ __forceinline__ void quantize_tile(const Params& p, const Place<kCtas>& at,
                                              Said<kCtas, kThreads>& said) {
  constexpr int kRows = kThreads / 16, kMine = 128 / kCtas;  // at a time, and of the CTA
  constexpr int kTurns = kMine / kRows;                      // rows of a thread
  const int lane = threadIdx.x % 16, rank = kCtas == 1 ? 0 : static_cast<int>(tile::cluster_rank());
  const auto [rt, step] = at;
  const int r0 = rank * kMine + static_cast<int>(threadIdx.x) / 16;
  const int rows = p.rows - rt * 128, k = step * 128 + lane * 8;
  tile::await_predecessors();
  EightValues<T, kFmt, true, false, false> x[kTurns];
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    x[i].load(p.in, rt * 128 + r0 + i * kRows, k, r0 + i * kRows < rows ? p.cols - k : 0);
  }
  uint2 codes[kTurns];
  uint32_t entries[kTurns];
  ScaleRange range;
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const uint32_t amax = x[i].most();
    uint32_t& e = entries[i];
    e = scale_byte(p.in, amax);
    codes[i] = x[i].codes_of(e);
    // NOTE: only zeros of 16 bits have codes that are all zero.
    if (amax != 0 && e != 255) e |= kCounts;
    range.add(e);
  }
  const uint32_t high = __reduce_max_sync(~0u, range.high);
  const uint32_t low_key = __reduce_max_sync(~0u, 511 - range.low);
  const uint2 most = said.largest(0, high | low_key << 16);
  const ScaleRange all{most.x, 511 - most.y};
  const uint32_t exponent = all.exponent(0);
  // Behind the last number of a row up to whole 16 bytes are zeros, as they come.
  const auto store = [&](int i, uint2 made) {
    const int r = r0 + i * kRows;
    if (r < rows && k < static_cast<int>(p.ld))
      *reinterpret_cast<uint2*>(p.to.codes + (int64_t{rt} * 128 + r) * p.ld + k) = made;
  };
  const auto shifted = [&](int i, uint32_t shared) -> uint2 {
    uint32_t two[2] = {codes[i].x, codes[i].y};
    if ((entries[i] & kCounts) != 0)
      tile::CodeShift<kFmt>{static_cast<int>(shared - (entries[i] & 0xFF))}.apply(two);
    return {two[0], two[1]};
  };
  uint32_t* const words = tile_words(p.to.scales, step, rt, p.row_tiles);
  const bool pads = rt == p.row_tiles - 1 && (p.row_tiles & 1) != 0;
  // A thread has words of four rows, one of the last CTA those behind them.
  const auto tell = [&](int cls) {
    const bool ends = threadIdx.x == kMine / 4;
    if (threadIdx.x > kMine / 4 || (ends && rank != kCtas - 1)) return;
    uint4* const to = reinterpret_cast<uint4*>(words) + rank * (kMine / 4) + threadIdx.x;
    if (ends || cls == 0) {
      const uint32_t word = shared_word(exponent);
      *to = ends ? make_uint4(cls, exponent, 0, 0) : make_uint4(word, word, word, word);
    }
    if (pads) {  // the tile behind it
      constexpr uint32_t kNone = 127u << 23;
      to[kScaleWords / 4] =
          ends ? make_uint4(0, 127, 0, 0) : make_uint4(kNone, kNone, kNone, kNone);
    }
  };
  int cls = TileScales::early_class(all, p.spread);
  if (cls == 0) {
    tell(0);
#pragma unroll
    for (int i = 0; i < kTurns; ++i) store(i, shifted(i, exponent));
    return;
  }
  if (cls == kUndecided) {
    bool ragged = false;
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const ScaleRange row = range_of_row(entries[i]);
      ragged |= !row.empty() && row.high - row.low > static_cast<uint32_t>(p.spread);
    }
    const bool any = said.largest(1, __any_sync(~0u, ragged)).x != 0;
    cls = !any ? 1 : all.low == 0 ? 3 : 2;
  }
  tell(cls);
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const ScaleRange row = range_of_row(entries[i]);
    const uint32_t shared = row.empty() ? exponent : row.high, e = entries[i] & 0xFF;
    uint32_t word = shared_word(shared);
    if (cls >= 2) {
      const uint32_t told = (entries[i] & kCounts) != 0 || e == 255 ? e : 0;
      word = 0;
#pragma unroll
      for (int b = 0; b < 4; ++b) word |= __shfl_sync(~0u, told, 4 * b, 16) << (8 * b);
    }
    if (lane == 0) words[r0 + i * kRows] = word;
    store(i, cls == 1 ? shifted(i, shared) : codes[i]);
  }
}

// kAtOnce: CTAs of an SM.
template <int kCtas, int kThreads, int kAtOnce>
__global__ void __launch_bounds__(kThreads, kAtOnce)
    few_rows_kernel(const __grid_constant__ Params p) {
  __shared__ Said<kCtas, kThreads> said;
  if constexpr (kCtas > 1) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < 2; ++i) tile::mbar_init(&said.there[i], 1);
      tile::mbar_init_fence();
    }
  }
  tile::let_dependents_start();
  if constexpr (kCtas > 1) tile::cluster_sync();
  using tile::touch;
  touch(p.in.x), touch(p.in.carry), touch(p.rows), touch(p.ld), touch(p.to.codes);
  const Place<kCtas> at(p);
  if (at.rt < 0) return;
  if (p.in.dtype == DType::f16) {
    quantize_tile<__half>(p, at, said);
  } else {
    quantize_tile<__nv_bfloat16>(p, at, said);
  }
}

}  // namespace

Status quantize_few_rows(const QuantizeTask& q) {
  const int64_t row_tiles = (q.rows + kTile - 1) / kTile, steps = (q.cols + kTile - 1) / kTile;
  const int64_t tiles = row_tiles * steps;
  if (q.x_dtype == DType::f32 || !is_power_rule(q.rule) || q.spread > kMaxSpread ||
      q.element != kFmt || q.row_packed.codes == nullptr || q.col_packed.codes != nullptr ||
      q.col_codes != nullptr || q.col_sum != nullptr || q.cols % 8 != 0 || q.x_stride % 8 != 0 ||
      reinterpret_cast<uintptr_t>(q.x) % 16 != 0 || tiles > kMost)
    return Status::unsupported;
  Params p{};
  p.in.x = q.x, p.in.ld = q.x_stride, p.in.dtype = q.x_dtype;
  set_rule(p.in, q.rule, 0.0f);
  p.rows = static_cast<int>(q.rows), p.cols = static_cast<int>(q.cols);
  p.row_tiles = static_cast<int>(row_tiles), p.spread = q.spread;
  p.ld = packed_ld(q.cols), p.to = q.row_packed;
  while (p.group_bits < 3 && (1 << p.group_bits) < row_tiles) ++p.group_bits;
  const auto grid = [&](int ctas) {
    return dim3(static_cast<unsigned>((steps * ctas) << p.group_bits),
                static_cast<unsigned>(((row_tiles - 1) >> p.group_bits) + 1));
  };
  if (tiles > kShared)
    return launch_early(few_rows_kernel<1, 512, 3>, {grid(1), dim3(512), q.stream}, p);
  return launch_early(few_rows_kernel<4, 256, 4>, {grid(4), dim3(256), q.stream, 0, 4}, p);
}

}  // namespace te_mx::sm90
