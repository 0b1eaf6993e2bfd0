// Few rows of 16-bit numbers, along them alone, to tiles of MXFP8 (te_mx/sm90_layout.h): a cluster
// has a tile and a thread eight numbers of a row at a time, so that a product of such rows waits
// for little more than their way through memory. Classes, words and codes are the quantizer's.
#include "quantize/few_rows.h"

#include "common/launch.h"
#include "decode/decode_values.cuh"
#include "mxtile/sm90/cluster.cuh"
#include "quantize/tile_classes.cuh"

namespace te_mx::sm90 {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kRows = kThreads / 16;
constexpr Element kFmt = Element::e4m3;
// Tiles up to which eight CTAs share each, else four; and of more the quantizer is as fast.
constexpr int64_t kShared = 112, kMost = 448;

struct Params {
  DecodeInput in;
  int rows, cols, row_tiles, spread;
  int64_t ld;
  Packed to;
};

// What every warp of a cluster says of a tile: its range, and whether a row of it is ragged.
template <int kCtas>
struct Said {
  uint64_t there[2];
  alignas(16) uint32_t words[2][kWarps * kCtas];

  // The largest halves of all, once they are there: so nobody leaves while others send to it. The
  // whole CTA calls it.
  __device__ __forceinline__ uint2 largest(int which, uint32_t own) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (threadIdx.x == 0) tile::mbar_arrive_expect(&there[which], sizeof(words[which]));
    if (lane < kCtas)
      tile::send(&words[which][static_cast<int>(tile::cluster_rank()) * kWarps + warp], own,
                 &there[which], lane);
    tile::mbar_wait_sent(&there[which], 0);
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < kWarps * kCtas; i += 32) most = __vmaxu2(most, words[which][i + lane]);
    return {__reduce_max_sync(~0u, most & 0xFFFF), __reduce_max_sync(~0u, most >> 16)};
  }
};

template <class T, int kCtas>
__device__ __forceinline__ void quantize_tile(const Params& p, Said<kCtas>& said) {
  constexpr int kTurns = 128 / kCtas / kRows;  // rows of a thread
  const int lane = threadIdx.x % 16, rank = static_cast<int>(tile::cluster_rank());
  const int number = static_cast<int>(tile::cluster_index());
  const int step = number / p.row_tiles, rt = number - step * p.row_tiles;
  const int r0 = rank * (128 / kCtas) + static_cast<int>(threadIdx.x) / 16;
  const int rows = p.rows - rt * 128, k = step * 128 + lane * 8;
  EightValues<T, kFmt, true, false, false> x[kTurns];
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const int r = r0 + i * kRows;
    x[i].load(p.in, rt * 128 + r, k, r < rows ? p.cols - k : 0);
  }
  uint2 codes[kTurns];
  uint32_t entries[kTurns], shared[kTurns];
  ScaleRange range;
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    uint32_t& e = entries[i];
    e = scale_byte(p.in, x[i].most());
    codes[i] = x[i].codes_of(e);
    uint32_t any = (codes[i].x | codes[i].y) & 0x7F7F7F7Fu;
    any |= __shfl_xor_sync(~0u, any, 1);
    any |= __shfl_xor_sync(~0u, any, 2);
    if (any != 0 && e != 255) e |= kCounts;
    range.add(e);
  }
  const uint32_t high = __reduce_max_sync(~0u, range.high);
  const uint32_t low_key = __reduce_max_sync(~0u, 511 - range.low);
  const uint2 most = said.largest(0, high | low_key << 16);
  const ScaleRange all{most.x, 511 - most.y};
  const uint32_t exponent = all.exponent(0);
