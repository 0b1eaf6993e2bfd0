// Rows of x, bf16 or fp16, times NVFP4 or MXFP4 weights that stand still (sm90_nvfp4.h):
// out[row, n] = scale * sum over k of x[row, k] w[n, k].
//
// Grid: x = tiles of weights * blocks of kCols rows (decode_rows.cuh) * CTAs of a cluster. The
// transposed product on wgmma: weights are operand A, codes times block scales from registers, so
// that nothing is scaled until the end; x is operand B, from shared memory as it came. CTAs of a
// cluster have parts of k, whose sums go to the CTA that adds them up, in order: the bits of a row
// depend on n and k, not on the other rows of x nor on their number.
//
// One warp asks for quads, first of all those of weights, before it waits for the kernel that wrote
// x; every warpgroup multiplies 64 rows of weights, of the quads of a stage one. Up to 8 rows that
// are quantized are made by every CTA, its part of k, by the warps that multiply.
#pragma once

#include <type_traits>

#include "common/shares.cuh"
#include "common/stages.cuh"
#include "decode/decode_out.cuh"
#include "mxtile/sm90/cluster.cuh"
#include "mxtile/sm90/mma.cuh"
#include "mxtile/sm90/shared.cuh"
#include "mxtile/sm90/swizzle.cuh"
#include "mxtile/sm90/tma.cuh"
#include "nvfp4/nvfp4_input.cuh"
#include "nvfp4/nvfp4_operand.cuh"

