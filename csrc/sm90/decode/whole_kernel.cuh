// Few rows of x times weights, with the sums of rows_sums.cuh, by CTAs that have all of k: no sum
// leaves them. Rows of x are operand A of wgmma, of which it has 64 in any case, so that 32 rows of
// weights are enough for a CTA, and there are CTAs for all of the chip. Its warpgroups take turns:
// runs of quads are dealt to them, each multiplies its run, gets the sums of all quads before, adds
// its own and passes them on. So no bit depends on how many there are.
//
// Grid: x = rows of weights / 32 or 64, whole clusters. One warp asks for quads of weights, before
// the kernel that wrote x has ended; one for runs of x, which go to all CTAs of a cluster at once:
// CTA i % cluster asks for run i.
#pragma once

#include <type_traits>

#include "decode/rows_sums.cuh"
#include "mxtile/sm90/cluster.cuh"
#include "mxtile/sm90/copy_async.cuh"
#include "mxtile/sm90/multicast.cuh"

namespace te_mx::sm90 {

inline constexpr int kWholeCols = 32;  // rows of weights of a warpgroup: columns of its sums
inline constexpr int kWholeA = 64;     // rows of operand A
inline constexpr int kWholeAhead = 2;  // quads of a run
inline constexpr int kWholeMost = 4;   // warpgroups
inline constexpr int kWholeThreads = kWholeMost * kRowsMath + 64;
// Lanes of a warp that say that its sums are there: see kArrivals (gemm_params.cuh).
#ifdef TE_MX_RACECHECK
inline constexpr int kWholePassing = 32;
#else
inline constexpr int kWholePassing = 1;
#endif

// Where things lie in shared memory, behind the stages of x: those of weights, scales of both,
// barriers. NOTE: operand A has 64 rows whatever there are: behind the last stage of x lies enough.
struct WholeRoom {
  int w_at = 0, words_at = 0, x_scales_at = 0, sums_at = 0, bars_at = 0, bytes = 0;
};

struct WholeParams {
  AlignedInput x;
  const uint8_t* words = nullptr;  // scales of tiles
  int64_t words_quad = 0;          // bytes from a quad to the next
  // halves: of 32 rows of weights; as many warpgroups for each as there are turns.
  int n = 0, halves = 1, turns = 1, cluster = 1;
  // Of quads of weights; of runs of x: whole clusters, or all.
  int stages = 0, x_stages = 0;
  WholeRoom room;
  DecodeOut out;

  __host__ __device__ int cols() const { return halves * kWholeCols; }
  __host__ __device__ int word_bytes() const { return x.factors ? 4 : cols() * 4; }
  __host__ __device__ int runs() const { return (x.quads + kWholeAhead - 1) / kWholeAhead; }
  __host__ __device__ int x_bytes() const { return kWholeAhead * x.rows * kDecodeQuad; }
};

inline WholeRoom whole_room(const WholeParams& p) {
  WholeRoom r;
  int at = p.x_stages * p.x_bytes();
  r.w_at = at, at += p.stages * p.cols() * kDecodeQuad;
  at = at < kWholeA * kDecodeQuad ? kWholeA * kDecodeQuad : at;
  r.words_at = at, at += (p.x.quads * p.word_bytes() + 15) / 16 * 16;
  r.x_scales_at = at, at += p.x.quads * p.x.rows * 4 + kWholeA * 4;
  r.sums_at = at, at += p.halves * kRowsMath * kWholeCols * 2;
  r.bars_at = at, at += (2 * (p.stages + p.x_stages) + p.halves * p.turns * 4 + 1) * 8;
  r.bytes = at;
  return r;
}

// What a CTA has to do, and where.
struct WholePlace {
  const WholeParams& p;
  int rank, n0, tile_n;
  uint8_t* smem;
  uint32_t base, full, x_full;  // shared addresses; barriers: quads are there
  uint64_t *empty, *x_empty;    // stages were read
  uint64_t* turn;               // sums of all runs before are there
  uint64_t* scales_bar;         // scales of x are there

