// Both directions of a bf16 matrix to MXFP4 from one read, rounded stochastically or to nearest
// even, the columns after a Hadamard transform or without one.
//
//   read; block maxima of the rows; columns transformed in fp32, to shared memory; their maxima
//   classes, scales
//   row by row: read again (from L2), random words, codes of both directions by the same words
//
// A thread has 8 x 8 elements, as in the quantizer. The loop over its rows is not unrolled: ten
// rounds of Philox, twice, and the roundings of both directions are code enough.
#include "fused/fused_patch.cuh"
#include "quantize/random_codes.cuh"

namespace te_mx::sm90 {

namespace {

using Bf16 = __nv_bfloat16;
constexpr tile::Fp8 kFmt = tile::Fp8::e2m1;
constexpr int kRowStep = 4 * kQuantizeThreads;  // between a thread's rows of four words

// Transforms a thread's columns with those of the lanes below it, two at a time, to `slot`, and
// leaves their largest magnitudes. A chunk that is not `whole` stays as it is.
__device__ __forceinline__ void transform_columns(uint2* slot, uint2 (&most)[4],
                                                  const uint32_t (&x)[8][4], int size,
                                                  uint32_t signs, int place, bool whole) {
  const float factor = size == 16 ? 0.25f : __uint_as_float(0x3E3504F3u);
  const float turn = place & 1 ? -1.0f : 1.0f, turn2 = place & 2 ? -1.0f : 1.0f;
  const uint32_t mine = signs >> (8 * place);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    float2 v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t flip = (mine >> i & 1) * 0x80008000u;
      v[i] = Input<Bf16>::values(x[i][j] ^ flip);
    }
#pragma unroll
    for (int h = 1; h < 8; h *= 2) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (i & h) continue;
        const float2 a = v[i], b = v[i + h];
        v[i] = {__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y)};
        v[i + h] = {__fsub_rn(a.x, b.x), __fsub_rn(a.y, b.y)};
      }
    }
    // The sum or the difference, rounded once.
    const auto exchange = [](float v, float turn, int lanes) {
      return __fmaf_rn(v, turn, __shfl_xor_sync(~0u, v, lanes));
    };
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = {exchange(v[i].x, turn, 8), exchange(v[i].y, turn, 8)};
    if (size == 32) {
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = {exchange(v[i].x, turn2, 16), exchange(v[i].y, turn2, 16)};
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      v[i] = {__fmul_rn(v[i].x, factor), __fmul_rn(v[i].y, factor)};
      if (!whole) v[i] = Input<Bf16>::values(x[i][j]);
      const uint2 bits = {__float_as_uint(v[i].x), __float_as_uint(v[i].y)};
      slot[i * kRowStep + j * kQuantizeThreads] = bits;
      most[j] = i == 0 ? bits : Input<float>::larger(most[j], bits);
    }
  }
}

// Writes four bytes or eight of a row of `width` that are left.
template <class Word>
__device__ __forceinline__ void write_bytes(uint8_t* to, Word w, int width, bool vectors) {
  constexpr int kBytes = sizeof(Word);
  if (vectors) {
    *reinterpret_cast<Word*>(to) = w;
    return;
  }
  const uint8_t* const from = reinterpret_cast<const uint8_t*>(&w);
#pragma unroll
  for (int j = 0; j < kBytes; ++j) {
    if (j < width) to[j] = from[j];
  }
}

// Rows of a thread's codes where they lie as x does: two a byte, one a byte, or codes of E4M3.
struct CodeRows {
  uint8_t* to;
  int64_t ld;
  int rows, width;
  bool vectors, nibbles, packed;

  __device__ __forceinline__ CodeRows(const CodesOut& out, const Tile& t, const Place& at)
      : ld(out.ld), vectors(out.vectors), nibbles(out.nibbles), packed(out.packed) {
    const int half = nibbles ? 2 : 1;
    to = out.codes + (t.r0 + at.r) * ld + (t.c0() + at.c) / half;
    width = (t.last_col ? out.last_width : 128 / half) - at.c / half;
    rows = out.enabled && width > 0 ? t.rows - at.r : 0;
  }
  __device__ __forceinline__ void write(int k, uint2 w) {
    if (k < rows) {
      if (!packed) w = {tile::fp4_of_fp8x4(w.x), tile::fp4_of_fp8x4(w.y)};
      if (nibbles) {
        write_bytes(to, tile::pack_nibbles(w.x, w.y), width, vectors);
      } else {
        write_bytes(to, w, width, vectors);
      }
    }
    to += ld;
  }
};