#pragma unroll
  for (int i = 0; i < kTurns; ++i) shared[i] = exponent;
  int cls = TileScales::early_class(all, p.spread);
  if (cls == kUndecided) {
    bool ragged = false;
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      ScaleRange row;
      row.add(entries[i]);
#pragma unroll
      for (int lanes = 4; lanes < 16; lanes *= 2) {
        row.high = max(row.high, __shfl_xor_sync(~0u, row.high, lanes));
        row.low = min(row.low, __shfl_xor_sync(~0u, row.low, lanes));
      }
      if (row.empty()) continue;
      shared[i] = row.high;
      ragged |= row.high - row.low > static_cast<uint32_t>(p.spread);
    }
    const bool any = said.largest(1, __any_sync(~0u, ragged)).x != 0;
    cls = !any ? 1 : all.low == 0 ? 3 : 2;
  }
  uint32_t* const words = tile_words(p.to.scales, step, rt, p.row_tiles);
  const bool pads = rt == p.row_tiles - 1 && (p.row_tiles & 1) != 0;
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const int r = r0 + i * kRows;
    const uint32_t e = entries[i] & 0xFF;
    const bool counts = (entries[i] & kCounts) != 0;
    uint32_t word = shared[i] == 0 ? 0x00400000u : shared[i] << 23;
    if (cls < 2) {
      uint32_t two[2] = {codes[i].x, codes[i].y};
      if (counts) tile::CodeShift<kFmt>{static_cast<int>(shared[i] - e)}.apply(two);
      codes[i] = {two[0], two[1]};
    } else {
      word = 0;
#pragma unroll
      for (int b = 0; b < 4; ++b)
        word |= __shfl_sync(~0u, counts || e == 255 ? e : 0, 4 * b, 16) << (8 * b);
    }
    if (r < rows && k < p.cols)
      *reinterpret_cast<uint2*>(p.to.codes + (int64_t{rt} * 128 + r) * p.ld + k) = codes[i];
    if (lane == 0) words[r] = word;
    if (lane == 0 && pads) words[kScaleWords + r] = 127u << 23;
  }
  if (rank == 0 && threadIdx.x < 4) {
    const uint32_t last = threadIdx.x == 0 ? cls : threadIdx.x == 1 ? exponent : 0;
    words[kTile + threadIdx.x] = last;
    if (pads) words[kScaleWords + kTile + threadIdx.x] = threadIdx.x == 1 ? 127 : 0;
  }
}

// Clusters: tiles of rows, then the next step of k.
template <int kCtas>
__global__ void __launch_bounds__(kThreads) few_rows_kernel(const __grid_constant__ Params p) {
  __shared__ Said<kCtas> said;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) tile::mbar_init(&said.there[i], 1);
    tile::mbar_init_fence();
  }
  tile::let_dependents_start();
  tile::cluster_sync();
  tile::await_predecessors();
  if (p.in.dtype == DType::f16) {
    quantize_tile<__half>(p, said);
  } else {
    quantize_tile<__nv_bfloat16>(p, said);
  }
}

}  // namespace

Status quantize_few_rows(const QuantizeTask& q) {
  const int64_t row_tiles = (q.rows + kTile - 1) / kTile, steps = (q.cols + kTile - 1) / kTile;
  if (q.x_dtype == DType::f32 || !is_power_rule(q.rule) || q.element != kFmt ||
      q.row_packed.codes == nullptr || q.col_packed.codes != nullptr || q.col_codes != nullptr ||
      q.col_sum != nullptr || q.spread > kMaxSpread || q.cols % 8 != 0 || q.x_stride % 8 != 0 ||
      reinterpret_cast<uintptr_t>(q.x) % 16 != 0 || row_tiles * steps > kMost)
    return Status::unsupported;
  Params p{};
  p.in.x = q.x, p.in.ld = q.x_stride, p.in.dtype = q.x_dtype;
  set_rule(p.in, q.rule, 0.0f);
  p.rows = static_cast<int>(q.rows), p.cols = static_cast<int>(q.cols);
  p.row_tiles = static_cast<int>(row_tiles), p.spread = q.spread;
  p.ld = packed_ld(q.cols), p.to = q.row_packed;
  const int64_t tiles = row_tiles * steps;
  const int ctas = tiles <= kShared ? 8 : 4;
  const auto kernel = ctas == 8 ? few_rows_kernel<8> : few_rows_kernel<4>;
  const dim3 grid(static_cast<unsigned>(tiles * ctas));
  return launch_early(kernel, {grid, dim3(kThreads), q.stream, 0, ctas}, p);
}

}  // namespace te_mx::sm90