  __device__ __forceinline__ WholePlace(const WholeParams& p, uint8_t* smem)
      : p(p),
        rank(static_cast<int>(tile::cluster_rank())),
        n0(static_cast<int>(blockIdx.x) * p.cols()),
        smem(smem) {
    tile_n = min(n0, p.n - 1) / kWideRows;
    base = tile::smem_addr(smem), full = base + p.room.bars_at, x_full = full + 8 * p.stages;
    empty = reinterpret_cast<uint64_t*>(smem + p.room.bars_at) + p.stages + p.x_stages;
    x_empty = empty + p.stages, turn = x_empty + p.x_stages;
    scales_bar = turn + p.halves * p.turns * 4;
  }
  __device__ __forceinline__ uint32_t w(int s) const {
    return base + p.room.w_at + s * p.cols() * kDecodeQuad;
  }
  __device__ __forceinline__ uint32_t words(int q) const {
    return base + p.room.words_at + q * p.word_bytes();
  }
  __device__ __forceinline__ uint32_t x(int s) const { return base + s * p.x_bytes(); }
  __device__ __forceinline__ uint32_t x_scales(int q) const {
    return base + p.room.x_scales_at + q * p.x.rows * 4;
  }
  // Words of the CTA's rows in a quad, or the factor of its tile.
  __device__ __forceinline__ const uint8_t* tile_words(int quad) const {
    return p.words + quad * p.words_quad +
           (p.x.factors ? tile_n * 4 : (tile_n * (kWideWords / 4) + n0 % kWideRows) * 4);
  }
  __device__ __forceinline__ int class_of(int quad) const {
    return __ldg(reinterpret_cast<const int*>(p.words + quad * p.words_quad) +
                 tile_n * (kWideWords / 4) + kWideRows);
  }
  // By one thread.
  __device__ __forceinline__ void start() const {
    uint64_t* const bars = reinterpret_cast<uint64_t*>(smem + p.room.bars_at);
    for (int i = 0; i < p.stages + p.x_stages; ++i) tile::mbar_init(bars + i, 1);
    for (int i = 0; i < p.stages; ++i) tile::mbar_init(empty + i, p.halves * 4);
    for (int i = 0; i < p.x_stages; ++i) tile::mbar_init(x_empty + i, p.halves * 4 * p.cluster);
    for (int i = 0; i < p.halves * p.turns * 4; ++i) tile::mbar_init(turn + i, kWholePassing);
    tile::mbar_init(scales_bar, 1);
    tile::mbar_init_fence();
  }
  // By one thread: quad q of weights.
  __device__ __forceinline__ void ask_weights(const CUtensorMap* map, int q, int s) const {
    const uint32_t bar = full + 8 * s;
    tile::mbar_arrive_expect(bar, p.cols() * kDecodeQuad);
    tile::tma_load(w(s), map, bar, q * kDecodeQuad, n0);
  }
  __device__ __forceinline__ void ask_other_weights(const CUtensorMap* map) const {
    int s = 0, phase = 0;
    for (int q = p.stages; q < p.x.quads; ++q) {
      tile::mbar_wait(tile::smem_addr(empty + s), phase);
      ask_weights(map, q, s);
      if (++s == p.stages) s = 0, phase ^= 1;
    }
  }
  // By `threads` threads: scales of all quads of weights, without waiting for them.
  __device__ __forceinline__ void ask_words(int thread, int threads) const {
    uint8_t* const to = smem + p.room.words_at;
    if (p.x.factors) {
      for (int q = thread; q < p.x.quads; q += threads)
        tile::copy4_async(to + q * 4, tile_words(q));
    } else {
      const int each = p.cols() / 4;  // a power of two
      for (int i = thread; i < p.x.quads * each; i += threads)
        tile::copy16_async(to + i * 16, tile_words(i / each) + i % each * 16, true);
    }
    tile::end_copy_group();
  }
  // By one thread: all of x, run by run.
  __device__ __forceinline__ void ask_x() const {
    const int scales = p.x.quads * p.x.rows * 4, runs = p.runs();
    const uint32_t scales_at = tile::smem_addr(scales_bar);
    tile::mbar_arrive_expect(scales_at, scales);
    tile::bulk_load(x_scales(0), p.x.scales_at(0, 0, 0), scales, scales_at);
    const auto mask = static_cast<uint16_t>((1 << p.cluster) - 1);
    int s = 0, phase = 1, turn = 0;
    for (int run = 0; run < runs; ++run) {
      const uint32_t bar = x_full + 8 * s;
      const bool again = run >= p.x_stages;
      const int first = run * kWholeAhead;
      const int bytes = min(kWholeAhead, p.x.quads - first) * p.x.rows * kDecodeQuad;
      // NOTE: what others send may be there before this CTA says how much it waits for.
      if (again) tile::mbar_wait(bar, phase);
      tile::mbar_arrive_expect(bar, bytes);
      if (turn == rank) {
        if (again) tile::mbar_wait(tile::smem_addr(x_empty + s), phase);
        if (p.cluster == 1) {
          tile::bulk_load(x(s), p.x.at(0, 0, first), bytes, bar);
        } else {
          tile::bulk_load_multicast(x(s), p.x.at(0, 0, first), bytes, bar, mask);
        }
      }
      if (++turn == p.cluster) turn = 0;
      if (++s == p.x_stages) s = 0, phase ^= 1;
    }
  }
};

// Sums of a warpgroup: of lane 4g + t of warp w rows 16w + g and 16w + g + 8 of x, rows 8j + 2t and
// 8j + 2t + 1 of its weights.
struct WholeSums : PassedSums<kWholeCols / 2> {
  // Scales of a lane's rows of weights, of a quad; the factor of all of them.
  template <bool kFactors>
  struct OfWeights {
    uint32_t v[kFactors ? 1 : kWholeCols / 4];
    __device__ __forceinline__ void load(uint32_t words) {
      if constexpr (kFactors) {
        v[0] = tile::ld_shared_u32(words);
      } else {
#pragma unroll
        for (int j = 0; j < kWholeCols / 8; ++j) {
          const uint2 two = tile::load_shared8(words + j * 32);
          v[2 * j] = two.x, v[2 * j + 1] = two.y;
        }
      }
    }
  };
  // Adds d times the scales of both. NOTE: those are multiplied with each other first, as in
  // gemm_promote.cuh; of factors it is as in RowsSums::add_factors.
  template <bool kFactors>
  __device__ __forceinline__ void add(const float (&d)[kFloats], const OfWeights<kFactors>& w,
                                      const float (&x)[2]) {
    if constexpr (kFactors) {
      const float one = __uint_as_float(w.v[0]);
      float first[2], second[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const CarefulFactors careful(x[i], one);
        const float product = x[i] * one;
        const bool normal = is_normal(product);
        first[i] = normal ? 1.0f : careful.first, second[i] = normal ? product : careful.second;
      }
#pragma unroll
      for (int i = 0; i < kFloats; ++i)
        v[i] = fmaf(d[i] * first[i / 2 % 2], second[i / 2 % 2], v[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kFloats; ++i) {
        // NOTE: the low bits of such words may say how to unpack codes.
        const float of_w = __uint_as_float(w.v[i / 4 * 2 + i % 2] & 0x7F800000u);
        v[i] = fmaf(d[i], of_w * x[i / 2 % 2], v[i]);
      }
    }
  }
  // One block of a tile that is spread.
  __device__ __forceinline__ void add_spread(const float (&d)[kFloats], const OfWeights<false>& w,
                                             const float (&x)[2], int b, bool far) {
#pragma unroll
    for (int i = 0; i < kFloats; ++i) {
      const uint32_t word = w.v[i / 4 * 2 + i % 2] >> (8 * b);
      const float of_x = x[i / 2 % 2];
      const int e = static_cast<int>(__float_as_uint(of_x) >> 23) + static_cast<int>(word & 255);
      v[i] = far ? add_far(v[i], d[i], e) : fmaf(d[i], scale_of(word, 0) * of_x, v[i]);
    }
  }
  __device__ __forceinline__ void write(const DecodeOut& out, int count, int n0, int n_end, int row,
                                        int lane) const {
#pragma unroll
    for (int i = 0; i < kFloats; i += 2) {
      const int r = row + i / 2 % 2 * 8, n = n0 + i / 4 * 8 + lane % 4 * 2;
      if (r < count && n < n_end) write_two(out, r, n, 0, n + 1 < n_end, v[i], v[i + 1]);
    }
  }
};

// A stage of a ring, of the quad that a warpgroup comes to.
struct WholeStage {
  int s, phase = 0;
  __device__ __forceinline__ void skip(int quads, int stages) {
    for (s += quads; s >= stages; s -= stages) phase ^= 1;
  }
};

// One warpgroup's way through its runs of quads.
template <bool kFactors>
struct WholeMath {
  static constexpr int kAhead = kWholeAhead, kFloats = WholeSums::kFloats;
  using OfWeights = WholeSums::OfWeights<kFactors>;
  const WholePlace& at;
  const WholeParams& p;
  int half, turn, warp, lane, runs;
  uint32_t words_at, of_x, sums_at;  // of this lane, in stage 0
  WholeStage w{0}, x{0};             // of the next quad, of the run
  WholeSums sums;

