// Rows of x times MXFP4 weights as they lie: plain codes of 4 bits, two a byte, and rows of scales.
// As wide_kernel.cuh in all but the way of weights: they are operand A from registers, as codes of
// E4M3 that share one exponent for a row and a quad. E2M1 times 2^d is exact there for 15 d's
// (mxtile/sm90/fp4.cuh), so nothing of a weight is rounded; a block that lies further below the
// largest one of its quad comes in a further pass, where all others are zeros.
//
// A third warpgroup asks for everything and looks at scales, a lane at those of a row.
#pragma once

#include "decode/wide_kernel.cuh"
#include "mxtile/sm90/fp4.cuh"

namespace te_mx::sm90 {

inline constexpr int kFp4Threads = kWideMath + 128;
// Two quads are a stage: rows of whole 128 bytes.
inline constexpr int kFp4Quads = 2, kFp4RowBytes = kFp4Quads * kDecodeQuad / 2;
inline constexpr int kFp4Weights = kWideRows * kFp4RowBytes;
// Of all rows over a quad: eight times the octaves that blocks lie below the largest one, a byte
// each, and the scale of the largest one.
inline constexpr int kFp4Rows = kWideRows * 8;
// Codes of blocks that lie so far below are normal numbers of E4M3. Bytes of blocks of NaN, and of
// those that a pass leaves out, have bit 7.
inline constexpr uint32_t kFp4Far = 11, kFp4Nan = 0x80, kFp4None = 0xFF;
// What scales of blocks with other codes than zeros may be, but for NaN (sm90_decode.h).
inline constexpr uint32_t kFp4Least = 24, kFp4Most = 215;

// kSmCtas: on an SM. kTwo: both quads are multiplied at once.
template <int kCols, bool kMakes, int kSmCtas, bool kTwo>
struct WideFp4 {
  static constexpr int kX = kCols, kFloats = kCols / 2, kThreads = kFp4Threads;
  static constexpr bool kMakesX = kMakes, kTwoQuads = kTwo;
  static constexpr int kCtas = kSmCtas, kRegisters = kCtas == 1 ? 216 : 104;
  static constexpr int kCodes = kCols * kDecodeQuad, kScales = kCols * 4;
  static constexpr int kStage = kFp4Weights + (kMakesX ? 0 : kFp4Quads * kCodes);
  static constexpr int kBeside = kFp4Quads * (kFp4Rows + (kMakesX ? 0 : kScales));
  static constexpr int kQuads = kFp4Quads, kArrivals = 1 + 4, kPassLists = 2;
  static constexpr bool kNibbles = true;
};

// How rows of scales are read: of whole 16 bytes, of whole words, or byte by byte.
enum class ScaleRows : int32_t { vectors, words, bytes };

struct WideFp4Params {
  WideParams wide;  // words: the scales
  int blocks = 0;   // in a row of them
  ScaleRows rows = ScaleRows::bytes;
};

// The scales of a row of weights, four quads at a time.
struct ScalesOfRow {
  const uint8_t* from;
  int blocks;
  ScaleRows rows;

  // Of quads 4c to 4c + 3, 0 where there are no blocks.
  __device__ __forceinline__ uint4 four(int c) const {
    const uint8_t* const at = from + 16 * c;
    const int left = blocks - 16 * c;
    if (rows == ScaleRows::vectors)
      return left > 0 ? __ldg(reinterpret_cast<const uint4*>(at)) : uint4{0, 0, 0, 0};
    uint32_t w[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      w[j] = 0;
      if (rows == ScaleRows::words) {
        if (left > 4 * j) w[j] = __ldg(reinterpret_cast<const uint32_t*>(at) + j);
      } else {
#pragma unroll
        for (int b = 0; b < 4; ++b)
          if (left > 4 * j + b) w[j] |= uint32_t{__ldg(at + 4 * j + b)} << 8 * b;
      }
    }
    return {w[0], w[1], w[2], w[3]};
  }
};

// What becomes of a row's four blocks in a pass: how far they lie below the largest one (kFp4Rows),
// and its exponent.
struct BlocksOfRow {
  uint32_t below, exponent;
  bool more;  // blocks are left to further passes

