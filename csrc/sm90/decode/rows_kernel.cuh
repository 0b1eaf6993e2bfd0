// Rows of x times weights that stand still in tiles (sm90_layout.h), of MXFP8 or in blocks of
// 128 x 128 with fp32 scales, with the bits that a row has among any others in gemm_kernel.cuh: x
// of MXFP8 is aligned for 128 of k of a row by itself, and sums of 128 products (32 where a tile of
// weights is spread) times both scales are added up in fp32 from the first k to the last.
//
// So k is one piece, and CTAs are many because each has 64 rows of weights, operand A of wgmma; x
// is operand B. Grid: x = weights / 64, y = blocks of rows of x; of groups of rows, with a weight
// each, those of decode_rows.cuh.
//
// One warp asks for quads of 128 k, first of all those of weights, before it waits for the kernel
// that wrote x; scales of weights are asked for by all others. Two warpgroups take turns: each
// multiplies some quads at once, and when it has got the sums of all quads before adds them up one
// after the other and passes the sums on.
#pragma once

#include "common/stages.cuh"
#include "decode/aligned_rows.cuh"
#include "decode/decode_out.cuh"
#include "decode/decode_weights.cuh"
#include "gemm/gemm_factors.cuh"
#include "gemm/gemm_gelu.cuh"
#include "mxtile/sm90/copy_async.cuh"
#include "mxtile/sm90/tma.cuh"
#include "mxtile/sm90/wgmma_shared.cuh"

namespace te_mx::sm90 {

inline constexpr int kWideRows = 128;                     // of weights in a tile
inline constexpr int kWideWords = 4 * (kWideRows + 4);    // bytes of the scales of a tile
inline constexpr int kRowsMath = 128, kRowsWeights = 64;  // threads of a warpgroup, rows of a CTA
inline constexpr int kRowsOthers = 2 * kRowsMath, kRowsThreads = kRowsOthers + 32;
inline constexpr int kRowsMostStages = 24;
// Barriers of quads that are there: quad q has barrier q % kRowsBars, however few stages there are.
// NOTE: a wait by parity tells phases apart that are next to each other, so who waits has to know
// that the one before is over. Of a stage it may not be: quads arrive in any order, and the other
// warpgroup may still wait for the one before in the stage. Of quads two turns ago it is.
inline constexpr int kRowsBars = 32;

struct RowsParams {
  AlignedInput x;
  const uint8_t* words = nullptr;            // scales of tiles
  int64_t words_quad = 0, words_matrix = 0;  // bytes from a quad, or a matrix, to the next
  int n = 0, stages = 0;
  DecodeOut out;
};

// Where things lie in shared memory: stages of x and of weights, and of all quads scales of both,
// and classes.
struct RowsRoom {
  int x_at, w_at, x_scales_at, words_at, classes_at, sums_at, bars_at, bytes;
};

// kX: rows of x of a block.
template <int kX_>
struct RowsMath {
  static constexpr int kX = kX_, kFloats = kX / 2;
  static constexpr int kAhead = kX <= 16 ? 4 : 2;  // quads that a warpgroup multiplies at once
  static constexpr int kCodes = kX * kDecodeQuad, kScales = kX * 4;  // of a quad of x
  static constexpr int kWeights = kRowsWeights * kDecodeQuad, kWords = kRowsWeights * 4;
};

template <class Math>
__host__ __device__ constexpr RowsRoom rows_room(int stages, int quads) {
  RowsRoom r{};
  r.w_at = stages * Math::kCodes;
  r.x_scales_at = r.w_at + stages * Math::kWeights;
  r.words_at = r.x_scales_at + quads * Math::kScales;
  r.classes_at = r.words_at + quads * Math::kWords;
  r.sums_at = (r.classes_at + quads * 4 + 15) / 16 * 16;
  r.bars_at = r.sums_at + kRowsMath * Math::kFloats * 4;
  r.bytes = r.bars_at + (kRowsBars + kRowsMostStages + 1) * 8;
  return r;
}

// Rows of x and the weights that a CTA has.
template <class Params>
struct RowsBlock {
  const Params& p;
  DecodeRows block;
  int n0;  // the first row of its weights

