// The quantizer after a random Hadamard transform, of one direction, and with stochastic rounding.
// Elements are transformed in fp32, in registers: a block of 32 lies in four lanes, each with 8
// x 8.
#include "quantize/random_codes.cuh"

namespace te_mx::sm90 {

namespace {

// Rounds to MXFP4 by the random words of a place where there is a seed, else to nearest even.
struct Stochastic {
  struct Words {
    bool random = false;
    float more[8];
  };
  uint32_t row;  // number of the thread's first row, modulo 2^32
  int64_t col;
  uint2 key;
  bool random;

  __device__ __forceinline__ Words words(int k) const {
    if (!random) return {};
    uint4 drawn[1];
    draw<1>(drawn, row + k, col, key);
    const uint32_t two[4] = {drawn[0].x, drawn[0].y, drawn[0].z, drawn[0].w};
    Words made;
    made.random = true;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      made.more[2 * j] = __uint2float_rn(two[j] & 0xFFFFu);
      made.more[2 * j + 1] = __uint2float_rn(two[j] >> 16);
    }
    return made;
  }

  // Codes of E4M3 of eight numbers, of which two neighbours are rounded by each of r0 to r3.
  template <class T>
  static __device__ __forceinline__ uint2 fp4(const uint2 (&x)[4], const tile::Fp4Rounding& r0,
                                              const tile::Fp4Rounding& r1,
                                              const tile::Fp4Rounding& r2,
                                              const tile::Fp4Rounding& r3, const Words& words) {
    if (!words.random) return Nearest::fp4<float>(x, r0, r1, r2, r3, {});
    const tile::Fp4Rounding* const by[4] = {&r0, &r1, &r2, &r3};
    float v[8];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 scaled = Input<float>::scaled(x[j], by[j]->factor);
      v[2 * j] = round_by_chance(scaled.x, by[j]->magic << 16, words.more[2 * j]);
      v[2 * j + 1] = round_by_chance(scaled.y, by[j]->magic, words.more[2 * j + 1]);
    }
    return {tile::fp8x4<tile::Fp8::e4m3>(v[0], v[1], v[2], v[3]),
            tile::fp8x4<tile::Fp8::e4m3>(v[4], v[5], v[6], v[7])};
  }
};

template <class T>
__device__ __forceinline__ void load_floats(uint2 (&x)[8][4], const QuantizeParams& p,
                                            const Tile& t, const Place& at, void* slot) {
  typename Input<T>::Word w[8][4];
  load_patch<T>(w, static_cast<const T*>(p.a.x) + (t.r0 + at.r) * p.a.x_stride + t.c0() + at.c,
                p.a.x_stride, t.rows - at.r, t.cols - at.c, p.x_vectors, slot);
#pragma unroll
  for (int k = 0; k < 8; ++k) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 v = Input<T>::values(w[k][j]);
      x[k][j] = make_uint2(__float_as_uint(v.x), __float_as_uint(v.y));
    }
  }
}

__device__ __forceinline__ uint32_t& element(uint2 (&x)[8][4], int r, int c) {
  return c % 2 == 0 ? x[r][c / 2].x : x[r][c / 2].y;
}

// The elements of 2 or 4 lanes, along the columns (kDown) or the rows. `place` is the lane's among
// four; those of a chunk that is not whole stay.
template <bool kDown>
__device__ __forceinline__ void transform(uint2 (&x)[8][4], int size, uint32_t signs, int place,
                                          bool whole) {
  constexpr int kNext = kDown ? 8 : 1;  // from lane to lane
  const uint32_t mine = signs >> (8 * place);
#pragma unroll
  for (int other = 0; other < 8; ++other) {
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t bits = kDown ? element(x, i, other) : element(x, other, i);
      v[i] = __uint_as_float(bits ^ (mine >> i & 1) << 31);
    }
    butterfly<kNext>(v, size, place);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      v[i] = __fmul_rn(v[i], transform_factor(size));
      if (whole) (kDown ? element(x, i, other) : element(x, other, i)) = __float_as_uint(v[i]);
    }
  }
}

