// Routed rows times the weights of their experts, for few rows an expert: weights are read once and
// as they lie, and reading them is what it costs.
//
// CTAs stay and take items in turns: an item is a piece of up to 8 rows of one expert, 16 or 32
// where they have more, and some groups of 16 rows of its weights. A warp has one group and one
// part of k. It walks through chunks of 128 k with a ring of copies in flight that goes on from
// item to item:
//
//   chunk of an item    16 rows x 128 codes and their 64 scale bytes     shared memory, a stage
//   tokens              8 rows x 128 codes, their scales, a column       registers, from L1
//   per block of 32 k   two mma.sync in fp16, exact as the contract wants it (c = 1); the sum times
//                       both scales is added to the sum so far
//
// Parts of k are added up in order, and how k is cut depends on k alone. So the bits of a row do
// not depend on other rows, on where it stands in the lists nor on n.
#pragma once

#include "common/numbers.cuh"
#include "common/shares.cuh"
#include "moe/moe_codes.cuh"
#include "moe/moe_list.cuh"
#include "mxtile/sm90/barrier.cuh"
#include "mxtile/sm90/copy_async.cuh"
#include "mxtile/sm90/mma.cuh"
#include "te_mx/sm90_layout.h"

namespace te_mx::sm90::moe {

inline constexpr int kWarps = 8, kRows = 16, kChunk = 128;

struct MoeParams {
  const uint8_t *w, *w_scales, *x, *x_scales;
  Routing routing;
  int64_t experts;
  int n, k, blocks;    // of 32 k
  int chunks, parts;   // of k
  Shares shares;       // of the chunks
  int groups, slices;  // groups of an item, a power of two; items of a piece
  int shift;           // rows of an item: 1 << shift
  int first_piece;     // of the launch
  bool packed;         // weights lie as tiles, each with a class, `tiles` of them in a step of k
  int tiles;
  bool e5m2;  // tokens, else E4M3
  const void* bias;
  DType bias_dtype;
  const float* weights;
  void* out;
  DType out_dtype;
};

template <Element kW>
struct Stage {
  static constexpr int kRowBytes = kChunk * (kW == Element::e2m1 ? 4 : 8) / 8;
  // Rows lie so that the eight rows that a warp reads at once meet all banks.
  static constexpr int kStride = kW == Element::e2m1 ? kRowBytes + 16 : kRowBytes + 32;
  alignas(16) uint8_t codes[kRows * kStride];
  alignas(16) uint8_t scales[kRows * 4];
  uint32_t tile_class;  // of packed weights, whose scales are words of sm90_layout.h
};

// kColumns: of eight tokens, in a piece. kCtas: of an SM.
template <Element kW, int kColumns, int kCtas>
struct Room {
  static constexpr int kTokens = kColumns * kColumn;
  static constexpr int kStages = kW == Element::e2m1           ? (kColumns == 4 ? 5 : 6)
                                 : kColumns == 4 || kCtas == 3 ? 3
                                                               : 4;
  Stage<kW> ring[kWarps][kStages];
  float sums[2][kWarps][kTokens][kRows + 1];
  int rows[2][kTokens];
  int counts[kWarps];
  Piece pieces[1];  // as many as there may be
};
template <Element kW, int kColumns, int kCtas>
constexpr int64_t room_bytes(int64_t pieces) {
  return static_cast<int64_t>(sizeof(Room<kW, kColumns, kCtas>) + pieces * sizeof(Piece));
}

// Where a warp stands: an item, its group of rows and a chunk of its part of k.
template <Element kW>
struct Walk {
  static constexpr int kPieces = Stage<kW>::kRowBytes / 16;  // copies of a row
  int item, slice, chunk, first, last;                       // chunks of the part: [first, last)
  Piece piece;
  const uint8_t *w, *scales;  // the lane's own of the chunk