  // By whole warps, before anything else; false: there is nothing to do.
  __device__ __forceinline__ bool take_rows() {
    const bool grouped = !block.early();
    if (grouped) tile::await_predecessors();
    if (!block.begin(static_cast<int>(blockIdx.y))) return false;
    if (grouped && block.group < 0) {
      clear<kRowsThreads>(p.out, block, n0, min(p.n, n0 + kRowsWeights));
      return false;
    }
    return true;
  }
  // Words of the tile of the CTA's weights in a quad, with that of the class behind; or its factor.
  __device__ __forceinline__ const uint8_t* tile_words(int quad) const {
    return p.words + block.group * p.words_matrix + quad * p.words_quad +
           n0 / kWideRows * (p.x.factors ? 4 : kWideWords);
  }
};

// What a CTA has to do, and where.
template <class Math>
struct RowsPlace : RowsBlock<RowsParams> {
  int length;  // quads
  RowsRoom room;
  uint8_t* smem;
  uint32_t base, full, empty;  // shared addresses; barriers: quads are there, stages were read
  uint64_t* bars;

  __device__ __forceinline__ RowsPlace(const RowsParams& p, uint8_t* smem)
      : RowsBlock<RowsParams>{p, DecodeRows(p.x.rows_of),
                              static_cast<int>(blockIdx.x) * kRowsWeights},
        length(p.x.quads),
        smem(smem) {
    room = rows_room<Math>(p.stages, length);
    base = tile::smem_addr(smem), full = base + room.bars_at, empty = full + 8 * kRowsBars;
    bars = reinterpret_cast<uint64_t*>(smem + room.bars_at);
  }
  __device__ __forceinline__ uint32_t x(int i) const { return base + i * Math::kCodes; }
  __device__ __forceinline__ uint32_t w(int s) const {
    return base + room.w_at + s * Math::kWeights;
  }
  __device__ __forceinline__ uint64_t* scales_bar() const {
    return bars + kRowsBars + kRowsMostStages;
  }
  // Shared address.
  __device__ __forceinline__ uint32_t full_bar(int quad) const {
    return full + quad % static_cast<uint32_t>(kRowsBars) * 8;
  }
  // By one warp.
  __device__ __forceinline__ void start(int lane) const {
    static_assert(kRowsBars == 32 && kRowsBars >= kRowsMostStages && kRowsBars >= 2 * Math::kAhead);
    tile::mbar_init(bars + lane, 1);
    if (lane < p.stages) tile::mbar_init(bars + kRowsBars + lane, kRowsMath / 32);
    if (lane == 0) tile::mbar_init(scales_bar(), 1);
    tile::mbar_init_fence();
  }
};

// One lane of the warp that asks for what the others multiply.
template <class Math>
struct RowsProducer {
  const RowsPlace<Math>& at;
  const CUtensorMap* map;

  __device__ __forceinline__ void ask_weights(int quad, int s) const {
    const uint32_t bar = at.full_bar(quad);
    tile::mbar_arrive_expect(bar, Math::kWeights + Math::kCodes);
    tile::tma_load(at.w(s), map, bar, quad * kDecodeQuad, at.block.group * at.p.n + at.n0);
  }
  __device__ __forceinline__ void ask_x(int quad, int s) const {
    tile::bulk_load(at.x(s), at.p.x.at(blockIdx.y, 0, quad), Math::kCodes, at.full_bar(quad));
  }
  __device__ __forceinline__ void ask_scales() const {
    const int bytes = at.length * Math::kScales;
    tile::mbar_arrive_expect(at.scales_bar(), bytes);
    tile::bulk_load(at.base + at.room.x_scales_at, at.p.x.scales_at(blockIdx.y, 0, 0), bytes,
                    tile::smem_addr(at.scales_bar()));
  }
  __device__ __forceinline__ void ask_all() const {
    ask_stages(
        at.p.stages, at.length, at.empty, [&](int i, int s) { ask_weights(i, s); },
        [&] {
          tile::await_predecessors();
          ask_scales();
        },
        [&](int i, int s) { ask_x(i, s); });
  }
};

// Two sums side by side, from column n of a row of out on. NOTE: GELU of a pair as in the GEMM.
__device__ __forceinline__ void write_two(const DecodeOut& out, int64_t row, int n, int64_t bias0,
                                          bool both, float a, float b) {
  if (out.bias != nullptr) {
    a += load_number(out.bias, bias0 + n, out.bias_dtype);
    if (both) b += load_number(out.bias, bias0 + n + 1, out.bias_dtype);
  }
  if (out.activates) {
    const float2 y =
        out.act == Act::gelu ? gelu_forward<Gelu::tanh>({a, b}) : gelu_forward<Gelu::erf>({a, b});
    a = y.x, b = y.y;
  }
  const int64_t i = row * out.ld + n;
  char* const to = static_cast<char*>(out.out) + 2 * i;
  if (both && out.dtype != DType::f32 && reinterpret_cast<uintptr_t>(to) % 4 == 0) {
    *reinterpret_cast<uint32_t*>(to) = pair_of(out.dtype, a, b);
    return;
  }
  store_number(out.out, i, out.dtype, a);
  if (both) store_number(out.out, i + 1, out.dtype, b);
}

// Sums of a warp: of lane 4g + t rows g and g + 8 of its 16 of weights, rows 8j + 2t and
// 8j + 2t + 1 of x.
template <class Math>
struct RowsSums {
  static constexpr int kFloats = Math::kFloats;
  float v[kFloats] = {};

