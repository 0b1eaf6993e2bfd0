// Backward pass of a normalization: dx, and dweight and dbias by sums over 128 rows. Sums over rows
// and tiles that need them in one kernel (bands.cuh), so that dz and x are read from memory once.
#include "norm_stats.cuh"
#include "quantize_launch.h"
#include "te_mx/sm90_fused.h"

namespace te_mx::sm90 {

namespace {

struct GradParams {
  NormBackwardArgs a;
  Bands bands;
  int row_tiles, col_tiles;
  bool pairs;    // pairs of elements lie aligned in dz, x and weight
  bool vectors;  // vectors of 8 elements
};

struct GradSmem {
  RowSumSmem rows;
  float2 cols[4][128];  // dweight and dbias over 32 rows
};

// sum(v) / cols and sum(v h) / cols of kStatRows rows, with h = (x - mean) * rstd, v = dz * weight.
template <class Dz, class X>
__device__ __forceinline__ void row_sums(RowSumSmem& s, const NormBackwardArgs& a, bool vectors,
                                         int64_t row) {
  const int chunks = static_cast<int>((a.cols + 255) / 256);
  int turn = 0;
#pragma unroll 1
  for (int i = 0; i < kStatRows; i += 2) {
    const int64_t r = row + i + threadIdx.x / 128;
    const int64_t cols = r < a.rows ? a.cols : 0;
    const RowPairs<Dz> dz(a.dz.data, a.dz.stride, r, cols, vectors);
    const RowPairs<X> x(a.x.data, a.x.stride, r, cols, vectors);
    const RowPairs<float> weight(a.weight, 0, 0, cols, vectors);
    const float mean = a.rms || r >= a.rows ? 0.0f : a.mean[r];
    const float rstd = r < a.rows ? a.rstd[r] : 0.0f;
    float2 shift = {0.0f, 0.0f}, drift = {0.0f, 0.0f};
    constexpr int kAtOnce = sizeof(X) == 2 ? 8 : 4;
#pragma unroll 1
    for (int c0 = 0; c0 < chunks; c0 += kAtOnce) {
      typename Input<Dz>::Word g[kAtOnce];
      typename Input<X>::Word y[kAtOnce];
#pragma unroll
      for (int c = 0; c < kAtOnce; ++c) g[c] = dz.word(c0 + c), y[c] = x.word(c0 + c);
#pragma unroll
      for (int c = 0; c < kAtOnce; ++c) {
        // What does not exist adds 0: its weight is 0.
        const float2 w = Input<float>::values(weight.word(c0 + c));
        const float2 d = Input<Dz>::values(g[c]), h = Input<X>::values(y[c]);
        const float2 v = {mul(d.x, w.x), mul(d.y, w.y)};
        shift = {add(shift.x, v.x), add(shift.y, v.y)};
        drift = {add(drift.x, mul(v.x, mul(sub(h.x, mean), rstd))),
                 add(drift.y, mul(v.y, mul(sub(h.y, mean), rstd)))};
      }
    }
    const float first = a.rms ? 0.0f : mul(fold_lanes(s, shift, turn++), a.inverse);
    const float second = mul(fold_lanes(s, drift, turn++), a.inverse);
    if (threadIdx.x % 128 == 0 && r < a.rows)
      reinterpret_cast<float2*>(a.row_sums)[r] = {first, second};
  }
}

__device__ __forceinline__ void write_row(const NormBackwardArgs& a, const float (&v)[8],
                                          int64_t row, int64_t col, const Extent& e, int k) {
  if (a.dx_dtype == DType::bf16) {
    OutRows<__nv_bfloat16>(a.dx, a.cols, row, col).write(k, Eight<__nv_bfloat16>(v), e);
  } else if (a.dx_dtype == DType::f16) {
    OutRows<__half>(a.dx, a.cols, row, col).write(k, Eight<__half>(v), e);
  } else {
    OutRows<float>(a.dx, a.cols, row, col).write(k, Eight<float>(v), e);
  }
}

template <class Dz, class X>
__global__ void __launch_bounds__(kQuantizeThreads, sizeof(X) == 2 ? 3 : 2)
    norm_backward_kernel(const __grid_constant__ GradParams p) {
  __shared__ GradSmem s;
  const NormBackwardArgs& a = p.a;
  tile::let_dependents_start();
  tile::await_predecessors();
  const BandItem item = take_item(p.bands, s.rows.ticket);
  if (item.stats) {
    if (item.band >= p.bands.bands || item.row(p.bands) >= a.rows) return;
    row_sums<Dz, X>(s.rows, a, p.pairs, item.row(p.bands));
    publish(p.bands, item.band);
    return;
  }
  const int rt = item.row_tile(p.bands), ct = item.col_tile(p.bands);
  if (rt >= p.row_tiles) return;
  const Place at;
  const int64_t col0 = ct * 128ll, row = rt * 128ll + at.r, col = col0 + at.c;
  const auto left = [](int64_t size) { return static_cast<int>(size < 8 ? size : 8); };
  const Extent e(left(a.rows - row), left(a.cols - col));
  float weight[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) weight[j] = j < e.cols ? __ldg(a.weight + col + j) : 0.0f;
  const Dz* const dz_from = static_cast<const Dz*>(a.dz.data) + row * a.dz.stride + col;
  const X* const x_from = static_cast<const X*>(a.x.data) + row * a.x.stride + col;
  await(p.bands, item.band);
  float2 dweight[4]{}, dbias[4]{};
  constexpr int kAtOnce = 2;
#pragma unroll 1
  for (int k0 = 0; k0 < 8; k0 += kAtOnce) {
    Eight<Dz> g[kAtOnce];
    Eight<X> y[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int k = k0 + i, cols = k < e.rows ? e.cols : 0;
      load_8<Dz>(g[i], dz_from + k * a.dz.stride, cols, p.vectors);
      load_8<X>(y[i], x_from + k * a.x.stride, cols, p.vectors);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int k = k0 + i;
      const bool exists = k < e.rows;
      const float mean = exists && !a.rms ? __ldg(a.mean + row + k) : 0.0f;
      const float rstd = exists ? __ldg(a.rstd + row + k) : 0.0f;
      const float2 sums = exists ? __ldcg(reinterpret_cast<const float2*>(a.row_sums) + row + k)
                                 : make_float2(0.0f, 0.0f);
      float d[8], h[8];
      g[i].unpack(d);
      y[i].unpack(h);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        h[j] = mul(sub(h[j], mean), rstd);
        float& dw = j % 2 == 0 ? dweight[j / 2].x : dweight[j / 2].y;
        float& db = j % 2 == 0 ? dbias[j / 2].x : dbias[j / 2].y;
        dw = add(dw, mul(d[j], h[j])), db = add(db, d[j]);
        const float drift = mul(h[j], sums.y);
        d[j] = mul(sub(mul(d[j], weight[j]), a.rms ? drift : add(sums.x, drift)), rstd);
      }
      write_row(a, d, row, col, e, k);
    }
  }
  const float2 w = fold_sums(dweight, at), b = fold_sums(dbias, at);
  s.cols[at.band][at.folded_col()] = {w.x, b.x};
  s.cols[at.band][at.folded_col() + 1] = {w.y, b.y};
  __syncthreads();
  const int c = threadIdx.x;
  if (c >= 128 || col0 + c >= a.cols) return;
  const float2 p0 = s.cols[0][c], p1 = s.cols[1][c], p2 = s.cols[2][c], p3 = s.cols[3][c];
  float* const to = a.partial + rt * 2 * a.cols + col0 + c;
  to[0] = (p0.x + p1.x) + (p2.x + p3.x);
  to[a.cols] = (p0.y + p1.y) + (p2.y + p3.y);
}

int bytes_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

}  // namespace

