// The quantizer's first half: where a thread's 8 x 8 elements lie, reading them, block maxima and
// scale bytes of both directions, column sums.
#pragma once

#include "quantize/quantize_input.cuh"

namespace te_mx::sm90 {

inline constexpr int kQuantizeThreads = 256;

// What the blocks of a direction are multiplied by, [block][row]: 2^(127 - e) or NaN, in bf16.
struct BlockFactors {
  alignas(16) uint16_t of[4][128];
};

// NOTE: the codes stay last; fused_patch.cuh lays other things over them and behind them.
struct QuantizeSmem {
  float sums[4][128];  // of the columns over 32 rows
  TileScales row, col;
  BlockFactors row_factors, col_factors;
  alignas(8) uint8_t nan[kTileWarps];  // some warp saw a NaN block
  alignas(16) uint8_t
      codes[128][128];  // of the columns, [col][row], 16-byte chunks xored with (col / 8) % 8
};

// Where codes go, and whether in vectors. A direction that is not asked for has no codes.
struct CodesOut {
  uint8_t* codes;
  int64_t ld;
  int last_width;  // of the last tile: bytes before it may be written
  bool enabled, packed, vectors;
  bool nibbles;  // plain codes of MXFP4, two a byte; ld and last_width count bytes
};

struct QuantizeParams {
  QuantizeTask a;
  CodesOut row, col;
  bool x_vectors;  // x has 16-byte vectors of 8 elements only, aligned (pairs of vectors for fp32)
  int row_tiles, col_tiles;
  int last_rows, last_cols;  // of x, in the last tiles
  int group_bits;            // 2^group_bits row tiles are walked together
  bool beside;               // does not depend on the kernel before it
  bool by_rows;              // packed rows are aligned each by itself
};

// A tile's place, and what exists of it.
struct Tile {
  int rt, ct;  // in the operands
  bool last_row, last_col;
  int64_t r0;      // its first row in x, and in the codes of the rows
  int rows, cols;  // of it that exist
  int matrix;      // of several of one size
  __device__ __forceinline__ int64_t k0() const { return static_cast<int64_t>(rt) * 128; }
  __device__ __forceinline__ int64_t c0() const { return static_cast<int64_t>(ct) * 128; }
};

// A tile of one matrix, by its place.
__device__ __forceinline__ void place_tile(Tile& t, const QuantizeParams& p, int rt, int ct) {
  t.rt = rt, t.ct = ct;
  t.last_row = t.rt == p.row_tiles - 1, t.last_col = t.ct == p.col_tiles - 1;
  t.r0 = t.k0(), t.matrix = 0;
  t.rows = t.last_row ? p.last_rows : 128, t.cols = t.last_col ? p.last_cols : 128;
}

// The tile of a CTA in the order of a grid, `rows_at_once` counting groups of row tiles; false when
// there is none. The last rows are first: who wrote the matrix wrote them last, and who reads the
// codes begins with the first ones, so some of both is in L2.
__device__ __forceinline__ bool find_tile(Tile& t, const QuantizeParams& p, int rows_at_once) {
  const int before = (rows_at_once << p.group_bits) + (blockIdx.x & ((1 << p.group_bits) - 1));
  place_tile(t, p, p.row_tiles - 1 - before, static_cast<int>(blockIdx.x >> p.group_bits));
  return t.rt >= 0;
}
__device__ __forceinline__ bool find_tile(Tile& t, const QuantizeParams& p) {
  return find_tile(t, p, blockIdx.y + gridDim.y * blockIdx.z);
}

// Where a thread's elements lie in the tile.
struct Place {
  int lane_r, lane_c;  // this lane's place in the warp's 4 x 8 lanes
  int band, half;      // the warp's place: 32 rows, 64 columns
  int r, c;            // the first element
  int row_block;       // of its columns

  __device__ __forceinline__ explicit Place(int thread = threadIdx.x) {
    const int lane = thread % 32, warp = thread / 32;
    lane_r = lane / 8, lane_c = lane % 8, band = warp / 2, half = warp % 2;
    r = 32 * band + 8 * lane_r, c = 64 * half + 8 * lane_c, row_block = c / 32;
  }
  // After `fold`, the first of two neighbouring rows or columns that a lane ends with.
  __device__ __forceinline__ int folded_row() const { return r + 4 * (lane_c & 1) + (lane_c & 2); }
  __device__ __forceinline__ int folded_col() const { return c + 4 * (lane_r & 1) + (lane_r & 2); }
};

// `rows` and `cols` of what lies at and after `from` exist, the rest is zero. Without vectors,
// `slot` is 64 bytes of shared memory of this thread's own.
template <class T>
__device__ __forceinline__ void load_patch(typename Input<T>::Word (&x)[8][4], const T* from,
                                           int64_t stride, int rows, int cols, bool vectors,
                                           void* slot) {
  constexpr int kVectors = Input<T>::kVectors, kAtOnce = 4 / kVectors;
  if (vectors) {
    if (cols <= 0) rows = 0;
#pragma unroll
    for (int k = 0; k < 8; ++k, from += stride) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        uint4 v = make_uint4(0, 0, 0, 0);
        if (k < rows) v = __ldg(reinterpret_cast<const uint4*>(from) + j);
        reinterpret_cast<uint4*>(x[k])[j] = v;
      }
    }
    return;
  }