  // From the warpgroup before, and to the next one.
  __device__ __forceinline__ void load(uint32_t at) {
#pragma unroll
    for (int i = 0; i < kFloats; i += 4) {
      const uint4 w = tile::load_shared16(at + i / 4 * (kRowsMath * 16));
      v[i] = __uint_as_float(w.x), v[i + 1] = __uint_as_float(w.y);
      v[i + 2] = __uint_as_float(w.z), v[i + 3] = __uint_as_float(w.w);
    }
  }
  __device__ __forceinline__ void store(uint32_t at) const {
#pragma unroll
    for (int i = 0; i < kFloats; i += 4)
      tile::st_shared_u32x4(at + i / 4 * (kRowsMath * 16),
                            {__float_as_uint(v[i]), __float_as_uint(v[i + 1]),
                             __float_as_uint(v[i + 2]), __float_as_uint(v[i + 3])});
  }
  // Scales of the lane's rows of x, in order, which lie at a shared address.
  struct OfX {
    float v[Math::kX / 4];
    __device__ __forceinline__ void load(uint32_t at) {
      if constexpr (Math::kX == 8) {
        const uint2 two = tile::load_shared8(at);
        v[0] = __uint_as_float(two.x), v[1] = __uint_as_float(two.y);
      } else {
#pragma unroll
        for (int i = 0; i < Math::kX / 16; ++i) {
          const uint4 s = tile::load_shared16(at + i * 64);
          v[4 * i] = __uint_as_float(s.x), v[4 * i + 1] = __uint_as_float(s.y);
          v[4 * i + 2] = __uint_as_float(s.z), v[4 * i + 3] = __uint_as_float(s.w);
        }
      }
    }
  };