namespace te_mx::sm90 {

inline constexpr int kNvfp4MostStages = 12;

// Boxes of x, and of its last rows.
struct XMaps {
  const CUtensorMap &whole, &end;
};

struct Nvfp4Params {
  const uint8_t* w = nullptr;  // codes
  const uint8_t* w_scales = nullptr;
  const float* scale = nullptr;  // of every matrix, or of each of its rows; null: 1
  bool scale_rows = false;
  bool mx = false;                          // MXFP4
  int n = 0, k = 0, groups = 0, quads = 0;  // groups: of 64 rows of a matrix
  int cluster = 1, blocks = 1, stages = 0, weights_at = 0, sums_at = 0;
  int cluster_factor = 0;             // quotient_factor(cluster)
  bool walks = false, lines = false;  // nvfp4_many.cuh
  int begin = 0, end = 0;             // likewise: of a launch, the tiles
  // Rows of a box of x, and of x itself, or more where no box is of its last rows (TensorMaps).
  int x_box = 0, x_rows = 0;
  // Rows by themselves, each with one of so many matrices, by its number (sm90_nvfp4.h).
  const int32_t* experts = nullptr;
  int matrices = 0;
  bool stands = false;
  Shares parts;  // of quads
  DecodeOut out;
  DecodeInput in;  // where CTAs make their x
  RowPlaces places;
  __device__ __forceinline__ int of_cluster(int v) const { return v * cluster_factor >> 16; }
};

// What goes where in shared memory behind the barriers: x, all of it or in stages, from 0 on, then
// stages of weights; sums, at 0 where they take the place of all that.
struct Nvfp4Room {
  int stages, weights_at, sums_at, bytes;
};

// kCols: rows of x in a block. kGroups: of 64 rows of weights in a tile, whose k two warpgroups
// have in turn. kMakes: x is quantized here. kAlone: warps multiply by themselves.
template <int kColumns, bool kIsHalf, bool kQuantizes = false, bool kByWarps = false>
struct Nvfp4Math {
  static constexpr bool kAlone = kByWarps;
  using Operand = Nvfp4Operand<kIsHalf>;
  static constexpr bool kHalf = kIsHalf, kMakes = kQuantizes;
  static constexpr int kCols = kColumns, kGroups = 1, kParts = 2;
  static constexpr int kStages = 0;  // Nvfp4Params has them
  // Quads of a stage, one for each part; those of 64 rows are so large that parts have their own.
  static constexpr int kInStage = kCols == 64 ? 1 : kParts;
  static constexpr int kFloats = kCols / 2;
  static constexpr int kWarps = 4 * kGroups, kMath = 32 * kWarps * kParts, kThreads = kMath + 32;
  static constexpr int kBatch = 4;  // operands that are made together
  static constexpr int kX = kCols * kNvfp4Quad * 2, kW = kGroups * kNvfp4Block;
  static constexpr int kFragments = kCols / 8 * kGroups * 4;
  // Of CTAs that share an SM, by how many there are, and what keeps it from having more: those of
  // one product would gather on some, of the next on others.
  static constexpr int smem(int on_sm) { return (on_sm == 2 ? 112 : on_sm == 3 ? 74 : 55) * 1024; }
  static constexpr int least_smem(int on_sm) {
    return (on_sm == 2 ? 76 : on_sm == 3 ? 57 : 46) * 1024;
  }
  static constexpr int sums_bytes(int cluster) {
    return (kFragments + cluster - 1) / cluster * cluster * kParts * 512;
  }
  // Of a part of so many quads. Sums lie behind the stages, or in their place where there would be
  // too few of these.
  static constexpr Nvfp4Room room(int cluster, int quads, int smem) {
    const int made = kMakes ? quads * kX : 0, stage = kInStage * (kMakes ? kW : kX + kW);
    const int sums = sums_bytes(cluster), space = smem - 1024 - made;
    // NOTE: more of them come no earlier, but where two CTAs share an SM, they keep others waiting.
    constexpr int kMost = kNvfp4MostStages / kInStage, kTurn = kParts / kInStage;
    const auto stages = [&](int bytes) {
      const int fit = bytes / stage, most = fit < kMost ? fit : kMost;
      const int steps = (quads + kInStage - 1) / kInStage;
      return steps <= most ? steps : most - most % kTurn;  // a stage has quads of the same parts
    };
    const int apart = stages(space - sums), over = stages(space);
    const int both = made + apart * stage, all = made + over * stage;
    if ((cluster > 1 || kAlone) && (apart * kInStage >= 4 || apart == over))
      return {apart, kMakes ? made : apart * kInStage * kX, both, 1024 + both + sums};
    return {over, kMakes ? made : over * kInStage * kX, 0, 1024 + (all > sums ? all : sums)};
  }
};

inline constexpr int kNvfp4Band = 8;
template <class Math>
__host__ __device__ constexpr int tiles_of(int groups) {
  return (groups + Math::kGroups - 1) / Math::kGroups;
}

// Where tile `index` lies: its block of x, and its tile of weights. Blocks of a band meet a tile
// one after the other: their x stays in L2.
template <class Math>
struct Nvfp4Tile {
  int block, tile_n;
  __device__ __forceinline__ Nvfp4Tile(const Nvfp4Params& p, int index) : block(0), tile_n(index) {
    if (p.blocks == 1) return;
    const int tiles = tiles_of<Math>(p.groups);
    const int band = index / (tiles * kNvfp4Band), inside = index - band * tiles * kNvfp4Band;
    const int width = min(kNvfp4Band, p.blocks - band * kNvfp4Band);
    tile_n = inside / width, block = band * kNvfp4Band + inside - tile_n * width;
  }
};

template <class Math>
struct Nvfp4Place {
  static constexpr int kCodes = 4 * kNvfp4Codes, kScales = 4 * kNvfp4Scales;  // of 64 rows
  static constexpr int kRow = Math::kMakes ? 0 : Math::kX / Math::kCols;      // of x and a quad
  const Nvfp4Params& p;
  uint8_t* smem;
  int rank, first, length;     // first, length: of its quads, of which a stage has kInStage
  uint32_t base, full, empty;  // barriers of stages that are there, were read
  uint64_t* bars;