  __device__ __forceinline__ BlocksOfRow(uint32_t scales, int pass) {
    const uint32_t even = scales & 0x00FF00FFu, odd = scales >> 8 & 0x00FF00FFu;
    const uint32_t most2 = __vmaxu2(even, odd), least2 = __vminu2(even, odd);
    const uint32_t most = max(most2 & 0xFFFF, most2 >> 16),
                   least = min(least2 & 0xFFFF, least2 >> 16);
    exponent = most, below = (most * 0x01010101u - scales) << 3, more = false;
    if (pass > 0 || least < kFp4Least || most > kFp4Most || most - least > kFp4Far)
      choose(scales, pass);
  }

 private:
  // NOTE: scales that no block with other codes than zeros has take no part.
  __device__ __forceinline__ void choose(uint32_t scales, int pass) {
    uint32_t left = 0;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const uint32_t e = scales >> 8 * b & 255;
      left |= (e >= kFp4Least && e <= kFp4Most ? 1u : 0u) << b;
    }
#pragma unroll 1
    for (int i = 0; i <= pass; ++i) {
      exponent = 0, below = 0;
#pragma unroll
      for (int b = 0; b < 4; ++b)
        if (left >> b & 1) exponent = max(exponent, scales >> 8 * b & 255);
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const uint32_t e = scales >> 8 * b & 255;
        const bool taken = (left >> b & 1) != 0 && exponent - e <= kFp4Far;
        const uint32_t far = taken ? (exponent - e) * 8 : e == 255 && i == 0 ? kFp4Nan : kFp4None;
        below |= far << 8 * b;
        if (taken) left &= ~(1u << b);
      }
    }
    if (exponent == 0) exponent = 127;
    more = left != 0;
  }
};

// Tables of a row's blocks, whose bytes are `below`: E2M1 times 2^(6 - octaves).
struct TablesOfRow {
  uint32_t low[4], high[4];

  __device__ __forceinline__ explicit TablesOfRow(uint32_t below) {
    constexpr uint32_t kLow = 0x6C686000u, kHigh = 0x7C787470u;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const uint32_t octaves = __byte_perm(below, 0, 0x4440 + b);
      low[b] = kLow - octaves * 0x01010100u, high[b] = kHigh - octaves * 0x01010101u;
    }
    if ((below & 0x80808080u) != 0) {
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const uint32_t byte = below >> 8 * b & 255;
        if (byte == kFp4Nan) low[b] = high[b] = 0x7F7F7F7Fu;
        if (byte == kFp4None) low[b] = high[b] = 0;
      }
    }
  }
  __device__ __forceinline__ tile::Fp4Table table(int b) const {
    return tile::Fp4Table(uint2{low[b], high[b]});
  }
};

// Calls stage(pass of x, pass of weights, i) for all of further passes, and begin() of the two
// numbers before the stages of each.
template <class Math, class Begin, class Quad>
__device__ __forceinline__ void further_passes(const WidePlace<Math>& at, const Begin& begin,
                                               const Quad& quad) {
  const int most = at.most_passes[0], w_most = at.most_passes[1];
  const int* const w_passes = at.passes + at.p.parts.least + 1;
#pragma unroll 1
  for (int both = 1; both < most * w_most; ++both) {
    const int pass = both / w_most, w_pass = both - pass * w_most;
    begin(pass, w_pass);
#pragma unroll 1
    for (int i = 0; i < at.length; ++i)
      if (at.passes[i] > pass && w_passes[i] > w_pass) quad(pass, w_pass, i);
  }
}