  // Adds d, which is there, times the scales of the lane's rows of weights and of those of x.
  // NOTE: scales are multiplied with each other first, as in gemm_promote.cuh.
  __device__ __forceinline__ void add(const float (&d)[kFloats], float low, float high,
                                      const OfX& x) {
#pragma unroll
    for (int i = 0; i < kFloats; ++i)
      v[i] = fmaf(d[i], (i % 4 < 2 ? low : high) * x.v[i / 4 * 2 + i % 2], v[i]);
  }
  // The same of a tile of class 3, right for every exponent: those of the lane's rows of weights.
  __device__ __forceinline__ void add_spread_far(const float (&d)[kFloats], int low, int high,
                                                 const OfX& x) {
#pragma unroll
    for (int i = 0; i < kFloats; ++i)
      v[i] = add_far(v[i], d[i],
                     static_cast<int>(__float_as_uint(x.v[i / 4 * 2 + i % 2]) >> 23) +
                         (i % 4 < 2 ? low : high));
  }
  // Times factors of rows of x and of a tile: as TileFactors of gemm_factors.cuh. there: rows of x,
  // from the lane's first on; behind them lies anything.
  __device__ __forceinline__ void add_factors(const float (&d)[kFloats], float tile, const OfX& x,
                                              int there) {
    bool normal = true;
#pragma unroll
    for (int i = 0; i < Math::kX / 4; ++i)
      normal &= i / 2 * 8 + i % 2 >= there || is_normal(x.v[i] * tile);
    if (__builtin_expect(__all_sync(~0u, normal), true)) {
#pragma unroll
      for (int i = 0; i < kFloats; ++i) v[i] = fmaf(d[i], x.v[i / 4 * 2 + i % 2] * tile, v[i]);
      return;
    }
#pragma unroll
    for (int i = 0; i < kFloats; ++i) {
      const float of_x = x.v[i / 4 * 2 + i % 2];
      CarefulFactors factors(of_x, tile);
      if (is_normal(of_x * tile)) factors.first = 1.0f, factors.second = of_x * tile;
      v[i] = factors.add(v[i], d[i]);
    }
  }
  // To `out`, from row n0 of the weights on. Two lanes have neighbours of a row.
  __device__ __forceinline__ void write(const DecodeOut& out, const DecodeBlock& rows, int n0,
                                        int n_end, int lane) const {
    const bool second = lane / 4 % 2 != 0;
#pragma unroll
    for (int i = 0; i < kFloats; i += 2) {
      const float other = __shfl_xor_sync(~0u, second ? v[i] : v[i + 1], 4);
      const int row = i / 4 * 8 + lane % 4 * 2 + second;
      const int n = n0 + i / 2 % 2 * 8 + lane / 8 * 2;
      if (row < rows.count && n < n_end)
        write_two(out, int64_t{rows.first} + row, n, int64_t{rows.group} * n_end, n + 1 < n_end,
                  second ? other : v[i], second ? v[i + 1] : other);
    }
  }
};

template <class Math>
__global__ void __launch_bounds__(kRowsThreads, 2)
    rows_kernel(const __grid_constant__ CUtensorMap map, const __grid_constant__ RowsParams p) {
  extern __shared__ __align__(1024) uint8_t smem[];
  constexpr int kFloats = Math::kFloats, kAhead = Math::kAhead;
  // NOTE: a number that the compiler sees is the same in all lanes: addresses stay uniform.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = threadIdx.x % 32;
  RowsPlace<Math> at(p, smem);
  if (!at.take_rows()) return;
  if (warp == kRowsOthers / 32) at.start(lane);
  if (threadIdx.x == kRowsOthers) tile::tma_prefetch(&map);
  __syncthreads();
  tile::let_dependents_start();

  constexpr int kMath = 1, kTurn = 2;  // named barriers: of all, and of two warps, one each way
  if (warp == kRowsOthers / 32) {
    if (tile::elect_one()) RowsProducer<Math>{at, &map}.ask_all();
    return;
  }

  const bool factors = p.x.factors;
  // Of quads: scales of weights, and the class of their tile, or its factor.
  int* const classes = reinterpret_cast<int*>(smem + at.room.classes_at);
  for (int i = threadIdx.x; i < at.length; i += kRowsOthers)
    classes[i] = __ldg(reinterpret_cast<const int*>(at.tile_words(i)) + (factors ? 0 : kWideRows));
  if (!factors) {
    constexpr int kEach = kRowsWeights / 4;
    const int skipped = at.n0 % kWideRows * 4;
    uint8_t* const words = smem + at.room.words_at;
    for (int i = threadIdx.x; i < at.length * kEach; i += kRowsOthers)
      tile::copy16_async(words + i * 16, at.tile_words(i / kEach) + skipped + i % kEach * 16, true);
    tile::end_copy_group();
    tile::wait_copy_groups<0>();
  }
  tile::await_predecessors();
  tile::mbar_wait(tile::smem_addr(at.scales_bar()), 0);
  tile::named_barrier(kMath, kRowsOthers);

  const int there = at.block.count - lane % 4 * 2;
  // NOTE: kept in registers, so that quads take few instructions.
  const uint32_t x_at = tile::keep(tile::wgmma_desc_at(at.x(0))),
                 w_at = tile::keep(tile::wgmma_desc_at(at.w(0))),
                 scales_at = tile::keep(at.base + at.room.x_scales_at + lane % 4 * 16),
                 words_at = tile::keep(at.base + at.room.words_at + (warp % 4 * 16 + lane / 4) * 4),
                 sums_at = tile::keep(at.base + at.room.sums_at + threadIdx.x % kRowsMath * 16);
  RowsSums<Math> sums;
  int s = 0;

  // The stage of the next quad, which is there.
  const auto take = [&](int quad) {
    tile::mbar_wait(at.full_bar(quad), quad / kRowsBars & 1);
    const int stage = s;
    if (++s == p.stages) s = 0;
    return stage;
  };
  const auto release = [&](int stage) {
    __syncwarp();
    if (tile::elect_one()) tile::mbar_arrive(at.bars + kRowsBars + stage);
  };
  const auto x_of = [&](int stage) { return x_at + stage * (Math::kCodes / 16); };
  const auto start = [&](float (&d)[kFloats], int stage) {
    const uint32_t x = x_of(stage), w = w_at + stage * (Math::kWeights / 16);
    tile::wgmma_pin(d);
    tile::wgmma_fence();
    tile::wgmma_shared<false>(d, w, x);
    tile::wgmma_shared<true>(d, w + 2, x + 2);
    tile::wgmma_shared<true>(d, w + 4, x + 4);
    tile::wgmma_shared<true>(d, w + 6, x + 6);
    tile::wgmma_commit();
  };
  // NOTE: the low bits of such words may say how to unpack codes.
  const auto scale = [](uint32_t word) { return __uint_as_float(word & 0x7F800000u); };
  using OfX = typename RowsSums<Math>::OfX;
  // Whose turn it is: of the quads that a warpgroup adds up together.
  const int group = warp / 4;
  int turn = 0;
  const auto begin = [&] {
    if (turn == 0) return;
    tile::named_barrier(kTurn + warp, 64);
    sums.load(sums_at);
  };
  const auto end_before = [&](int quad) {  // the next turn's
    if (quad == at.length) return;
    sums.store(sums_at);
    tile::named_arrive(kTurn + (warp ^ 4), 64);
  };
  // `count` quads of classes 0 and 1. NOTE: behind the last one anything is multiplied: the tensor
  // cores stop where the compiler sees another way through.
  const auto several = [&](int quad, int count) {
    float d[kAhead][kFloats], low[kAhead], high[kAhead];
    int stage[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      stage[i] = i < count ? take(quad + i) : 0;
      start(d[i], stage[i]);
    }
    // NOTE: scales are read while the tensor cores multiply.
    OfX x[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int q = quad + min(i, count - 1);
      x[i].load(scales_at + q * Math::kScales);
      low[i] = high[i] = 0.0f;
      if (factors) {
        low[i] = __int_as_float(classes[q]);
      } else {
        const uint32_t words = words_at + q * Math::kWords;
        low[i] = scale(tile::ld_shared_u32(words));
        high[i] = scale(tile::ld_shared_u32(words + 32));
      }
    }
    tile::wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      tile::wgmma_pin(d[i]);
      if (i < count) release(stage[i]);
    }
    begin();
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (i >= count) break;
      if (factors) {
        sums.add_factors(d[i], low[i], x[i], there);
      } else {
        sums.add(d[i], low[i], high[i], x[i]);
      }
    }
    end_before(quad + count);
  };
  // One whose tile is spread, block by block.
  const auto spread = [&](int quad) {
    float d[kFloats];
    const int stage = take(quad);
    begin();
    const uint32_t x = x_of(stage), w = w_at + stage * (Math::kWeights / 16);
    OfX scales;
    scales.load(scales_at + quad * Math::kScales);
    const uint32_t words = words_at + quad * Math::kWords;
    uint32_t low = tile::ld_shared_u32(words), high = tile::ld_shared_u32(words + 32);
#pragma unroll 1
    for (int i = 0; i < 4; ++i, low >>= 8, high >>= 8) {
      tile::wgmma_pin(d);
      tile::wgmma_fence();
      tile::wgmma_shared<false>(d, w + 2 * i, x + 2 * i);
      tile::wgmma_commit();
      tile::wgmma_wait<0>();
      tile::wgmma_pin(d);
      if (classes[quad] == 2) {
        sums.add(d, scale_of(low, 0), scale_of(high, 0), scales);
      } else {
        sums.add_spread_far(d, low & 0xFF, high & 0xFF, scales);
      }
    }
    release(stage);
    end_before(quad + 1);
  };
  // Leaves quads to the other warpgroup.
  const auto skip = [&](int count) {
    s += count;
    if (s >= p.stages) s -= p.stages;
  };
#pragma unroll 1
  for (int quad = 0; quad < at.length;) {
    int end = quad;
    for (uint32_t far = 0; end < at.length && far == 0;) {
      far = __ballot_sync(~0u, !factors && end + lane < at.length && classes[end + lane] >= 2);
      end += far == 0 ? 32 : __ffs(far) - 1;
    }
    end = min(end, at.length);
#pragma unroll 1
    for (; quad < end; quad += kAhead, ++turn) {
      const int count = min(kAhead, end - quad);
      turn % 2 == group ? several(quad, count) : skip(count);
    }
    quad = end;
    if (end == at.length) break;
    turn % 2 == group ? spread(end) : skip(1);
    ++quad, ++turn;
  }
  if (turn % 2 != group) sums.write(p.out, at.block, at.n0 + warp % 4 * 16, p.n, lane);
}

}  // namespace te_mx::sm90