  __device__ __forceinline__ WholeMath(const WholePlace& at, int warp, int lane)
      : at(at), p(at.p), warp(warp % 4), lane(lane) {
    turn = warp / 4 / p.halves, half = warp / 4 - turn * p.halves;
    runs = (p.x.quads + kAhead - 1) / kAhead;
    words_at = at.words(0) + (kFactors ? 0 : half * kWholeCols * 4 + lane % 4 * 8);
    const int g = lane / 4;
    of_x = at.x_scales(0) + ((this->warp * 4 + g / 2) * 4 + g % 2) * 4;
    sums_at = at.base + p.room.sums_at + half * (kRowsMath * kWholeCols * 2) +
              threadIdx.x % kRowsMath * 16;
    w.skip(turn * kAhead, p.stages), x.skip(turn, p.x_stages);
  }
  __device__ __forceinline__ void await() const { tile::mbar_wait(at.full + 8 * w.s, w.phase); }
  __device__ __forceinline__ void await_x() const { tile::mbar_wait(at.x_full + 8 * x.s, x.phase); }
  __device__ __forceinline__ uint32_t w_desc() const {
    return tile::wgmma_desc_at(at.w(w.s) + half * (kWholeCols * kDecodeQuad));
  }
  // Of quad j of the run.
  __device__ __forceinline__ uint32_t x_desc(int j) const {
    return tile::wgmma_desc_at(at.x(x.s) + j * p.x.rows * kDecodeQuad);
  }
  __device__ __forceinline__ void next() {
    if (++w.s == p.stages) w.s = 0, w.phase ^= 1;
  }
  __device__ __forceinline__ void start(float (&d)[kFloats], int j) const {
    const uint32_t w = w_desc(), x = x_desc(j);
    tile::wgmma_pin(d);
    tile::wgmma_fence();
    tile::wgmma_shared<false>(d, x, w);
    tile::wgmma_shared<true>(d, x + 2, w + 2);
    tile::wgmma_shared<true>(d, x + 4, w + 4);
    tile::wgmma_shared<true>(d, x + 6, w + 6);
    tile::wgmma_commit();
  }
  __device__ __forceinline__ void load_x(float (&to)[2], int q) const {
    const uint32_t from = of_x + q * p.x.rows * 4;
    to[0] = __uint_as_float(tile::ld_shared_u32(from));
    to[1] = __uint_as_float(tile::ld_shared_u32(from + 8));
  }
  __device__ __forceinline__ void load_w(OfWeights& to, int q) const {
    to.load(words_at + q * p.word_bytes());
  }
  // Quad q of weights, and all of a run's x, were read, by one lane.
  __device__ __forceinline__ void release_w(int q, int s) const {
    if (q + p.stages < p.x.quads) tile::mbar_arrive(at.empty + s);
  }
  __device__ __forceinline__ void release_x(int run) const {
    if (run + p.x_stages < runs)
      tile::mbar_arrive_at(at.x_empty + x.s, (run + p.x_stages) & (p.cluster - 1));
  }
  // The sums of all quads before a run, and to who has the next one. NOTE: a warpgroup has a
  // barrier of its own, whose phase before is over.
  __device__ __forceinline__ uint64_t* turn_bar(int turn) const {
    return at.turn + (turn * p.halves + half) * 4 + warp;
  }
  __device__ __forceinline__ void begin(int run, int round) {
    if (run == 0 || p.turns == 1) return;
    tile::mbar_wait(tile::smem_addr(turn_bar(turn)), (turn == 0 ? round - 1 : round) & 1);
    sums.load(sums_at);
  }
  __device__ __forceinline__ void pass(int run) {
    if (run + 1 == runs || p.turns == 1) return;
    sums.store(sums_at);
    __syncwarp();
    if (kWholePassing > 1 || tile::elect_one())
      tile::mbar_arrive(turn_bar(turn + 1 == p.turns ? 0 : turn + 1));
  }
  // Products of all quads of a run are started before one is waited for.
  __device__ __forceinline__ void whole_run(int run, int round) {
    const int q = run * kAhead;
    float d[kAhead][kFloats], of_x[kAhead][2];
    int w_of[kAhead];
    await_x();
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      await();
      start(d[j], j);
      w_of[j] = w.s;
      next();
    }
    OfWeights of_w;
    load_w(of_w, q);
#pragma unroll
    for (int j = 0; j < kAhead; ++j) load_x(of_x[j], q + j);
    tile::wgmma_wait<0>();
#pragma unroll
    for (int j = 0; j < kAhead; ++j) tile::wgmma_pin(d[j]);
    __syncwarp();
    if (tile::elect_one()) {
      release_x(run);
#pragma unroll
      for (int j = 0; j < kAhead; ++j) release_w(q + j, w_of[j]);
    }
    begin(run, round);
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      sums.add(d[j], of_w, of_x[j]);
      if (j + 1 < kAhead) load_w(of_w, q + j + 1);
    }
    pass(run);
  }
  // Quad after quad, of tiles that are spread block by block; and a last run that is shorter.
  __device__ __forceinline__ void slow_run(int run, int round) {
    await_x();
    begin(run, round);
    const int first = run * kAhead;
#pragma unroll 1
    for (int q = first; q < min(first + kAhead, p.x.quads); ++q, next()) {
      float d[kFloats], of_x[2];
      OfWeights of_w;
      await();
      load_x(of_x, q), load_w(of_w, q);
      const int cls = kFactors ? 0 : at.class_of(q);
      if (cls < 2) {
        start(d, q - first);
        tile::wgmma_wait<0>();
        tile::wgmma_pin(d);
        sums.add(d, of_w, of_x);
      } else if constexpr (!kFactors) {
#pragma unroll 1
        for (int b = 0; b < 4; ++b) {
          tile::wgmma_pin(d);
          tile::wgmma_fence();
          tile::wgmma_shared<false>(d, x_desc(q - first) + 2 * b, w_desc() + 2 * b);
          tile::wgmma_commit();
          tile::wgmma_wait<0>();
          tile::wgmma_pin(d);
          sums.add_spread(d, of_w, of_x, b, cls == 3);
        }
      }
      __syncwarp();
      if (tile::elect_one()) release_w(q, w.s);
    }
    __syncwarp();
    if (tile::elect_one()) release_x(run);
    pass(run);
  }
  // Whether this warpgroup has the sums of all quads.
  __device__ __forceinline__ bool run(bool spread) {
    int round = 0;
    tile::mbar_wait(tile::smem_addr(at.scales_bar), 0);
#pragma unroll 1
    for (int run = turn; run < runs; run += p.turns, ++round) {
      if (spread || (run + 1) * kAhead > p.x.quads) {
        slow_run(run, round);
      } else {
        whole_run(run, round);
      }
      w.skip((p.turns - 1) * kAhead, p.stages), x.skip(p.turns, p.x_stages);
    }
    return (runs - 1) % p.turns == turn;
  }
};