// The warpgroup that asks: `row` is the thread's, the first thread that runs asks for copies.
template <class Math>
struct Fp4Source {
  const WidePlace<Math>& at;
  const CUtensorMap* map;
  ScalesOfRow scales;
  int row;  // of the tile
  bool copies;

  __device__ __forceinline__ int* w_passes() const { return at.passes + at.p.parts.least + 1; }
  __device__ __forceinline__ void ask_weights(int i, int s) const {
    const uint32_t bar = at.full + 8 * s;
    constexpr int kInput = Math::kMakesX ? 0 : kFp4Quads * (Math::kCodes + Math::kScales);
    tile::mbar_arrive_expect(bar, kFp4Weights + kInput);
    tile::tma_load(at.stage(s), map, bar, (at.first + i) * kFp4RowBytes, at.row0());
  }
  __device__ __forceinline__ void ask_x(int pass, int i, int s) const {
    if constexpr (!Math::kMakesX) {
      const uint32_t bar = at.full + 8 * s;
#pragma unroll
      for (int j = 0; j < kFp4Quads; ++j) {
        const uint8_t* const from = at.p.x.at(at.block, pass, (at.first + i) * kFp4Quads + j);
        tile::bulk_load(at.stage(s) + kFp4Weights + j * Math::kCodes, from, Math::kCodes, bar);
        tile::bulk_load(at.beside(s) + kFp4Quads * kFp4Rows + j * Math::kScales,
                        from + Math::kCodes, Math::kScales, bar);
      }
    }
  }
  // What becomes of the row's blocks in both quads of stage i, to place s.
  __device__ __forceinline__ void give_rows(const uint32_t (&words)[kFp4Quads], int pass, int i,
                                            int s) const {
    // NOTE: rows r and r + 8 of 16 side by side.
    const uint32_t to = at.beside(s) + (row & ~15) * 8 + (row & 7) * 16 + (row & 8);
#pragma unroll
    for (int j = 0; j < kFp4Quads; ++j) {
      const BlocksOfRow own(words[j], pass);
      tile::st_shared_u32x2(to + j * kFp4Rows, own.below,
                            (own.exponent - tile::kFp4Headroom) << 23);
      if (pass == 0 && own.more) {
        int passes = 2;
        while (BlocksOfRow(words[j], passes - 1).more) ++passes;
        atomicMax(w_passes() + i, passes), atomicMax(at.most_passes + 1, passes);
      }
    }
    __syncwarp();
    if (tile::elect_one()) tile::mbar_arrive(at.bars + s);
  }
  // All stages, one after the other.
  __device__ __forceinline__ void give_all() const {
    const int stages = at.p.stages, last = at.first + at.length;
    int chunk = at.first / 2;
    uint4 now = scales.four(chunk);
    if (copies) {
      const int ahead = min(stages, at.length);
      for (int i = 0; i < ahead; ++i) ask_weights(i, i);
      if constexpr (!Math::kMakesX) {
        tile::await_predecessors();
        for (int i = 0; i < ahead; ++i) ask_x(0, i, i);
      }
    }
    __syncwarp();
    int i = 0, s = 0;
    uint32_t phase = 1;
#pragma unroll 1
    for (; 2 * chunk < last; ++chunk) {
      const uint4 next = scales.four(chunk + 1);
      const uint32_t words[2][kFp4Quads] = {{now.x, now.y}, {now.z, now.w}};
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (2 * chunk + j < at.first || 2 * chunk + j >= last) continue;
        if (i >= stages) {
          tile::mbar_wait(at.empty + 8 * s, phase);
          if (copies) ask_weights(i, s), ask_x(0, i, s);
          __syncwarp();
        }
        give_rows(words[j], 0, i, s);
        ++i;
        if (++s == stages) s = 0, phase ^= 1;
      }
      now = next;
    }
  }
  // Further passes. NOTE: what is rare waits until everything before was read.
  __device__ __forceinline__ void give_passes() const {
    const int stages = at.p.stages;
    int turn = at.length;
    further_passes(
        at, [&](int, int) {},
        [&](int pass, int w_pass, int i) {
          const int s = turn % stages;
          tile::mbar_wait(at.empty + 8 * ((turn - 1) % stages), (turn - 1) / stages & 1);
          if (copies) ask_weights(i, s), ask_x(pass, i, s);
          __syncwarp();
          const uint4 four = scales.four((at.first + i) / 2);
          const bool upper = (at.first + i) % 2 != 0;
          const uint32_t words[kFp4Quads] = {upper ? four.z : four.x, upper ? four.w : four.y};
          give_rows(words, w_pass, i, s);
          ++turn;
        });
  }
};