template <tile::Fp8 kFmt>
__global__ void __launch_bounds__(kQuantizeThreads, 2)
    random_kernel(const __grid_constant__ RandomParams all) {
  __shared__ QuantizeSmem s;
  tile::let_dependents_start();
  tile::await_predecessors();
  const QuantizeParams& p = all.q;
  Tile t;
  if (!find_rows(t, p, all.groups)) return;
  const Place at;
  uint2 x[8][4];
  void* const slot = &s.codes[0][0] + 64 * threadIdx.x;
  if (p.a.x_dtype == DType::bf16) {
    load_floats<__nv_bfloat16>(x, p, t, at, slot);
  } else if (p.a.x_dtype == DType::f16) {
    load_floats<__half>(x, p, t, at, slot);
  } else {
    load_floats<float>(x, p, t, at, slot);
  }
  if (all.size != 0) {
    const int chunk = ~(all.size - 1);
    if (p.row.enabled) {
      transform<false>(x, all.size, all.signs, at.lane_c % 4, (at.c & chunk) + all.size <= t.cols);
    } else {
      transform<true>(x, all.size, all.signs, at.lane_r, (at.r & chunk) + all.size <= t.rows);
    }
  }
  if constexpr (kIsFp4<kFmt>) {
    const bool random = all.seed != nullptr;
    const Stochastic rounds{all.first + static_cast<uint32_t>(t.r0 + at.r), t.c0() + at.c,
                            random ? key_of(all.seed) : make_uint2(0, 0), random};
    quantize_patch<float, kFmt, true, true, false>(p, s, x, t, at, rounds);
  } else {
    quantize_patch<float, kFmt, true>(p, s, x, t, at);
  }
}

Status launch(const RandomParams& p, cudaStream_t stream) {
  const dim3 grid = tile_grid(p.q, p.q.col_tiles);
  return with_element(p.q.a.element, [&]<tile::Fp8 kFmt>() {
    return launch_early(random_kernel<kFmt>, {grid, kQuantizeThreads, stream}, p);
  });
}

}  // namespace

Status quantize_randomly(const QuantizeTask& a, const QuantizeOut& to, const Groups* groups) {
  const bool both = to.row.codes != nullptr && to.col.codes != nullptr;
  const bool one_read = a.x_dtype == DType::bf16 && to.element == Element::e2m1 &&
                        (to.row.codes == nullptr || to.row.hadamard == 0);
  const OperandOut& side = to.row.codes == nullptr || one_read ? to.col : to.row;
  if (side.hadamard != 0 && side.hadamard != 16 && side.hadamard != 32) return Status::bad_argument;
  // One direction where there is a transform, which sums must not see, but in one read.
  const bool transforms = to.row.hadamard != 0 || to.col.hadamard != 0;
  if ((!one_read && transforms && (both || to.col_sum != nullptr)) ||
      (to.seed != nullptr && to.element != Element::e2m1)) {
    return Status::unsupported;
  }
  if (a.rows == 0 || a.cols == 0) return Status::ok;
  RandomParams p{};
  const int64_t tiles = groups == nullptr ? 0 : group_tiles(groups->rows, groups->count);
  Status status =
      groups == nullptr ? quantize_params(a, p.q) : quantize_params(a, tiles, tiles * kTile, p.q);
  if (status != Status::ok) return status;
  if (groups != nullptr) p.groups = group_table(*groups);
  p.seed = to.seed, p.first = static_cast<uint32_t>(to.first);
  p.size = side.hadamard, p.signs = static_cast<uint32_t>(side.signs);
  const auto stream = static_cast<cudaStream_t>(a.stream);
  status = one_read ? quantize_both_randomly(p, stream) : launch(p, stream);
  // Sums of groups are their caller's.
  if (status != Status::ok || a.col_sum == nullptr || groups != nullptr) return status;
  return launch_sums(a.col_sum_ws, a.col_sum, a.col_sum_dtype, p.q.row_tiles, a.cols, stream);
}

}  // namespace te_mx::sm90