  __device__ __forceinline__ Nvfp4Place(const Nvfp4Params& p, uint8_t* smem)
      : p(p), smem(smem), rank(static_cast<int>(tile::cluster_rank())) {
    const Range quads(p.parts, rank);
    first = quads.first, length = quads.last - first;
    bars = reinterpret_cast<uint64_t*>(smem);
    base = tile::smem_addr(smem) + 1024, full = base - 1024, empty = full + 8 * kNvfp4MostStages;
  }
  __device__ __forceinline__ int stages() const {
    return Math::kStages == 0 ? p.stages : Math::kStages;
  }
  __device__ __forceinline__ uint64_t* sums_bar() const { return bars + 2 * kNvfp4MostStages; }
  __device__ __forceinline__ int mine() const {
    return p.of_cluster(Math::kFragments - rank + p.cluster - 1);
  }
  // Bytes of the scales of 64 rows, which may be fewer than there is room for.
  __device__ __forceinline__ int scales() const { return p.mx ? 4 * kMxfp4Scales : kScales; }
  __device__ __forceinline__ int steps() const {
    return (length + Math::kInStage - 1) / Math::kInStage;
  }
  // Of stage s, where quads lie one behind the other.
  __device__ __forceinline__ uint32_t x(int s) const {
    return base + s * Math::kInStage * Math::kX;
  }
  __device__ __forceinline__ uint32_t w(int s) const {
    return base + (Math::kStages == 0 ? p.weights_at : Math::kStages * Math::kX) +
           s * Math::kInStage * Math::kW;
  }
  __device__ __forceinline__ uint32_t w_scales(int s) const {
    return w(s) + Math::kInStage * Math::kGroups * kCodes;
  }
  __device__ __forceinline__ bool over() const { return p.sums_at == 0; }
  __device__ __forceinline__ uint8_t* sums() const {
    return smem + 1024 + (Math::kStages == 0 ? p.sums_at : 0);
  }
  // By a warp. sums: fragments of parts that the CTA is sent, of 512 bytes.
  __device__ __forceinline__ void start(int sums) const {
    static_assert(kNvfp4MostStages <= 32);
    const int lane = threadIdx.x % 32;
    if (lane < stages()) {
      tile::mbar_init(bars + lane, 1);
      tile::mbar_init(bars + kNvfp4MostStages + lane, Math::kWarps * Math::kInStage);
    }
    if (lane == 0) tile::mbar_init(sums_bar(), 1);
    tile::mbar_init_fence();
    __syncwarp();
    if (lane == 0 && p.cluster > 1) tile::mbar_arrive_expect(sums_bar(), sums * 512);
  }
  // Asks for step i of the CTA, to stage s, by one thread.
  __device__ __forceinline__ int quads_of(int i) const {
    return Math::kInStage == 1 ? 1 : min(Math::kInStage, length - i * Math::kInStage);
  }
  // With those of x from row0 on, which ask_x() asks for.
  __device__ __forceinline__ int rows_from(int row0) const { return min(p.x_box, p.x_rows - row0); }
  __device__ __forceinline__ void ask_weights(int matrix, int tile_n, int row0, int i,
                                              int s) const {
    const uint32_t bar = full + 8 * s;
    const int group = tile_n * Math::kGroups, count = min(Math::kGroups, p.groups - group);
    const int quads = quads_of(i);
    const int input = Math::kMakes ? 0 : rows_from(row0) * kRow;
    tile::mbar_arrive_expect(bar, quads * (input + count * (kCodes + scales())));
    int64_t from = (int64_t{matrix} * p.groups + group) * p.quads + first + i * Math::kInStage;
#pragma unroll
    for (int g = 0; g < Math::kGroups; ++g) {
      if (g < count) {
        tile::bulk_load(w(s) + g * kCodes, p.w + from * kCodes, quads * kCodes, bar);
        tile::bulk_load(w_scales(s) + g * scales(), p.w_scales + from * scales(), quads * scales(),
                        bar);
      }
      from += p.quads;
    }
  }
  __device__ __forceinline__ void ask_x(const XMaps& maps, int row0, int i, int s) const {
    static_assert(Math::kGroups == 1 || Math::kInStage == 1);
    if constexpr (!Math::kMakes) {
      const uint32_t bar = full + 8 * s;
      const CUtensorMap* const map = rows_from(row0) == p.x_box ? &maps.whole : &maps.end;
      const int k = (first + i * Math::kInStage) * kNvfp4Quad, halves = 2 * quads_of(i);
#pragma unroll
      for (int h = 0; h < 2 * Math::kInStage; ++h)
        if (h < halves) tile::tma_load(x(s) + h * (Math::kX / 2), map, bar, k + 64 * h, row0);
    }
  }
  // Asks for the weights of the first stages.
  __device__ __forceinline__ void ask_first(int matrix, int tile_n, int row0) const {
    for (int i = 0; i < min(stages(), steps()); ++i) ask_weights(matrix, tile_n, row0, i, i);
  }
  // And for the rest. early: what wrote x is to be waited for.
  __device__ __forceinline__ void ask_all(const XMaps& maps, int matrix, int tile_n, int row0,
                                          bool early) const {
    ask_stages(
        p.stages, steps(), empty,
        [&](int i, int s) {
          if (i >= p.stages) ask_weights(matrix, tile_n, row0, i, s);
        },
        [&] {
          if (!Math::kMakes && early) tile::await_predecessors();
        },
        [&](int i, int s) { ask_x(maps, row0, i, s); });
  }
};

// The lane's part of the warp's quad in shared memory, and where x is, behind all of it.
struct QuadPlace {
  uint32_t w, w_scales, x;
};

template <class Math, bool kMx>
struct QuadScales {
  using Operand = typename Math::Operand;
  uint32_t words[4];
  __device__ __forceinline__ explicit QuadScales(uint32_t at) {
    if constexpr (kMx) {
      const uint2 two = tile::load_shared8(at);
      words[0] = two.x, words[1] = two.y, words[2] = words[3] = 0;
    } else {
      const uint4 four = tile::load_shared16(at);
      words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
    }
  }
  // Those of two rows for the j-th 16 of k.
  __device__ __forceinline__ uint32_t of(int j) const {
    if constexpr (kMx) {
      return j / 2 % 2 == 0 ? Operand::template powers<0>(words[j / 4])
                            : Operand::template powers<1>(words[j / 4]);
    } else {
      return j % 2 == 0 ? Operand::template scales<0>(words[j / 2])
                        : Operand::template scales<1>(words[j / 2]);
    }
  }
};

// Products of a warp's quad with 8 rows of x by itself, for which wgmma waits more than it
// multiplies. Sums have the same bits. x: where the lane begins to read, the first and the second
// 32 of 64 of k.
template <class Math, bool kMx>
__device__ __forceinline__ void multiply_alone(float (&d)[4], const QuadPlace& at,
                                               const uint32_t (&x)[2]) {
  using Operand = typename Math::Operand;
  const QuadScales<Math, kMx> scales(at.w_scales);
  const uint4 two[2] = {tile::load_shared16(at.w), tile::load_shared16(at.w + 512)};
  uint32_t b[4][4];
#pragma unroll
  for (int q = 0; q < 4; ++q) tile::ldmatrix_x4(b[q], x[q % 2] + at.x + q / 2 * (Math::kX / 2));
#pragma unroll
  for (int q = 0; q < 4; ++q) {  // of 32 of k
    uint32_t a[2][4];
    const uint4& codes = two[q / 2];
    Operand::make(a[0], q % 2 == 0 ? codes.x : codes.z, scales.of(2 * q));
    Operand::make(a[1], q % 2 == 0 ? codes.y : codes.w, scales.of(2 * q + 1));
    Operand::multiply_alone(d, a[0], b[q][0], b[q][1]);
    Operand::multiply_alone(d, a[1], b[q][2], b[q][3]);
  }
}

// Products of the warpgroup's quads with x.
template <class Math, bool kMx>
__device__ __forceinline__ void multiply_quad(float (&d)[Math::kFloats], const QuadPlace& at,
                                              uint32_t x0) {
  using Operand = typename Math::Operand;
  constexpr int kBatch = Math::kBatch;
  const QuadScales<Math, kMx> scales(at.w_scales);
  const uint32_t x = tile::wgmma_desc_at(x0 + at.x);
  uint4 codes{};
  uint32_t a[2 * kBatch][4];
  const auto batch = [&](auto b) {
  // NOTE: while one batch is multiplied, the next is made.
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int j = b * kBatch + i;  // of 16 of k
      if (j % 4 == 0) codes = tile::load_shared16(at.w + j / 4 * 512);
      const uint32_t word = j % 4 == 0   ? codes.x
                            : j % 4 == 1 ? codes.y
                            : j % 4 == 2 ? codes.z
                                         : codes.w;
      Operand::make(a[j % (2 * kBatch)], word, scales.of(j));
    }
    tile::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int j = b * kBatch + i;
      Operand::multiply(d, a[j % (2 * kBatch)], x + j / 4 * (Math::kX / 2 / 16) + j % 4 * 2);
    }
    tile::wgmma_commit();
  };
  batch(std::integral_constant<int, 0>{}), batch(std::integral_constant<int, 1>{});
  tile::wgmma_wait<0>();
  tile::wgmma_pin(d);
}