template <class Math>
struct Fp4Sums : WideTotals<Math> {
  static constexpr int kFloats = Math::kFloats;
  using Quad = uint32_t[4][4];  // operands of a quad of weights

  // w: the lane's place in the codes of 16 rows over a quad; low, high: of rows g and g + 8.
  static __device__ __forceinline__ void make(Quad& a, uint32_t w, uint32_t low, uint32_t high) {
    const TablesOfRow of_low(low), of_high(high);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t codes[4];
      tile::ldmatrix_x4(codes, w ^ (half << 5));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        uint32_t (&to)[4] = a[2 * half + j];
        const uint2 first = of_low.table(2 * half + j).eight(codes[2 * j]),
                    second = of_high.table(2 * half + j).eight(codes[2 * j + 1]);
        to[0] = first.x, to[2] = first.y, to[1] = second.x, to[3] = second.y;
      }
    }
#pragma unroll
    for (int b = 0; b < 4; ++b) tile::wgmma_pin(a[b]);
  }
  static __device__ __forceinline__ void start(float (&d)[kFloats], const Quad& a, uint32_t x) {
    const uint32_t b = tile::wgmma_desc_at(x);
    tile::wgmma_fence();
    tile::wgmma_registers<tile::Fp8::e4m3, false>(d, a[0], b);
    tile::wgmma_registers<tile::Fp8::e4m3, true>(d, a[1], b + 2);
    tile::wgmma_registers<tile::Fp8::e4m3, true>(d, a[2], b + 4);
    tile::wgmma_registers<tile::Fp8::e4m3, true>(d, a[3], b + 6);
    tile::wgmma_commit();
  }
};

