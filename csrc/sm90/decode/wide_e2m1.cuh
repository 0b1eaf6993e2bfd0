// Rows of x times MXFP4 weights as they lie: plain codes of 4 bits, two a byte, and rows of scales.
// As wide_kernel.cuh in all but the way of weights: they are operand A from registers, as codes of
// E4M3 that share one exponent for a row and a quad. E2M1 times 2^d is exact there for 15 d's
// (mxtile/sm90/fp4.cuh), so nothing of a weight is rounded; a block that lies further below the
// largest one of its quad comes in a further pass, where all others are zeros.
//
// A third warpgroup asks for everything and makes of the scales of a row, its lane's, the tables
// that say what becomes of the codes of its blocks: the others read tables, and look at no scale.
#pragma once

#include "decode/wide_kernel.cuh"
#include "mxtile/sm90/fp4.cuh"

namespace te_mx::sm90 {

inline constexpr int kFp4Threads = kWideMath + 128;
inline constexpr int kFp4Weights = kWideRows * kDecodeQuad / 2;  // bytes of a quad
inline constexpr int kFp4Pairs = kWideRows * 16;                // of tables of two blocks, all rows
inline constexpr int kFp4Rows = 2 * kFp4Pairs + kWideRows * 4;  // and of the scales of rows
// Tables: of every u that tile::Fp4Table takes, of NaN, of blocks that a pass leaves out.
inline constexpr int kFp4Nan = tile::kFp4Spread + 1, kFp4None = kFp4Nan + 1;
// What scales of blocks with other codes than zeros may be, but for NaN (sm90_decode.h).
inline constexpr uint32_t kFp4Least = 24, kFp4Most = 215;

// kTwoQuads: they are multiplied at once, where there are registers.
template <int kCols, bool kMakes>
struct WideFp4 {
  static constexpr int kX = kCols, kFloats = kCols / 2, kThreads = kFp4Threads;
  static constexpr bool kMakesX = kMakes, kTwoQuads = kCols <= 16;
  static constexpr int kCodes = kCols * kDecodeQuad, kScales = kCols * 4;
  static constexpr int kStage = kFp4Weights + (kMakesX ? 0 : kCodes);
  static constexpr int kBeside = kFp4Rows + (kMakesX ? 0 : kScales);
  static constexpr int kArrivals = 1 + 4, kPassLists = 2;
  static constexpr int kTables = 8 * (kFp4None + 1);
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

// What becomes of a row's four blocks in a pass: numbers of their tables, a byte each, and the
// exponent of their codes.
struct TablesOfRow {
  uint32_t tables, exponent;
  bool more;  // blocks are left to further passes

  __device__ __forceinline__ TablesOfRow(uint32_t scales, int pass) {
    const uint32_t even = scales & 0x00FF00FFu, odd = scales >> 8 & 0x00FF00FFu;
    const uint32_t most2 = __vmaxu2(even, odd), least2 = __vminu2(even, odd);
    const uint32_t most = max(most2 & 0xFFFF, most2 >> 16),
                   least = min(least2 & 0xFFFF, least2 >> 16);
    exponent = most, tables = most * 0x01010101u - scales, more = false;
    if (pass > 0 || least < kFp4Least || most > kFp4Most || most - least > tile::kFp4Spread)
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
      exponent = 0, tables = 0;
#pragma unroll
      for (int b = 0; b < 4; ++b)
        if (left >> b & 1) exponent = max(exponent, scales >> 8 * b & 255);
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const uint32_t e = scales >> 8 * b & 255;
        const bool taken = (left >> b & 1) != 0 && exponent - e <= tile::kFp4Spread;
        const uint32_t table = taken ? exponent - e : e == 255 && i == 0 ? kFp4Nan : kFp4None;
        tables |= table << 8 * b;
        if (taken) left &= ~(1u << b);
      }
    }
    if (exponent == 0) exponent = 127;
    more = left != 0;
  }
};

