// Rows of groups of 16-bit numbers, or their gated activations, quantized along them to tiles of MX
// (te_mx/sm90_layout.h): half a warp has 128 of a row, so that tiles of few rows are done soon.
// Classes, words and codes are those of the quantizer.
#include "quantize/group_rows.h"

#include <algorithm>

#include "common/groups.cuh"
#include "common/launch.h"
#include "decode/decode_values.cuh"
#include "quantize/tile_classes.cuh"

namespace te_mx::sm90 {
namespace {

constexpr int kThreads = 32 * kTileWarps, kRows = kThreads / 16, kTurns = 128 / kRows;
constexpr int kAtOnce = 4;     // rows whose numbers are on their way together
constexpr int kCtas = 6;       // of an SM, in all
constexpr int kMostRows = 64;  // of a group, in the mean: the quantizer is as fast for more of them

struct Params {
  DecodeInput in;
  GroupTable groups;
  const int32_t* gather;  // or null
  int cols, steps, row_tiles, spread;
  int64_t ld;
  Packed to;
};

template <class Eight, Element kFmt>
__device__ __forceinline__ void quantize_tile(const Params& p, TileScales& s,
                                              const GroupRows& group, int step) {
  const int lane = threadIdx.x % 16, own = threadIdx.x / 16;
  const int tile = static_cast<int>(blockIdx.x), inside = (tile - group.first_tile()) * 128;
  const int first = group.start + inside, rows = min(128, group.size() - inside);
  const int k = step * 128 + lane * 8;
  if (threadIdx.x == 0) s.clear();
  uint32_t codes[kTurns][2], entries[kTurns];
  ScaleRange range;
#pragma unroll
  for (int from = 0; from < kTurns; from += kAtOnce) {
    if (from * kRows >= rows) {
#pragma unroll
      for (int i = from; i < from + kAtOnce; ++i) entries[i] = codes[i][0] = codes[i][1] = 0;
      continue;
    }
    Eight x[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int r = own + (from + i) * kRows;
      int64_t row = first + min(r, rows - 1);
      if (p.gather != nullptr) row = __ldcg(p.gather + row);
      x[i].load(p.in, row, k, r < rows ? p.cols - k : 0);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const EightMade made = x[i].made(p.in);
      uint32_t any = (made.words.x | made.words.y) & 0x7F7F7F7Fu;
      any |= __shfl_xor_sync(~0u, any, 1);
      any |= __shfl_xor_sync(~0u, any, 2);
      // NOTE: of the first lane of a block: others may lie behind k.
      uint32_t e = __shfl_sync(~0u, __float_as_uint(made.scale) >> 23, threadIdx.x & 28);
      if (any != 0 && e != 255) e |= kCounts;
      range.add(e);
      entries[from + i] = e, codes[from + i][0] = made.words.x, codes[from + i][1] = made.words.y;
    }
  }
  if (lane % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kTurns; ++i)
      s.blocks[lane / 4][own + i * kRows] = static_cast<uint16_t>(entries[i]);
  }
  s.add_range(range);
  __syncthreads();
  const ScaleRange all = s.range();
  const uint32_t exponent = all.exponent(0);
  const bool alone = p.spread == kByRows;
  int cls = alone && !all.empty() ? kUndecided : TileScales::early_class(all, p.spread);
  if (cls == kUndecided) {
    if (threadIdx.x < 128) s.examine(all, threadIdx.x, p.spread, 0, alone);
    __syncthreads();
    cls = alone ? 1 : s.late_class(all);
  }
  if (threadIdx.x < 128)
    write_words(s, exponent, cls, threadIdx.x, tile_words(p.to.scales, step, tile, p.row_tiles),
                false);  // the words of groups need no padding
  uint8_t* to = p.to.codes + int64_t{first + own} * p.ld + k;
#pragma unroll
  for (int i = 0; i < kTurns; ++i, to += kRows * p.ld) {
    const int r = own + i * kRows;
    if (r >= rows || k >= p.cols) continue;
    if (cls < 2 && (entries[i] & kCounts) != 0) {
      const uint32_t shared = cls == 0 ? exponent : s.target[r];
      tile::CodeShift<kFmt>{static_cast<int>(shared - (entries[i] & 0xFF))}.apply(codes[i]);
    }
    *reinterpret_cast<uint2*>(to) = {codes[i][0], codes[i][1]};
  }
}

template <class T, Element kFmt>
__device__ __forceinline__ void quantize_rows(const Params& p, TileScales& s,
                                              const GroupRows& group, int step) {
  using Values = EightValues<T, kFmt, true, false, false>;
  if (p.in.gate == nullptr) return quantize_tile<Values, kFmt>(p, s, group, step);
  quantize_tile<EightGated<Values, T>, kFmt>(p, s, group, step);
}

// Grid: x = tiles of rows, y = of those along k, in turn.
__global__ void __launch_bounds__(kThreads, 3) group_rows_kernel(const __grid_constant__ Params p) {
  __shared__ TileScales s;
  tile::let_dependents_start();
  tile::await_predecessors();
  GroupRows group;
  if (!find_tile(p.groups, static_cast<int>(blockIdx.x), group)) return;
#pragma unroll 1
  for (int step = static_cast<int>(blockIdx.y); step < p.steps; step += gridDim.y) {
    if (p.in.dtype == DType::f16) {
      if (p.in.e5m2) {
        quantize_rows<__half, Element::e5m2>(p, s, group, step);
      } else {
        quantize_rows<__half, Element::e4m3>(p, s, group, step);
      }
    } else if (p.in.e5m2) {
      quantize_rows<__nv_bfloat16, Element::e5m2>(p, s, group, step);
    } else {
      quantize_rows<__nv_bfloat16, Element::e4m3>(p, s, group, step);
    }
    __syncthreads();
  }
}

bool whole(const void* at, int64_t ld) {
  return reinterpret_cast<uintptr_t>(at) % 16 == 0 && ld % 8 == 0;
}

// x, and what it is multiplied with, have been told.
Status run(Params& p, const QuantizeTask& q, const Groups& groups) {
  if (q.x_dtype == DType::f32 || is_f32_rule(q.rule) || !is_fp8(q.element) ||
      q.row_packed.codes == nullptr || q.col_packed.codes != nullptr || q.col_codes != nullptr ||
      q.col_sum != nullptr || q.cols % 8 != 0 || !whole(p.in.x, p.in.ld) ||
      groups.rows > kMostRows * groups.count)
    return Status::unsupported;
  set_rule(p.in, q.rule, 0.0f);
  p.groups = group_table(groups);
  p.cols = static_cast<int>(q.cols), p.steps = static_cast<int>((q.cols + kTile - 1) / kTile);
  p.row_tiles = static_cast<int>(group_tiles(groups.rows, groups.count));
  p.spread = q.spread, p.ld = packed_ld(q.cols), p.to = q.row_packed;
  p.in.dtype = q.x_dtype;
  // NOTE: finding a tile's group takes as long as one of its steps.
  const int64_t turns = std::max<int64_t>(1, kCtas * current_device().sms / p.row_tiles);
  const dim3 grid(static_cast<unsigned>(p.row_tiles),
                  static_cast<unsigned>(std::min<int64_t>(p.steps, turns)));
  return launch_early(group_rows_kernel, {grid, dim3(kThreads), q.stream}, p);
}

}  // namespace

Status quantize_group_rows(const QuantizeTask& q, const Groups& groups, const int32_t* gather) {
  Params p{};
  p.in.x = q.x, p.in.ld = q.x_stride, p.in.e5m2 = q.element == Element::e5m2, p.gather = gather;
  return run(p, q, groups);
}

Status activate_group_rows(const ActArgs& a, const QuantizeTask& q, const Groups& groups) {
  const auto* const gate = static_cast<const uint16_t*>(a.h.data) + q.cols;
  Params p{};
  p.in.x = a.h.data, p.in.ld = a.h.row_stride, p.in.e5m2 = q.element == Element::e5m2;
  if (!a.gated || a.in_pairs || !rounds_plainly(a.to) || a.grad.data != nullptr ||
      a.out != nullptr || a.h.col_stride != 1 || !whole(gate, a.h.row_stride) ||
      !set_gate(p.in, gate, a.h.row_stride, a.act))
    return Status::unsupported;
  return run(p, q, groups);
}

}  // namespace te_mx::sm90