__global__ void __launch_bounds__(kWholeThreads, 1)
    whole_kernel(const __grid_constant__ CUtensorMap map, const __grid_constant__ WholeParams p) {
  extern __shared__ __align__(1024) uint8_t smem[];
  // NOTE: a number that the compiler sees is the same in all lanes: addresses stay uniform.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = threadIdx.x % 32, math = p.halves * p.turns * 4;
  const WholePlace at(p, smem);
  const bool many = p.cluster > 1;
  constexpr int kStart = 1, kWords = 2;  // named barriers
  const int threads = math * 32 + 64;
  if (warp == math) {
    if (tile::elect_one()) {
      at.start();
      for (int q = 0; q < min(p.stages, p.x.quads); ++q) at.ask_weights(&map, q, q);
    }
    __syncwarp();
  }
  tile::named_barrier(kStart, threads);
  if (many) tile::cluster_arrive_relaxed();  // whoever has waited for it may send
  tile::let_dependents_start();
  if (warp == math) {
    if (tile::elect_one()) at.ask_other_weights(&map);
    __syncwarp();
    if (many) tile::cluster_wait(), tile::cluster_arrive_relaxed(), tile::cluster_wait();
    return;
  }
  bool spread = false;
  if (!p.x.factors && warp < math)
    for (int q = lane; q < p.x.quads; q += 32) spread |= at.class_of(q) >= 2;
  spread = __any_sync(~0u, spread);
  if (warp < math) {
    at.ask_words(static_cast<int>(threadIdx.x), math * 32);
    tile::wait_copy_groups<0>();
    tile::named_barrier(kWords, math * 32);
  }
  tile::await_predecessors();
  if (many) tile::cluster_wait();
  if (warp > math) {
    if (tile::elect_one()) at.ask_x();
    __syncwarp();
    if (many) tile::cluster_arrive_relaxed(), tile::cluster_wait();
    return;
  }
  const auto multiply = [&](auto factors) {
    WholeMath<factors> own(at, warp, lane);
    const bool has = own.run(spread);
    // NOTE: what was sent to other CTAs has come by then.
    if (many) tile::cluster_arrive_relaxed();
    if (has)
      own.sums.write(p.out, p.x.m, at.n0 + own.half * kWholeCols, p.n, own.warp * 16 + lane / 4,
                     lane);
    if (many) tile::cluster_wait();
  };
  if (p.x.factors) {
    multiply(std::true_type{});
  } else {
    multiply(std::false_type{});
  }
}

}  // namespace te_mx::sm90