// Calls quad(pass of x, pass of weights, i) for all of further passes, and begin() of the two
// numbers before the quads of each.
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
    constexpr int kInput = Math::kMakesX ? 0 : Math::kCodes + Math::kScales;
    tile::mbar_arrive_expect(bar, kFp4Weights + kInput);
    tile::tma_load(at.stage(s), map, bar, (at.first + i) * (kDecodeQuad / 2), at.row0());
  }
  __device__ __forceinline__ void ask_x(int pass, int i, int s) const {
    if constexpr (!Math::kMakesX) {
      const uint32_t bar = at.full + 8 * s;
      const uint8_t* const from = at.p.x.at(at.block, pass, at.first + i);
      tile::bulk_load(at.stage(s) + kFp4Weights, from, Math::kCodes, bar);
      tile::bulk_load(at.beside(s) + kFp4Rows, from + Math::kCodes, Math::kScales, bar);
    }
  }
  // The tables of the row's blocks of quad i to stage s.
  __device__ __forceinline__ void give_tables(uint32_t word, int pass, int i, int s) const {
    const TablesOfRow own(word, pass);
    const uint32_t tables = at.base + at.room.tables_at, to = at.beside(s) + row * 16;
    const auto table = [&](int b) {
      return tile::ld_shared_u32x2(tables + (own.tables >> 8 * b & 255) * 8);
    };
    const uint2 t0 = table(0), t1 = table(1), t2 = table(2), t3 = table(3);
    tile::st_shared_u32x4(to, uint4{t0.x, t0.y, t1.x, t1.y});
    tile::st_shared_u32x4(to + kFp4Pairs, uint4{t2.x, t2.y, t3.x, t3.y});
    // NOTE: rows r and r + 8 of 16 side by side.
    const int place = row & ~15 | (row & 7) * 2 | (row >> 3 & 1);
    tile::st_shared_u32(at.beside(s) + 2 * kFp4Pairs + place * 4,
                        (own.exponent - tile::kFp4Headroom) << 23);
    if (pass == 0 && own.more) {
      int passes = 2;
      while (TablesOfRow(word, passes - 1).more) ++passes;
      atomicMax(w_passes() + i, passes), atomicMax(at.most_passes + 1, passes);
    }
    __syncwarp();
    if (tile::elect_one()) tile::mbar_arrive(at.bars + s);
  }
  // All quads, one after the other.
  __device__ __forceinline__ void give_all() const {
    const int stages = at.p.stages, last = at.first + at.length;
    int chunk = at.first / 4;
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
    for (; 4 * chunk < last; ++chunk) {
      const uint4 next = scales.four(chunk + 1);
      const uint32_t words[4] = {now.x, now.y, now.z, now.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (4 * chunk + j < at.first || 4 * chunk + j >= last) continue;
        if (i >= stages) {
          tile::mbar_wait(at.empty + 8 * s, phase);
          if (copies) ask_weights(i, s), ask_x(0, i, s);
          __syncwarp();
        }
        give_tables(words[j], 0, i, s);
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
          const int s = turn % stages, q = at.first + i;
          tile::mbar_wait(at.empty + 8 * ((turn - 1) % stages), (turn - 1) / stages & 1);
          if (copies) ask_weights(i, s), ask_x(pass, i, s);
          __syncwarp();
          const uint4 four = scales.four(q / 4);
          give_tables(q % 4 == 0   ? four.x
                      : q % 4 == 1 ? four.y
                      : q % 4 == 2 ? four.z
                                   : four.w,
                      w_pass, i, s);
          ++turn;
        });
  }
};

template <class Math>
struct Fp4Sums : WideTotals<Math> {
  static constexpr int kFloats = Math::kFloats;
  using Quad = uint32_t[4][4];  // operands of a quad of weights