  __device__ __forceinline__ void enter(const MoeParams& p, const Piece* pieces, int to, int items,
                                        int group, int lane) {
    item = to, chunk = first;
    if (item >= items) return;
    slice = item % p.slices, piece = pieces[item / p.slices];
    // The last group may overlap the one before it.
    const int row0 = min((slice * p.groups + group) * kRows, p.n - kRows);
    const int64_t row = int64_t{piece.expert} * p.n + row0;
    w = p.w + (row + lane / kPieces) * row_bytes(p) + lane % kPieces * 16 +
        chunk * Stage<kW>::kRowBytes;
    if (p.packed) {  // lanes below 16 have a row each, the next one the class
      const int64_t tile = (int64_t{piece.expert} * p.chunks + chunk) * p.tiles + row0 / 128;
      scales = p.w_scales + 4 * (tile * kScaleWords + (lane < kRows ? row0 % 128 + lane : 128));
    } else {
      scales = p.w_scales + (row + lane / 2) * p.blocks + lane % 2 * 2 + chunk * 4;
    }
  }
  __device__ __forceinline__ void next(const MoeParams& p) {
    w += Stage<kW>::kRowBytes, scales += p.packed ? 4 * p.tiles * kScaleWords : 4;
    ++chunk;
  }
  static __device__ __forceinline__ int64_t row_bytes(const MoeParams& p) {
    return kW == Element::e2m1 ? p.k / 2 : p.k;
  }
};

inline constexpr uint32_t kOne = 127;  // the scale byte of what is not there

// Asks for the chunk where `walk` stands; returns two of its scale bytes, which the lane stores
// when they are there.
template <Element kW>
__device__ __forceinline__ uint32_t ask(const MoeParams& p, const Walk<kW>& walk, Stage<kW>& stage,
                                        int lane) {
  constexpr int kPieces = Walk<kW>::kPieces, kStep = 32 / kPieces;  // rows at a time
  const int64_t row_bytes = Walk<kW>::row_bytes(p);
  const bool there = walk.chunk * Stage<kW>::kRowBytes + lane % kPieces * 16 < row_bytes;
  uint8_t* const to = stage.codes + lane / kPieces * Stage<kW>::kStride + lane % kPieces * 16;
#pragma unroll
  for (int i = 0; i < kRows / kStep; ++i) {
    tile::copy16_async(to + i * kStep * Stage<kW>::kStride, walk.w + i * kStep * row_bytes, there);
  }
  const uint8_t* const from = walk.scales;
  if (p.packed) {
    void* const word =
        lane < kRows ? stage.scales + 4 * lane : reinterpret_cast<uint8_t*>(&stage.tile_class);
    if (lane <= kRows) tile::copy4_async(word, from);
    return 0;
  }
  const int left = p.blocks - walk.chunk * 4 - lane % 2 * 2;
  if (p.blocks % 2 == 0) {
    return left > 0 ? __ldg(reinterpret_cast<const uint16_t*>(from)) : kOne * 0x101;
  }
  return (left > 0 ? __ldg(from) : kOne) | (left > 1 ? __ldg(from + 1) : kOne) << 8;
}

// A chunk of a lane's token: eight codes of every block, and all four scale bytes.
struct TokenChunk {
  uint2 codes[4];
  uint32_t scales;

  // From where the lane's of the chunk begin; `left`: blocks from there on. `aligned`: of four
  // scales there are all or none.
  __device__ __forceinline__ void load(const uint8_t* from, const uint8_t* bytes, int left,
                                       bool aligned) {
    if (left >= 4) {
#pragma unroll
      for (int b = 0; b < 4; ++b) codes[b] = __ldg(reinterpret_cast<const uint2*>(from + b * 32));
    } else {
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        codes[b] = make_uint2(0, 0);
        if (b < left) codes[b] = __ldg(reinterpret_cast<const uint2*>(from + b * 32));
      }
    }
    if (aligned) {
      scales = __ldg(reinterpret_cast<const uint32_t*>(bytes));
    } else {
      scales = 0;
#pragma unroll
      for (int b = 0; b < 4; ++b) scales |= (b < left ? __ldg(bytes + b) : kOne) << 8 * b;
    }
  }
};

// The weights of a block as both operands of two instructions: rows g and g + 8 from `low` and
// `high` on.
template <Element kW>
struct WeightBlock {
  uint32_t a[4], b[4];
  __device__ __forceinline__ WeightBlock(const uint8_t* low, const uint8_t* high) {
    Eight<kW> first, second;
    first.load(low), second.load(high);
    a[0] = first.word[0], a[1] = second.word[0], a[2] = first.word[1], a[3] = second.word[1];
    b[0] = first.word[2], b[1] = second.word[2], b[2] = first.word[3], b[3] = second.word[3];
  }
  // The sum of the block: these rows, columns 2t and 2t + 1.
  template <Element kX>
  __device__ __forceinline__ void multiply(uint2 codes, float (&d)[4]) const {
    uint32_t tokens[4];
    Eight<kW>::template of_token<kX>(codes, tokens);
    d[0] = d[1] = d[2] = d[3] = 0.0f;
    tile::mma_f16(d, a, tokens[0], tokens[1]);
    tile::mma_f16(d, b, tokens[2], tokens[3]);
  }
};