__global__ void __launch_bounds__(kQuantizeThreads, 3)
    both_kernel(const __grid_constant__ RandomParams all) {
  extern __shared__ __align__(16) char smem[];
  QuantizeSmem& s = *reinterpret_cast<QuantizeSmem*>(smem);
  // Word j of the thread's row k lies at k * kRowStep + j * kQuantizeThreads.
  uint2* const slot = reinterpret_cast<uint2*>(&s.codes[0][0]) + threadIdx.x;
  tile::let_dependents_start();
  tile::await_predecessors();
  const QuantizeParams& p = all.q;
  Tile t;
  if (!find_rows(t, p, all.groups)) return;
  const Place at;
  const Bf16* from = static_cast<const Bf16*>(p.a.x) + (t.r0 + at.r) * p.a.x_stride + t.c0() + at.c;
  const bool sums = p.a.col_sum != nullptr;
  {
    uint32_t x[8][4];
    load_patch<Bf16>(x, from, p.a.x_stride, t.rows - at.r, t.cols - at.c, p.x_vectors,
                     &s.codes[0][0] + 64 * threadIdx.x);
    // What was staged for one thread lies where others leave what they transform.
    if (!p.x_vectors) __syncthreads();
    if (threadIdx.x == 0) s.row.clear(), s.col.clear();
    if (sums) sum_cols<Bf16>(s.sums, x, at);
    if (p.row.enabled) scan_rows<Bf16, kFmt>(s, x, at, p.a);
    if (p.col.enabled && all.size == 0) scan_cols<Bf16, kFmt>(s, x, at, p.a);
    if (p.col.enabled && all.size != 0) {
      uint2 most[4];
      const bool whole = (at.r & ~(all.size - 1)) + all.size <= t.rows;
      transform_columns(slot, most, x, all.size, all.signs, at.lane_r, whole);
      add_pair<float, kFmt>(s, s.col, s.col_factors, fold<float, 8>(most), at.folded_col(), at.band,
                            p.a);
    }
  }
  __syncthreads();
  const TileClasses classes = finish_scales<kFmt, true>(p, s, t, sums);

  const Shifts row_shifts(s.row, classes.row_exponent, p.row.packed, classes.row);
  const Shifts col_shifts(s.col, classes.col_exponent, p.col.packed, classes.col);
  tile::Fp4Rounding c0, c1, c2, c3;
  if (p.col.enabled) {
    const uint4 scale = *reinterpret_cast<const uint4*>(&s.col_factors.of[at.band][at.c]);
    const uint4 target = col_shifts.of_cols(at.c);
    c0 = col_shifts.fp4(scale.x, target.x), c1 = col_shifts.fp4(scale.y, target.y);
    c2 = col_shifts.fp4(scale.z, target.z), c3 = col_shifts.fp4(scale.w, target.w);
  }
  CodeRows rows(p.row, t, at);
  const bool in_place = p.col.enabled && p.a.col_lies_as_x;
  CodeRows cols(in_place ? p.col : CodesOut{}, t, at);
  const bool random = all.seed != nullptr;
  const uint2 key = random ? key_of(all.seed) : make_uint2(0, 0);
  uint64_t number = static_cast<uint64_t>(all.first + (t.r0 + at.r) * p.a.cols + t.c0() + at.c);
  Eight<Bf16> next;
  const auto load = [&](int k) {
    load_8(next, from, k < t.rows - at.r ? t.cols - at.c : 0, p.x_vectors);
    from += p.a.x_stride;
  };
  load(0);
#pragma unroll 1
  for (int k = 0; k < 8; ++k, number += p.a.cols) {
    uint32_t x[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) x[j] = next.words[j];
    if (k < 7) load(k + 1);
    uint2 wide[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 v = Input<Bf16>::values(x[j]);
      wide[j] = {__float_as_uint(v.x), __float_as_uint(v.y)};
    }
    float more[8];
    if (random) draw<10>(more, number, key);
    if (p.row.enabled) {
      const int r = at.r + k;
      const auto by =
          row_shifts.fp4(s.row_factors.of[at.row_block][r] * 0x10001u, row_shifts.of_row(r));
      rows.write(k, random ? random_codes(wide, by, by, by, by, more)
                           : Nearest::fp4<Bf16>(x, by, by, by, by, {}));
    }
    if (!p.col.enabled) continue;
    if (all.size != 0) {
#pragma unroll
      for (int j = 0; j < 4; ++j) wide[j] = slot[k * kRowStep + j * kQuantizeThreads];
    }
    const uint2 col = random ? random_codes(wide, c0, c1, c2, c3, more)
                             : Nearest::fp4<float>(wide, c0, c1, c2, c3, {});
    if (in_place) {
      cols.write(k, col);
    } else {
      slot[k * kRowStep] = col;
    }
  }
  if (!p.col.enabled || in_place) return;
  uint2 codes[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) codes[k] = slot[k * kRowStep];
  __syncthreads();
  stage_cols(s.codes, codes, at);
  __syncthreads();
  if (p.col.nibbles) {
    write_col_nibbles(s.codes, p.col, t);
  } else {
    write_cols<true>(s.codes, p.col, t);
  }
}

}  // namespace

Status quantize_both_randomly(const RandomParams& p, cudaStream_t stream) {
  const dim3 grid = tile_grid(p.q, p.q.col_tiles);
  return launch_fused(both_kernel, grid, fused_smem_bytes<float, QuantizeSmem>(1), stream, p);
}

}  // namespace te_mx::sm90