#pragma unroll
  for (int k = 0; k < 8; k += kAtOnce) {
#pragma unroll 1
    for (int i = 0; i < kAtOnce; ++i, from += stride) {
      for (int j = 0; j < 8; ++j) {
        static_cast<T*>(slot)[8 * i + j] =
            k + i < rows && j < cols ? from[j] : static_cast<T>(0.0f);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      reinterpret_cast<uint4*>(x[k + i / kVectors])[i % kVectors] = static_cast<uint4*>(slot)[i];
    }
  }
}

// The same of one row.
template <class T>
__device__ __forceinline__ void load_row(typename Input<T>::Word (&x)[4], const T* from, int cols,
                                         bool vectors, void* slot) {
  constexpr int kVectors = Input<T>::kVectors;
  if (vectors) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      uint4 v = make_uint4(0, 0, 0, 0);
      if (cols > 0) v = __ldg(reinterpret_cast<const uint4*>(from) + j);
      reinterpret_cast<uint4*>(x)[j] = v;
    }
    return;
  }
#pragma unroll 1
  for (int j = 0; j < 8; ++j) static_cast<T*>(slot)[j] = j < cols ? from[j] : static_cast<T>(0.0f);
#pragma unroll
  for (int j = 0; j < kVectors; ++j)
    reinterpret_cast<uint4*>(x)[j] = static_cast<const uint4*>(slot)[j];
}

// Lanes that differ in bits kBit and 2 kBit exchange halves of what they have: of four maxima each,
// everyone ends with one over all four lanes.
template <class T, int kBit>
__device__ __forceinline__ typename Input<T>::Word fold(const typename Input<T>::Word (&m)[4]) {
  using In = Input<T>;
  const bool upper = threadIdx.x & kBit, upper2 = threadIdx.x & (2 * kBit);
  const auto halve = [](bool upper, typename In::Word a, typename In::Word b, int lanes) {
    return In::larger(upper ? b : a, In::shuffle_xor(upper ? a : b, lanes));
  };
  return halve(upper2, halve(upper, m[0], m[2], kBit), halve(upper, m[1], m[3], kBit), 2 * kBit);
}

// Entries and factors of the blocks in rows r and r + 1, from their largest magnitudes; the range
// of the tile.
template <class T, tile::Fp8 kFmt>
__device__ __forceinline__ void add_pair(QuantizeSmem& s, TileScales& scales, BlockFactors& factors,
                                         typename Input<T>::Word most, int r, int b,
                                         const QuantizeTask& a) {
  const BlockPair pair = block_pair<T, kFmt>(most, a);
  scales.add_blocks(r, b, pair.entries);
  *reinterpret_cast<uint32_t*>(&factors.of[b][r]) = pair.factors;
  scales.add_range(pair.entries);
  const bool nan = __any_sync(~0u, pair.nan);
  if (threadIdx.x % 32 == 0) s.nan[threadIdx.x / 32] = nan;
}

template <class T, tile::Fp8 kFmt>
__device__ __forceinline__ void scan_rows(QuantizeSmem& s, const typename Input<T>::Word (&x)[8][4],
                                          const Place& at, const QuantizeTask& a) {
  using In = Input<T>;
  typename In::Word m[4];
#pragma unroll
  for (int k = 0; k < 8; k += 2) {
    m[k / 2] = In::larger_halves(
        In::larger(In::larger(x[k][0], x[k][1]), In::larger(x[k][2], x[k][3])),
        In::larger(In::larger(x[k + 1][0], x[k + 1][1]), In::larger(x[k + 1][2], x[k + 1][3])));
  }
  add_pair<T, kFmt>(s, s.row, s.row_factors, fold<T, 1>(m), at.folded_row(), at.row_block, a);
}

template <class T, tile::Fp8 kFmt>
__device__ __forceinline__ void scan_cols(QuantizeSmem& s, const typename Input<T>::Word (&x)[8][4],
                                          const Place& at, const QuantizeTask& a) {
  using In = Input<T>;
  typename In::Word m[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    m[j] = In::larger(x[0][j], x[1][j]);
#pragma unroll
    for (int k = 2; k < 8; ++k) m[j] = In::larger(m[j], x[k][j]);
  }
  add_pair<T, kFmt>(s, s.col, s.col_factors, fold<T, 8>(m), at.folded_col(), at.band, a);
}

// The sums of a thread's 8 columns over its rows, added over the warp's 32 rows: everyone ends with
// those of the columns folded_col() and the next one.
__device__ __forceinline__ float2 fold_sums(const float2 (&sum)[4], const Place& at) {
  const bool upper = at.lane_r & 1, upper2 = at.lane_r & 2;
  const auto halve = [](bool upper, float2 a, float2 b, int lanes) -> float2 {
    const float2 keep = upper ? b : a, send = upper ? a : b;
    return {keep.x + __shfl_xor_sync(~0u, send.x, lanes),
            keep.y + __shfl_xor_sync(~0u, send.y, lanes)};
  };
  return halve(upper2, halve(upper, sum[0], sum[2], 8), halve(upper, sum[1], sum[3], 8), 16);
}

// Sums of the columns over the warp's 32 rows.
template <class T>
__device__ __forceinline__ void sum_cols(float (&sums)[4][128],
                                         const typename Input<T>::Word (&x)[8][4],
                                         const Place& at) {
  float2 sum[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    sum[j] = Input<T>::values(x[0][j]);
#pragma unroll
    for (int k = 1; k < 8; ++k) {
      const float2 v = Input<T>::values(x[k][j]);
      sum[j].x += v.x, sum[j].y += v.y;
    }
  }
  *reinterpret_cast<float2*>(&sums[at.band][at.folded_col()]) = fold_sums(sum, at);
}

}  // namespace te_mx::sm90