// `columns` of the kColumns hold tokens.
template <Element kW, Element kX, int kColumns>
__device__ __forceinline__ void multiply(const Stage<kW>& stage, const TokenChunk (&x)[kColumns],
                                         int columns, bool packed, float (&sums)[kColumns][4],
                                         int lane) {
  constexpr int kMore = Eight<kW>::kExponent, kBytes = Eight<kW>::kBytes;
  const int g = lane / 4, t = lane % 4;
  uint32_t w0 = *reinterpret_cast<const uint32_t*>(stage.scales + 4 * g);
  uint32_t w1 = *reinterpret_cast<const uint32_t*>(stage.scales + 4 * (g + 8));
  if (packed && stage.tile_class < 2)  // fp32 numbers, powers of two
    w0 = (w0 >> 23) * 0x01010101u, w1 = (w1 >> 23) * 0x01010101u;
  uint32_t x0[kColumns], x1[kColumns];
  bool near = true;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    x0[c] = __shfl_sync(~0u, x[c].scales, 8 * t);
    x1[c] = __shfl_sync(~0u, x[c].scales, 8 * t + 4);
    near = near && all_near(w0, w1, x0[c], x1[c]);
  }
  const uint8_t* const low = stage.codes + g * Stage<kW>::kStride + t * kBytes;
  const uint8_t* const high = low + 8 * Stage<kW>::kStride;
  if (__all_sync(~0u, near)) {
    // Bytes that are near leave room for kMore.
    const uint32_t more0 = w0 + kMore * 0x01010101u, more1 = w1 + kMore * 0x01010101u;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const WeightBlock<kW> weights(low + b * 4 * kBytes, high + b * 4 * kBytes);
      const float a0 = power(more0, b), a1 = power(more1, b);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        if (kColumns > 1 && c >= columns) break;
        float d[4], (&sum)[4] = sums[c];
        weights.template multiply<kX>(x[c].codes[b], d);
        const float b0 = power(x0[c], b), b1 = power(x1[c], b);
        sum[0] = fmaf(d[0] * a0, b0, sum[0]), sum[1] = fmaf(d[1] * a0, b1, sum[1]);
        sum[2] = fmaf(d[2] * a1, b0, sum[2]), sum[3] = fmaf(d[3] * a1, b1, sum[3]);
      }
    }
    return;
  }
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    const WeightBlock<kW> weights(low + b * 4 * kBytes, high + b * 4 * kBytes);
    const uint32_t e0 = byte_of(w0, b), e1 = byte_of(w1, b);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if (kColumns > 1 && c >= columns) break;
      float d[4], (&sum)[4] = sums[c];
      weights.template multiply<kX>(x[c].codes[b], d);
      const uint32_t f0 = byte_of(x0[c], b), f1 = byte_of(x1[c], b);
      sum[0] += scaled(d[0], e0, f0, kMore), sum[1] += scaled(d[1], e0, f1, kMore);
      sum[2] += scaled(d[2], e1, f0, kMore), sum[3] += scaled(d[3], e1, f1, kMore);
    }
  }
}

// Adds the parts of an item up and writes its rows of out.
template <class SharedRoom>
__device__ __forceinline__ void finish(const MoeParams& p, const SharedRoom& room, int turn,
                                       const Piece& piece, int slice) {
  for (int i = threadIdx.x; i < SharedRoom::kTokens << p.shift; i += kWarps * 32) {
    const int token = i >> p.shift, at = i & ((1 << p.shift) - 1), group = at / kRows;
    const int row = room.rows[turn][token];
    const int group0 = (slice * p.groups + group) * kRows;
    if (row < 0 || group0 >= p.n) continue;
    const int col = min(group0, p.n - kRows) + at % kRows;
    float sum = 0.0f;
    for (int part = 0; part < p.parts; ++part) {
      const float v = room.sums[turn][group * p.parts + part][token][at % kRows];
      sum = part == 0 ? v : sum + v;
    }
    if (p.bias != nullptr)
      sum += load_number(p.bias, int64_t{piece.expert} * p.n + col, p.bias_dtype);
    if (p.weights != nullptr) sum *= __ldg(p.weights + row);
    store_number(p.out, int64_t{row} * p.n + col, p.out_dtype, sum);
  }
}