// What sums are multiplied by, of rows of weights that have one scale.
__device__ __forceinline__ float scale_of(const Nvfp4Params& p, int group) {
  return (p.mx || p.scale_rows ? 1.0f : __ldcg(p.scale + group)) * kNvfp4Up;
}
// Or each a scale.
__device__ __forceinline__ float own_scale(const Nvfp4Params& p, int64_t row, float whole) {
  return p.scale_rows && !p.mx ? __ldg(p.scale + row) * kNvfp4Up : whole;
}

// Writes eight sums from weight n on of a row of x, times the scales of their matrix.
__device__ __forceinline__ void write_scaled(const Nvfp4Params& p, const DecodeBlock& rows,
                                             int64_t matrix0, float whole, int col, int n,
                                             int count, float (&v)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] *= own_scale(p, matrix0 + n + min(i, count - 1), whole);
  write_eight(p.out, rows.first + col, n, matrix0, count, v);
}

// finish_fragments() and that of up to 8 rows of x: a thread has a number of out at a time.
template <class Math>
__device__ __forceinline__ void finish_few(const Nvfp4Place<Math>& at, const DecodeBlock& rows,
                                           int n0, int64_t matrix0, float whole) {
  const Nvfp4Params& p = at.p;
  const int parts = p.cluster * Math::kParts;
  for (int i = threadIdx.x; i < at.mine() * 128; i += Math::kMath) {
    const int slot = i >> 7, row = i >> 4 & 7, n = n0 + (at.rank + slot * p.cluster) * 16 + i % 16;
    if (row >= rows.count || n >= p.n) continue;
    // Lane 4g + t of a fragment, and what of its four numbers.
    const float* from = reinterpret_cast<const float*>(at.sums()) + slot * parts * 128 +
                        ((i & 7) * 4 + row / 2) * 4 + (i >> 3 & 1) * 2 + row % 2;
    float v = *from;
#pragma unroll 4
    for (int part = 1; part < parts; ++part) v += from[part * 128];
    v *= own_scale(p, matrix0 + n, whole);
    if (p.out.bias != nullptr) v += load_number(p.out.bias, matrix0 + n, p.out.bias_dtype);
    if (p.out.activates) v = activated(p.out, v);
    store_number(p.out.out, (rows.first + row) * p.out.ld + n, p.out.dtype, v);
  }
}

