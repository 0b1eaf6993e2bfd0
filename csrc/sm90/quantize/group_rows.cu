// Rows of groups of 16-bit numbers, or their gated activations, quantized along them to tiles of MX
// (te_mx/sm90_layout.h): half a warp has 128 of a row, so that tiles of few rows are done soon.
// Classes, words and codes are those of the quantizer. Of one matrix with few tiles the CTAs of a
// cluster have some rows of a tile each.
#include "quantize/group_rows.h"

#include <algorithm>

#include "common/groups.cuh"
#include "common/launch.h"
#include "decode/decode_values.cuh"
#include "mxtile/sm90/cluster.cuh"
#include "quantize/tile_classes.cuh"

namespace te_mx::sm90 {
namespace {

constexpr int kThreads = 32 * kTileWarps, kRows = kThreads / 16, kTurns = 128 / kRows;
// CTAs of an SM, in all, where groups have many rows in the mean and where they have few.
constexpr int kCtas = 12, kCtasOfFew = 6, kFewRows = 64;
// Of one matrix: CTAs of a cluster, tiles an SM up to which this is faster, and CTAs an SM that run
// at once.
constexpr int kMostParts = 4, kMostTiles = 4, kCtasAtOnce = 3;

struct Params {
  DecodeInput in;
  GroupTable groups;      // without groups: one matrix
  const int32_t* gather;  // or null
  void* z;                // gated activations, compact, or null
  uint32_t x_bytes;       // from row to row of x, and of gates
  int cols, steps, row_tiles, spread;
  int part_bits;  // of the number of CTAs that share a tile, next to each other
  int64_t ld;
  Packed to;
  QuantizeTask rule;
};

// An end that a lane has read before.
struct EndOfLane {
  int count, rows, capacity, end;
  __device__ __forceinline__ int read(int) const { return end; }
};

// find_tile(), which asks for the ends of 128 groups before it looks at one.
__device__ __forceinline__ bool find_group(const GroupTable& table, int tile, GroupRows& found) {
  constexpr int kLoads = 4;
  const int lane = threadIdx.x % 32;
  if (table.count == 0) {
    found = {0, 0, table.rows};
    return true;
  }
  int before = 0;
  for (int from = 0; from < table.count; from += 32 * kLoads) {
    int ends[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int group = from + 32 * i + lane;
      ends[i] = group < table.count ? table.read(group) : 0;
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int first = from + 32 * i;
      if (first >= table.count) break;
      const EndOfLane ahead{table.count, table.rows, table.capacity, ends[i]};
      const GroupRows mine = groups_of_lanes(ahead, first, before);
      const int at = mine.first_tile();
      const uint32_t has =
          __ballot_sync(~0u, mine.group < table.count && tile >= at && tile < at + mine.tiles());
      if (has == 0) continue;
      found = from_lane(mine, __ffs(has) - 1);
      return true;
    }
  }
  return false;
}

// TileScales::range() of all CTAs that share a tile.
__device__ __forceinline__ ScaleRange range_of_parts(const TileScales& s, int parts) {
  const int lane = threadIdx.x % 32;
  uint32_t most = 0;
  if (lane < 2 * parts) {
    const float4 v = tile::ld_cluster_f32x4(tile::smem_addr(s.seen + lane % 2 * 4), lane / 2);
    most = __vmaxu2(__vmaxu2(__float_as_uint(v.x), __float_as_uint(v.y)),
                    __vmaxu2(__float_as_uint(v.z), __float_as_uint(v.w)));
  }
  return {__reduce_max_sync(~0u, most & 0xFFFF), 511 - __reduce_max_sync(~0u, most >> 16)};
}

__device__ __forceinline__ bool any_ragged(const TileScales& s, int parts) {
  const int lane = threadIdx.x % 32;
  uint32_t ragged = 0;
  if (lane < parts)
    ragged = __float_as_uint(tile::ld_cluster_f32x4(tile::smem_addr(&s.ragged), lane).x);
  return __any_sync(~0u, ragged != 0);
}

// What the quantizer makes of a tile (quantize_kernel.cuh), rows alone. A thread has 8 of K of
// kTurns rows, or of as many as its CTA has.
template <class T, bool kGated, Element kFmt>
__device__ __forceinline__ void quantize_tile(const Params& p, TileScales& s,
                                              const GroupRows& group, int step) {
  const int lane = threadIdx.x % 16, own = threadIdx.x / 16;
  const int tile = static_cast<int>(blockIdx.x) >> p.part_bits, parts = 1 << p.part_bits;
  const int most_rows = 128 >> p.part_bits;
  const int row0 = (static_cast<int>(blockIdx.x) & (parts - 1)) * most_rows;  // in the tile
  const int inside = (tile - group.first_tile()) * 128 + row0;
  const int first = group.start + inside, rows = min(most_rows, group.size() - inside);
  const int k = step * 128 + lane * 8;
  // Rows whose numbers are on their way together.
  using In = Input<T>;
  using Values = EightValues<T, kFmt, true, false, false>;
  constexpr int kAtOnce = kGated ? 2 : 4;
  if (threadIdx.x == 0) s.clear();
  Values x[kTurns];
  uint32_t high = 0, low = 0;  // as TileScales::add_range has them
  bool nan = false;
  // NOTE: lanes behind K, and rows that there are not, read what others do, which counts for
  // nothing.
  const bool exists = k < p.cols;
  const auto* const x0 = static_cast<const char*>(p.in.x) + (exists ? k : 0) * sizeof(T);
  const auto* const gate0 = static_cast<const char*>(p.in.gate) + (exists ? k : 0) * sizeof(T);
  uint16_t* const entries = &s.blocks[lane / 4][own];  // one every kRows
  const auto load = [&](const char* from, int row) {
    return __ldcg(
        reinterpret_cast<const uint4*>(from + uint64_t{static_cast<uint32_t>(row)} * p.x_bytes));
  };
#pragma unroll
  for (int from = 0; from < kTurns; from += kAtOnce) {
    if (from * kRows >= rows) {
#pragma unroll
      for (int i = from; i < from + kAtOnce; ++i) {
        x[i].v[0] = make_uint4(0, 0, 0, 0);
        if (lane % 4 == 0) entries[i * kRows] = 0;
      }
      continue;
    }
    int row[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      row[i] = first + min(own + (from + i) * kRows, rows - 1);
      if (p.gather != nullptr) row[i] = __ldcg(p.gather + row[i]);
    }
    if constexpr (kGated) {
      EightGated<Values, T> read[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        read[i].v[0] = load(x0, row[i]), read[i].gate[0] = load(gate0, row[i]);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        read[i].multiply(p.in), x[from + i] = read[i];
        if (p.z == nullptr || !exists || own + (from + i) * kRows >= rows) continue;
        T* const z = static_cast<T*>(p.z) + int64_t{row[i]} * p.cols + k;
        *reinterpret_cast<uint4*>(z) = read[i].v[0];
      }
    } else {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) x[from + i].v[0] = load(x0, row[i]);
    }
#pragma unroll
    for (int i = from; i < from + kAtOnce; i += 2) {
      auto most = In::larger_halves(x[i].own_most(), x[i + 1].own_most());
      if (!exists) most = 0;
      most = In::larger(most, In::shuffle_xor(most, 1));
      most = In::larger(most, In::shuffle_xor(most, 2));
      const BlockPair pair = block_pair<T, kFmt>(most, p.rule);
      uint32_t two = pair.entries;
      if (rows < 128) {
        if (own + i * kRows >= rows) two &= 0xFFFF0000u;
        if (own + (i + 1) * kRows >= rows) two &= 0xFFFFu;
      }
      nan |= pair.nan;
      high = __vmaxu2(high, two & (two >> 8 & 0x00010001u) * 0xFF);
      low = __vmaxu2(low, two ^ 0x00FF00FFu);
      if (lane % 4 == 0) {
        entries[i * kRows] = static_cast<uint16_t>(two);
        entries[(i + 1) * kRows] = static_cast<uint16_t>(two >> 16);
      }
    }
  }
  s.add_range(max(high & 0xFFFF, high >> 16), max(max(low & 0xFFFF, low >> 16), 255u));
  parts == 1 ? __syncthreads() : tile::cluster_sync();
  const ScaleRange all = parts == 1 ? s.range() : range_of_parts(s, parts);
  const uint32_t exponent = all.exponent(0);
  const bool alone = p.spread == kByRows;
  int cls = alone && !all.empty() ? kUndecided : TileScales::early_class(all, p.spread);
  if (cls == kUndecided) {
    if (threadIdx.x < most_rows) s.examine(all, threadIdx.x, p.spread, 0, alone);
    parts == 1 ? __syncthreads() : tile::cluster_sync();
    const bool ragged = parts == 1 ? s.ragged != 0 : any_ragged(s, parts);
    cls = alone || !ragged ? 1 : all.low == 0 ? 3 : 2;
  }
  if (parts > 1) tile::cluster_arrive();  // others' shared memory was read
  if (threadIdx.x < most_rows) {
    const bool pad = p.groups.count == 0 && tile == p.row_tiles - 1 && p.row_tiles % 2 != 0;
    write_words(s.word(exponent, cls, threadIdx.x), exponent, cls, row0 + threadIdx.x,
                tile_words(p.to.scales, step, tile, p.row_tiles), pad);
  }
  if (!exists) return;
  // Of the scale of its block, and then shifted to what it shares.
  const auto codes_of = [&](int i) {
    const uint32_t entry = entries[i * kRows], e = entry & 0xFF;
    const uint2 codes = x[i].codes_of(e);
    if (cls > 1 || (entry & kCounts) == 0) return codes;
    uint32_t words[2] = {codes.x, codes.y};
    const uint32_t shared = cls == 0 ? exponent : s.target[own + i * kRows];
    tile::CodeShift<kFmt>{static_cast<int>(shared - e)}.apply(words);
    return uint2{words[0], words[1]};
  };
  uint8_t* to = p.to.codes + int64_t{first + own} * p.ld + k;
  const int64_t next = kRows * p.ld;
  int left = rows - own;
  if (cls != 0 || p.rule.carry == 0 || nan) {
#pragma unroll
    for (int i = 0; i < kTurns; ++i, to += next, left -= kRows)
      if (left > 0) *reinterpret_cast<uint2*>(to) = codes_of(i);
    return;
  }
  // As codes_once().
#pragma unroll
  for (int i = 0; i < kTurns; ++i, to += next, left -= kRows) {
    if (left <= 0) break;
    uint2 codes = x[i].codes_of(exponent);
    const uint32_t below =
        tile::fp8x4_subnormal<kFmt>(codes.x) | tile::fp8x4_subnormal<kFmt>(codes.y);
    if ((below & 0x80808080u) != 0) codes = codes_of(i);
    *reinterpret_cast<uint2*>(to) = codes;
  }
}

template <class T, Element kFmt>
__device__ __forceinline__ void quantize_rows(const Params& p, TileScales& s,
                                              const GroupRows& group, int step) {
  if (p.in.gate == nullptr) return quantize_tile<T, false, kFmt>(p, s, group, step);
  quantize_tile<T, true, kFmt>(p, s, group, step);
}

// Grid: x = tiles of rows, or parts of them, y = of those along k, in turn.
__global__ void __launch_bounds__(kThreads, 3) group_rows_kernel(const __grid_constant__ Params p) {
  __shared__ TileScales s;
  tile::let_dependents_start();
  tile::await_predecessors();
  GroupRows group;
  if (!find_group(p.groups, static_cast<int>(blockIdx.x) >> p.part_bits, group)) return;
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
    if (p.part_bits != 0) tile::cluster_wait();
  }
}