template <Element kW, int kColumns, int kCtas>
__global__ void __launch_bounds__(kWarps * 32, kCtas)
    moe_gemm_kernel(const __grid_constant__ MoeParams p) {
  extern __shared__ __align__(128) uint8_t smem[];
  using SharedRoom = Room<kW, kColumns, kCtas>;
  auto& room = *reinterpret_cast<SharedRoom*>(smem);
  constexpr int kStages = SharedRoom::kStages;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int part = warp % p.parts, group = warp / p.parts;

  // NOTE: parameters are new to every launch; their lines are asked for before the wait.
  tile::touch(p.experts), tile::touch(p.slices), tile::touch(p.out), tile::touch(p.x_scales);
  if (!p.routing.stands) tile::await_predecessors();
  const PieceList<SharedRoom::kTokens> list(p.routing, p.experts);
  const int items = list.find(room.pieces, room.counts, p.first_piece) * p.slices;
  const int step = static_cast<int>(gridDim.x);
  Stage<kW>* const ring = room.ring[warp];

  Walk<kW> asked;
  asked.first = p.shares.begin(part), asked.last = p.shares.begin(part + 1);
  asked.enter(p, room.pieces, static_cast<int>(blockIdx.x), items, group, lane);
  Walk<kW> now = asked;
  const auto ask_next = [&](int stage) {
    uint32_t scales = 0;
    if (asked.item < items) {
      scales = ask<kW>(p, asked, ring[stage], lane);
      asked.next(p);
      if (asked.chunk == asked.last)
        asked.enter(p, room.pieces, asked.item + step, items, group, lane);
    }
    tile::end_copy_group();
    return scales;
  };
  const auto store_scales = [&](int stage, uint32_t scales) {
    if (p.packed) return;
    *reinterpret_cast<uint16_t*>(ring[stage].scales + 2 * lane) = static_cast<uint16_t>(scales);
  };

  uint32_t early[kStages - 1];
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) early[i] = ask_next(i);
  // The rows of the lane in every column of an item.
  struct Rows {
    int of[kColumns];
  };
  const auto rows_of = [&](const Walk<kW>& walk) {
    Rows rows;
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      rows.of[c] = walk.item < items ? list.row(walk.piece, kColumn * c + lane / 4) : -1;
    return rows;
  };
  Rows rows = rows_of(now);
  // NOTE: not before the lists are there, which who comes after the next kernel may rely on.
  if (p.routing.stands) tile::await_predecessors();
  tile::let_dependents_start();
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) store_scales(i, early[i]);

  int stage = 0, late_stage = -1, turn = 0;
  uint32_t late = 0;
  for (; now.item < items; turn ^= 1) {
    Walk<kW> next = now;
    next.enter(p, room.pieces, now.item + step, items, group, lane);
    const Rows next_rows = rows_of(next);
    int64_t at[kColumns];  // of codes; k is whole blocks, so scales lie at their 32nd
    int columns = 0;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int row = rows.of[c];
      if (kColumns == 1 || __any_sync(~0u, row >= 0)) columns = c + 1;
      // A place without a row multiplies token 0, for nobody.
      const int64_t token = row < 0 ? 0 : row / p.routing.a_div;
      at[c] = token * p.k + lane % 4 * 8 + now.first * kChunk;
    }
    int left = p.blocks - now.first * 4;
    float sums[kColumns][4] = {};
    for (int chunk = now.first; chunk < now.last; ++chunk) {
      TokenChunk x[kColumns];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        x[c].load(p.x + at[c], p.x_scales + (at[c] >> 5), left, p.blocks % 4 == 0);
        at[c] += kChunk;
      }
      left -= 4;
      __syncwarp();
      if (late_stage >= 0) store_scales(late_stage, late);
      late_stage = stage == 0 ? kStages - 1 : stage - 1;
      late = ask_next(late_stage);
      tile::wait_copy_groups<kStages - 1>();
      __syncwarp();
      if (p.e5m2) {
        multiply<kW, Element::e5m2, kColumns>(ring[stage], x, columns, p.packed, sums, lane);
      } else {
        multiply<kW, Element::e4m3, kColumns>(ring[stage], x, columns, p.packed, sums, lane);
      }
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    float (*const to)[kRows + 1] = room.sums[turn][warp];
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int first = kColumn * c;
      to[first + 2 * t][g] = sums[c][0], to[first + 2 * t + 1][g] = sums[c][1];
      to[first + 2 * t][g + 8] = sums[c][2], to[first + 2 * t + 1][g + 8] = sums[c][3];
      if (warp == 0 && t == 0) room.rows[turn][first + g] = rows.of[c];
    }
    __syncthreads();
    finish(p, room, turn, now.piece, now.slice);
    now = next, rows = next_rows;
  }
  tile::wait_copy_groups<0>();
}

}  // namespace te_mx::sm90::moe