template <class Math>
__global__ void __launch_bounds__(Math::kThreads, 2)
    nvfp4_kernel(const __grid_constant__ CUtensorMap map, const __grid_constant__ CUtensorMap end,
                 const __grid_constant__ Nvfp4Params p, const __grid_constant__ DecodeRows given) {
  extern __shared__ __align__(1024) uint8_t smem[];
  // NOTE: a number that the compiler sees is the same in all lanes: addresses stay uniform.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = threadIdx.x % 32;
  const Nvfp4Tile<Math> own_tile(p, static_cast<int>(tile::cluster_index()));
  const int tile_n = own_tile.tile_n;
  DecodeRows rows = given;
  const bool early = p.experts == nullptr ? rows.early() : p.stands;
  if (!early) tile::await_predecessors();
  if (p.experts != nullptr) {
    const int expert = __ldcg(p.experts + own_tile.block);
    rows.first = own_tile.block, rows.count = 1;
    rows.group = expert >= 0 && expert < p.matrices ? expert : -1;
  } else if (!rows.begin(own_tile.block)) {
    return;
  }
  if (rows.group < 0) {
    if (early) tile::await_predecessors();
    const int n = tile_n * Math::kGroups * kNvfp4Rows;
    if (tile::cluster_rank() == 0)
      clear<Math::kThreads>(p.out, rows, n, min(p.n, n + Math::kGroups * kNvfp4Rows));
    return;
  }
  const Nvfp4Place<Math> at(p, smem);
  const int row0 = p.experts == nullptr ? rows.first : rows.first / p.places.each;  // of x
  float whole = 0;
  if (warp == Math::kMath / 32) {
    at.start(at.mine() * p.cluster * Math::kParts);
    if (tile::elect_one()) {
      if constexpr (!Math::kMakes) tile::tma_prefetch(&map), tile::tma_prefetch(&end);
      at.ask_first(rows.group, tile_n, row0);
    }
    __syncwarp();
  } else {
    // NOTE: not behind the products, where they would be waited for.
    whole = scale_of(p, rows.group);
    tile::touch(p.out.out), tile::touch(p.out.act);
  }
  __syncthreads();
  if (p.cluster > 1 && !at.over()) tile::cluster_arrive_relaxed();  // who has waited may send
  tile::let_dependents_start();

  if (warp >= Math::kMath / 32) {
    if (warp == Math::kMath / 32 && tile::elect_one())
      at.ask_all({map, end}, rows.group, tile_n, row0, early);
    __syncwarp();
    if (p.cluster > 1) {
      if (at.over()) tile::cluster_arrive();
      tile::cluster_wait();
    }
    return;
  }

  if constexpr (Math::kMakes) {
    if (early) tile::await_predecessors();
    make_rows<Math::kMath>(p.in, p.places, p.k, rows, at.first, at.length, smem + 1024);
    tile::fence_async_proxy();
    tile::named_barrier(2, Math::kMath);
  }
  float d[Math::kFloats] = {};
  // Warpgroups of a tile have one quad, those of its next part the next.
  const int part = warp / Math::kWarps, own = warp - part * Math::kWarps;
  const auto multiply = [&](auto of_mx) {
    constexpr bool kMx = of_mx.value;
    // NOTE: worked out here, once.
    const auto lane_at = [](uint32_t v) { return static_cast<uint32_t>(tile::opaque(v)); };
    const int inside = Math::kInStage == 1 ? 0 : part;  // of a stage
    const uint32_t codes = lane_at(at.w(0) + (inside * 4 + own) * kNvfp4Codes + lane * 16);
    constexpr int kScales = kMx ? kMxfp4Scales : kNvfp4Scales;
    const uint32_t scales =
        lane_at(at.w_scales(0) + (inside * 4 + own) * kScales + lane / 4 * (kScales / 8));
    uint32_t x[2] = {at.base, 0};
    if constexpr (Math::kAlone) {
#pragma unroll
      for (int q = 0; q < 2; ++q)
        x[q] = lane_at(at.base + tile::swizzle128(lane % 8, q * 4 + lane / 8));
    }
    int s = part - inside, phase = 0;
#pragma unroll 1
    for (int i = part; i < at.length; i += Math::kParts) {
      tile::mbar_wait(at.full + 8 * s, phase);
      const uint32_t off = s * (Math::kInStage * Math::kW);
      const QuadPlace quad{codes + off, scales + off,
                           (Math::kMakes ? i : s * Math::kInStage + inside) * Math::kX};
      if constexpr (Math::kAlone) {
        multiply_alone<Math, kMx>(d, quad, x);
      } else {
        multiply_quad<Math, kMx>(d, quad, x[0]);
      }
      __syncwarp();
      if (tile::elect_one()) tile::mbar_arrive(at.bars + kNvfp4MostStages + s);
      s += Math::kParts / Math::kInStage;
      if (s >= p.stages) s -= p.stages, phase ^= 1;
    }
  };
  if (!Math::kHalf && p.mx) {
    multiply(std::bool_constant<!Math::kHalf>{});
  } else {
    multiply(std::false_type{});
  }
  if (p.cluster > 1) {
    if (at.over()) tile::cluster_arrive();
    tile::cluster_wait();
  } else if (at.over()) {
    tile::named_barrier(2, Math::kMath);  // all have read their stages
  }
  const int parts = p.cluster * Math::kParts;
  float4* const all =
      reinterpret_cast<float4*>(at.sums()) + (at.rank * Math::kParts + part) * 32 + lane;
#pragma unroll
  for (int j = 0; j < Math::kCols / 8; ++j) {
    const int fragment = j * Math::kWarps + own, turn = p.of_cluster(fragment);
    send_sums(
        all + turn * parts * 32, d + 4 * j, p.cluster, [&] { return at.sums_bar(); },
        [&] { return fragment - turn * p.cluster; });
  }
  if (p.cluster > 1) {
    tile::mbar_wait_sent(at.sums_bar(), 0);
  } else {
    tile::named_barrier(2, Math::kMath);
  }
  const int64_t matrix0 = int64_t{rows.group} * at.p.n;
  const int n0 = tile_n * Math::kGroups * kNvfp4Rows;
  if constexpr (Math::kCols == 8) return finish_few<Math>(at, rows, n0, matrix0, whole);
  finish_fragments<Math::kWarps, Math::kMath, Math::kParts>(
      at, at.rank, n0, rows.count, [&](int col, int n, int count, float (&v)[8]) {
        write_scaled(at.p, rows, matrix0, whole, col, n, count, v);
      });
}

}  // namespace te_mx::sm90