bool whole(const void* at, int64_t ld) {
  return reinterpret_cast<uintptr_t>(at) % 16 == 0 && ld % 8 == 0;
}

// x, and what it is multiplied with, have been told; groups: null for one matrix.
Status run(Params& p, const QuantizeTask& q, const Groups* groups) {
  if (q.x_dtype == DType::f32 || is_f32_rule(q.rule) || !is_fp8(q.element) ||
      q.row_packed.codes == nullptr || q.row_codes != nullptr || q.col_packed.codes != nullptr ||
      q.col_codes != nullptr || q.col_sum != nullptr || q.cols % 8 != 0 ||
      !whole(p.in.x, p.in.ld) || p.in.ld >= int64_t{1} << 31 ||
      (p.in.gate != nullptr && p.in.gate_ld != p.in.ld) || q.spread < 0 ||
      q.spread > (q.element == Element::e4m3 ? kByRows : kMaxSpread))
    return Status::unsupported;
  const int64_t steps = (q.cols + kTile - 1) / kTile, sms = current_device().sms;
  int64_t tiles = (q.rows + kTile - 1) / kTile;
  if (groups == nullptr) {
    const int64_t all = tiles * steps;
    if (all == 0 || all > kMostTiles * sms || q.cols % 16 != 0 || q.rows > INT32_MAX - kTile ||
        reinterpret_cast<uintptr_t>(q.row_packed.codes) % 16 != 0)
      return Status::unsupported;
    p.groups.rows = static_cast<int>(q.rows);
    while (1 << p.part_bits < kMostParts && (all << (p.part_bits + 1)) <= kCtasAtOnce * sms)
      ++p.part_bits;
  } else {
    tiles = group_tiles(groups->rows, groups->count), p.groups = group_table(*groups);
  }
  set_rule(p.in, q.rule, 0.0f);
  p.x_bytes = static_cast<uint32_t>(2 * p.in.ld);
  p.cols = static_cast<int>(q.cols), p.steps = static_cast<int>(steps);
  p.row_tiles = static_cast<int>(tiles);
  p.spread = q.spread, p.ld = packed_ld(q.cols), p.to = q.row_packed;
  p.rule = q, p.rule.carry = scale_carry(q.element, q.rule) * 0x10001u;
  p.in.dtype = q.x_dtype;
  // NOTE: finding a tile's group takes as long as one of its steps.
  int64_t turns = steps;
  if (groups != nullptr) {
    const int ctas = groups->rows > kFewRows * groups->count ? kCtas : kCtasOfFew;
    turns = std::max<int64_t>(1, ctas * sms / tiles);
  }
  const dim3 grid(static_cast<unsigned>(tiles << p.part_bits),
                  static_cast<unsigned>(std::min<int64_t>({steps, turns, 65535})));
  Launch at{grid, dim3(kThreads), q.stream};
  if (p.part_bits != 0) at.cluster = 1 << p.part_bits;
  return launch_early(group_rows_kernel, at, p);
}

// Where a matrix [rows, cols] lies, and its gate behind it.
bool tell_gated(Params& p, const ActArgs& a, const QuantizeTask& q) {
  const auto* const gate = static_cast<const uint16_t*>(a.h.data) + q.cols;
  p.in.x = a.h.data, p.in.ld = a.h.row_stride, p.in.e5m2 = q.element == Element::e5m2, p.z = a.out;
  return a.gated && !a.in_pairs && rounds_plainly(a.to) && a.grad.data == nullptr &&
         whole(a.out, 0) && a.h.col_stride == 1 && whole(gate, a.h.row_stride) &&
         set_gate(p.in, gate, a.h.row_stride, a.act);
}

}  // namespace

Status quantize_group_rows(const QuantizeTask& q, const Groups& groups, const int32_t* gather) {
  Params p{};
  p.in.x = q.x, p.in.ld = q.x_stride, p.in.e5m2 = q.element == Element::e5m2, p.gather = gather;
  return run(p, q, &groups);
}

Status activate_group_rows(const ActArgs& a, const QuantizeTask& q, const Groups* groups) {
  Params p{};
  return tell_gated(p, a, q) ? run(p, q, groups) : Status::unsupported;
}

}  // namespace te_mx::sm90