Status norm_backward(const NormBackwardArgs& a) {
  if (a.rows == 0 || a.cols == 0) return Status::ok;
  if (a.ws == nullptr || a.row_sums == nullptr || a.partial == nullptr ||
      (a.mean == nullptr) != a.rms) {
    return Status::bad_argument;
  }
  GradParams p{a, {}, 0, 0, false, false};
  unsigned ctas = 0;
  const int bytes = bytes_of(a.dz_dtype) + bytes_of(a.x_dtype);
  Status status = make_bands(p.bands, a.ws, a.rows, a.cols, bytes, ctas);
  if (status != Status::ok) return status;
  p.row_tiles = static_cast<int>((a.rows + 127) / 128);
  p.col_tiles = static_cast<int>((a.cols + 127) / 128);
  const auto aligned = [&a](int count) {
    const auto whole = [count](const Matrix& m, DType dtype) {
      const int step = count * bytes_of(dtype), unit = step < 16 ? step : 16;
      return m.stride * bytes_of(dtype) % unit == 0 &&
             reinterpret_cast<uintptr_t>(m.data) % unit == 0;
    };
    return a.cols % count == 0 && whole(a.dz, a.dz_dtype) && whole(a.x, a.x_dtype);
  };
  p.pairs = aligned(2) && reinterpret_cast<uintptr_t>(a.weight) % 8 == 0;
  p.vectors = aligned(8);
  const auto stream = static_cast<cudaStream_t>(a.stream);
  status = clear_bands(p.bands, stream);
  if (status != Status::ok) return status;
  if (a.dz_dtype == a.x_dtype) {
    status = a.x_dtype == DType::bf16
                 ? launch_fused(norm_backward_kernel<__nv_bfloat16, __nv_bfloat16>, dim3(ctas), 0,
                                stream, p)
             : a.x_dtype == DType::f16
                 ? launch_fused(norm_backward_kernel<__half, __half>, dim3(ctas), 0, stream, p)
                 : launch_fused(norm_backward_kernel<float, float>, dim3(ctas), 0, stream, p);
  } else if (a.x_dtype == DType::f32) {
    status =
        a.dz_dtype == DType::bf16
            ? launch_fused(norm_backward_kernel<__nv_bfloat16, float>, dim3(ctas), 0, stream, p)
            : launch_fused(norm_backward_kernel<__half, float>, dim3(ctas), 0, stream, p);
  } else {
    return Status::unsupported;
  }
  if (status != Status::ok) return status;
  return launch_sums(a.partial, a.sums, DType::f32, p.row_tiles, 2 * a.cols, stream);
}

}  // namespace te_mx::sm90