  // w: the lane's place in the codes of 16 rows; tables: of the lane's row g.
  static __device__ __forceinline__ void make(Quad& a, uint32_t w, uint32_t tables) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t codes[4];
      tile::ldmatrix_x4(codes, w ^ (half << 5));
      const uint4 low = tile::ld_shared_u32x4(tables + half * kFp4Pairs),
                  high = tile::ld_shared_u32x4(tables + half * kFp4Pairs + 128);
      const auto eight = [](uint32_t x, uint32_t y, uint32_t nibbles, uint32_t& first,
                            uint32_t& second) {
        const uint2 to = tile::Fp4Table(uint2{x, y}).eight(nibbles);
        first = to.x, second = to.y;
      };
      uint32_t (&first)[4] = a[2 * half];
      uint32_t (&second)[4] = a[2 * half + 1];
      eight(low.x, low.y, codes[0], first[0], first[2]);
      eight(high.x, high.y, codes[1], first[1], first[3]);
      eight(low.z, low.w, codes[2], second[0], second[2]);
      eight(high.z, high.w, codes[3], second[1], second[3]);
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
__global__ void __launch_bounds__(kFp4Threads, 2)
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
  if (threadIdx.x <= kFp4None) {
    const int u = static_cast<int>(threadIdx.x);
    const tile::Fp4Table table(u <= static_cast<int>(tile::kFp4Spread) ? u : 0);
    const bool nan = u == kFp4Nan, none = u == kFp4None;
    reinterpret_cast<uint2*>(smem + at.room.tables_at)[u] = {nan    ? 0x7F7F7F7Fu
                                                             : none ? 0
                                                                    : table.low,
                                                             nan    ? 0x7F7F7F7Fu
                                                             : none ? 0
                                                                    : table.high};
  }
  __syncthreads();
  if (p.cluster > 1) tile::cluster_arrive_relaxed();  // whoever has waited for it may send
  tile::let_dependents_start();

  constexpr int kPassesKnown = 1, kMath = 2;  // named barriers
  if (warp >= kWideMath / 32) {
    tile::registers_down<32>();
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

  tile::registers_up<104>();
  tile::await_predecessors();
  if constexpr (Math::kMakesX) {
    make_first(at);
    tile::named_barrier(kMath, kWideMath);
  } else {
    find_passes(at);
  }
  Fp4Sums<Math> sums;
  const uint32_t w_at = warp * (kFp4Weights / 8) + tile::swizzle64(lane % 16, lane / 16);
  const uint32_t tables_at = warp * 256 + lane / 4 * 16, own_at = warp * 64 + lane / 4 * 8;
  const uint32_t scales_at = lane % 4 * (Math::kX == 8 ? 8 : 16);
  int s = 0;
  uint32_t phase = 0;
  const auto next = [&] {
    if (++s == p.stages) s = 0, phase ^= 1;
  };
  // Begins quad i of the CTA in stage s.
  const auto begin = [&](float (&d)[Math::kFloats], typename Fp4Sums<Math>::Quad& a, int i) {
    tile::mbar_wait(at.full + 8 * s, phase);
    const uint32_t w = at.stage(s);
    const uint32_t x = Math::kMakesX ? at.base + at.room.x_at + i * Math::kCodes : w + kFp4Weights;
    sums.make(a, w + w_at, at.beside(s) + tables_at);
    sums.start(d, a, x);
  };
  const auto take = [&](float (&d)[Math::kFloats], int i, int s, auto later) {
    const uint32_t beside = at.beside(s);
    const uint32_t scales =
        Math::kMakesX ? at.base + at.room.x_scales_at + i * Math::kScales : beside + kFp4Rows;
    const uint2 own = tile::load_shared8(beside + 2 * kFp4Pairs + own_at);
    sums.template promote<decltype(later)::value>(d, __uint_as_float(own.x), __uint_as_float(own.y),
                                                  scales + scales_at);
    __syncwarp();
    if (tile::elect_one()) tile::mbar_arrive(at.bars + kWideMostStages + s);
  };
  const auto one = [&](int i, auto later) {
    float d[Math::kFloats];
    typename Fp4Sums<Math>::Quad a;
    begin(d, a, i);
    tile::wgmma_wait<0>();
    take(d, i, s, later);
    next();
  };
  int done = 0;
  if constexpr (Math::kTwoQuads) {
#pragma unroll 1
    for (; done + 1 < at.length; done += 2) {
      float d0[Math::kFloats], d1[Math::kFloats];
      typename Fp4Sums<Math>::Quad a0, a1;
      begin(d0, a0, done);
      const int first = s;
      next();
      begin(d1, a1, done + 1);
      tile::wgmma_wait<1>();
      take(d0, done, first, std::false_type{});
      tile::wgmma_wait<0>();
      take(d1, done + 1, s, std::false_type{});
      next();
    }
  }
#pragma unroll 1
  for (; done < at.length; ++done) one(done, std::false_type{});
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
      [&](int, int, int i) { one(i, std::true_type{}); });
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