template <class Math>
__global__ void __launch_bounds__(kFp4Threads, Math::kCtas)
    wide_fp4_kernel(const __grid_constant__ CUtensorMap map,
                    const __grid_constant__ WideFp4Params given) {
  extern __shared__ __align__(1024) uint8_t smem[];
  // NOTE: a number that the compiler sees is the same in all lanes: addresses stay uniform.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = threadIdx.x % 32;
  const WideParams& p = given.wide;
  const WidePlace<Math> at(p, smem);
  if (!at.take_rows()) return;
  if (threadIdx.x == kWideMath) tile::tma_prefetch(&map), at.start();
  __syncthreads();
  if (p.cluster > 1) tile::cluster_arrive_relaxed();  // whoever has waited for it may send
  tile::let_dependents_start();

  constexpr int kPassesKnown = 1, kMath = 2;  // named barriers
  if (warp >= kWideMath / 32) {
    tile::registers_down<Math::kCtas == 1 ? 72 : 32>();
    const int row = static_cast<int>(threadIdx.x) - kWideMath;
    const int n = at.rows().group * p.n + min(at.tile_n * kWideRows + row, p.n - 1);
    const Fp4Source<Math> source{at,
                                 &map,
                                 {p.words + int64_t{n} * given.blocks, given.blocks, given.rows},
                                 row,
                                 warp == kWideMath / 32 && tile::elect_one()};
    source.give_all();
    tile::named_barrier(kPassesKnown, kFp4Threads);
    source.give_passes();
    if (p.cluster > 1) tile::cluster_wait();
    return;
  }

  tile::registers_up<Math::kRegisters>();
  tile::await_predecessors();
  if constexpr (Math::kMakesX) {
    make_first(at);
    tile::named_barrier(kMath, kWideMath);
  } else {
    find_passes(at);
  }
  Fp4Sums<Math> sums;
  const uint32_t w_at = warp * (kFp4Weights / 8) + tile::swizzle128(lane % 16, lane / 16);
  const uint32_t own_at = warp * 128 + lane / 4 * 16;
  const uint32_t scales_at = lane % 4 * (Math::kX == 8 ? 8 : 16);
  int s = 0;
  uint32_t phase = 0;
  // Begins quad j of stage i of the CTA, which is at place s; own: of the lane's rows.
  const auto begin = [&](float (&d)[Math::kFloats], typename Fp4Sums<Math>::Quad& a, uint4& own,
                         int i, int j) {
    const uint32_t w = at.stage(s);
    const uint32_t x = Math::kMakesX ? at.base + at.room.x_at + (i * kFp4Quads + j) * Math::kCodes
                                     : w + kFp4Weights + j * Math::kCodes;
    own = tile::load_shared16(at.beside(s) + j * kFp4Rows + own_at);
    sums.make(a, w + (w_at ^ (j << 6)), own.x, own.z);
    sums.start(d, a, x);
  };
  const auto take = [&](float (&d)[Math::kFloats], const uint4& own, int i, int j, auto later) {
    const uint32_t scales =
        Math::kMakesX ? at.base + at.room.x_scales_at + (i * kFp4Quads + j) * Math::kScales
                      : at.beside(s) + kFp4Quads * kFp4Rows + j * Math::kScales;
    sums.template promote<decltype(later)::value>(d, __uint_as_float(own.y), __uint_as_float(own.w),
                                                  scales + scales_at);
  };
  const auto stage = [&](int i, auto later) {
    tile::mbar_wait(at.full + 8 * s, phase);
    if constexpr (Math::kTwoQuads) {
      float d0[Math::kFloats], d1[Math::kFloats];
      typename Fp4Sums<Math>::Quad a0, a1;
      uint4 own0, own1;
      begin(d0, a0, own0, i, 0);
      begin(d1, a1, own1, i, 1);
      tile::wgmma_wait<1>();
      take(d0, own0, i, 0, later);
      tile::wgmma_wait<0>();
      take(d1, own1, i, 1, later);
    } else {
#pragma unroll 1
      for (int j = 0; j < kFp4Quads; ++j) {
        float d[Math::kFloats];
        typename Fp4Sums<Math>::Quad a;
        uint4 own;
        begin(d, a, own, i, j);
        tile::wgmma_wait<0>();
        take(d, own, i, j, later);
      }
    }
    __syncwarp();
    if (tile::elect_one()) tile::mbar_arrive(at.bars + kWideMostStages + s);
    if (++s == p.stages) s = 0, phase ^= 1;
  };
#pragma unroll 1
  for (int i = 0; i < at.length; ++i) stage(i, std::false_type{});
  tile::named_barrier(kPassesKnown, kFp4Threads);
  further_passes(
      at,
      [&](int pass, int w_pass) {
        if constexpr (Math::kMakesX) {
          if (w_pass != 0 || pass == 0) return;
          tile::named_barrier(kMath, kWideMath);  // all have multiplied the pass before
          make_pass(at, pass);
          tile::named_barrier(kMath, kWideMath);
        }
      },
      [&](int, int, int i) { stage(i, std::true_type{}); });
  if (p.cluster > 1) tile::cluster_wait();
  send_wide(at, sums, warp, lane);
  if (p.cluster > 1) {
    tile::mbar_wait_sent(at.sums_bar(), 0);
  } else {
    tile::named_barrier(kMath, kWideMath);
  }
  finish_tile(at);
}

}  // namespace te_mx::sm90
