// Backward pass of a normalization: dx, and dweight and dbias by sums over 128 rows. Sums over rows
// and tiles that need them in one kernel (bands.cuh), so that dz and x are read from memory once.
#include "fused/norm_backward.cuh"
#include "fused/norm_stats.cuh"
#include "quantize/quantize_launch.cuh"
#include "te_mx/sm90.h"

namespace te_mx::sm90 {

namespace {

struct GradParams {
  NormGradTask a;
  Bands bands;
  uint32_t* done;  // tiles of every column of tiles, 0 at the start; null: others add up `partial`
  int row_tiles, col_tiles;
  bool vectors;         // dz and x have 16-byte vectors of 8 elements only, aligned
  bool weight_vectors;  // weight likewise
};

// What a kernel needs of shared memory before its slots.
struct GradSmem {
  float4 rows[128];     // mean, rstd and both sums of the tile's rows; before, the ticket
  float2 cols[4][128];  // dweight and dbias over 32 rows
};
static_assert(sizeof(GradSmem) <= offsetof(QuantizeSmem, codes));

// A row's dz and x.
template <class Dz, class X>
struct GradReader {
  struct Chunk {
    Eight<Dz> dz;
    Eight<X> x;
  };
  RowReader<Dz> dz;
  RowReader<X> x;

  __device__ __forceinline__ void read(Chunk& to, int64_t chunk) const {
    dz.read(to.dz, chunk), x.read(to.x, chunk);
  }
  __device__ __forceinline__ void read_part(Chunk& to, int64_t chunk, int left,
                                            bool vectors) const {
    dz.read_part(to.dz, chunk, left, vectors), x.read_part(to.x, chunk, left, vectors);
  }
};

// sum(v) / cols and sum(v h) / cols of a row, with h = (x - mean) * rstd, v = dz * weight; the
// whole warp calls it, its first thread writes them.
template <class Dz, class X>
__device__ __forceinline__ void row_sums(const GradParams& p, int64_t row) {
  const NormGradTask& a = p.a;
  const RowShape shape(a.cols, p.vectors && p.weight_vectors);
  const GradReader<Dz, X> reader{{a.dz, row}, {a.x, row}};
  const int64_t first = threadIdx.x % 32 * 8;
  const float mean = a.rms ? 0.0f : __ldg(a.mean + row), rstd = __ldg(a.rstd + row);
  float shift[8]{}, drift[8]{};
  constexpr int kAhead = sizeof(Dz) + sizeof(X) > 4 ? 2 : (std::is_same_v<X, __half> ? 3 : 4);
  each_chunk<kAhead>(shape, reader, [&](const auto& at, int chunk, auto exist) {
    float d[8], h[8], w[8];
    load_weights(w, a.weight, a.weight_dtype, first + 256ll * chunk, exist, shape.vectors);
    at.dz.unpack(d), at.x.unpack(h);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (j >= exist) break;
      const float v = mul(d[j], w[j]);
      if (!a.rms) h[j] = sub(h[j], mean), shift[j] = add(shift[j], v);
      drift[j] = add(drift[j], mul(v, mul(h[j], rstd)));
    }
  });
  const float one = a.rms ? 0.0f : mul(fold_lanes(shift), a.inverse);
  const float other = mul(fold_lanes(drift), a.inverse);
  if (threadIdx.x % 32 == 0) reinterpret_cast<float2*>(a.row_sums)[row] = {one, other};
}

__device__ __forceinline__ void write_row(const NormGradTask& a, const float (&v)[8], int64_t row,
                                          int64_t col, const Extent& e, int k) {
  if (a.dx_dtype == DType::bf16) {
    OutRows<__nv_bfloat16>(a.dx, a.cols, row, col).write(k, Eight<__nv_bfloat16>(v), e);
  } else if (a.dx_dtype == DType::f16) {
    OutRows<__half>(a.dx, a.cols, row, col).write(k, Eight<__half>(v), e);
  } else {
    OutRows<float>(a.dx, a.cols, row, col).write(k, Eight<float>(v), e);
  }
}

// dweight and dbias of a column of tiles, by the CTA that was the last to leave its sums in
// `partial`; in the order of add_tiles(). The whole CTA calls it.
__device__ __forceinline__ void add_up_last(const GradParams& p, int ct, uint32_t& shared) {
  const NormGradTask& a = p.a;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) shared = atomicAdd(p.done + ct, 1u);
  __syncthreads();
  if (static_cast<int>(shared) != p.row_tiles - 1) return;
  __threadfence();
  const int64_t col = ct * 128ll + threadIdx.x % 128;
  void* const to = threadIdx.x < 128 ? a.dweight : a.dbias;
  if (col >= a.cols || to == nullptr) return;
  const int64_t at = threadIdx.x / 128 * a.cols + col;
  float s[kSumHeight]{};
  for (int first = 0; first < p.row_tiles; first += kSumHeight) {
#pragma unroll
    for (int i = 0; i < kSumHeight; ++i) {
      if (first + i < p.row_tiles) s[i] += __ldcg(a.partial + (first + i) * 2 * a.cols + at);
    }
  }
#pragma unroll
  for (int i = 1; i < kSumHeight; ++i) s[0] += s[i];
  store_number(to, col, a.weight_dtype, s[0]);
}

template <class Dz, class X>
constexpr int kGradSmem = fused_smem_bytes<X, QuantizeSmem>(1) + kSlotChunks<Dz> * kChunkStep * 16;

template <class Dz, class X>
__global__ void __launch_bounds__(kQuantizeThreads, kGradSmem<Dz, X> < 75 * 1024    ? 3
                                                    : kGradSmem<Dz, X> < 112 * 1024 ? 2
                                                                                    : 1)
    norm_backward_kernel(const __grid_constant__ GradParams p) {
  extern __shared__ __align__(16) char smem[];
  GradSmem& s = *reinterpret_cast<GradSmem*>(smem);
  const NormGradTask& a = p.a;
  tile::let_dependents_start();
  tile::await_predecessors();
  const BandItem item = take_item(p.bands, *reinterpret_cast<uint32_t*>(s.rows));
  if (item.stats) {
    const int64_t row = item.row(p.bands);
    if (item.band >= p.bands.bands || row >= a.rows) return;
    row_sums<Dz, X>(p, row);
    if (threadIdx.x % 32 == 0) publish(p.bands, item.band);
    return;
  }
  const int rt = item.row_tile(p.bands), ct = item.col_tile(p.bands);
  if (rt >= p.row_tiles) return;
  const Place at;
  const int64_t row0 = rt * 128ll, col0 = ct * 128ll, row = row0 + at.r, col = col0 + at.c;
  const auto left = [](int64_t size) { return static_cast<int>(size < 8 ? size : 8); };
  const Extent e(left(a.rows - row), left(a.cols - col));
  uint4* const x_slot = own_slots(*reinterpret_cast<QuantizeSmem*>(smem));
  uint4* const dz_slot = x_slot + kSlotChunks<X> * kChunkStep;
  fill_slot<X>(x_slot, static_cast<const X*>(a.x.data) + row * a.x.stride + col, a.x.stride, e,
               p.vectors);
  fill_slot<Dz>(dz_slot, static_cast<const Dz*>(a.dz.data) + row * a.dz.stride + col, a.dz.stride,
                e, p.vectors);
  float weight[8];
  load_weights(weight, a.weight, a.weight_dtype, col, e.cols, p.weight_vectors);
  await(p.bands, item.band);
  if (threadIdx.x < 128 && row0 + threadIdx.x < a.rows) {
    const int64_t r = row0 + threadIdx.x;
    const float2 sums = __ldcg(reinterpret_cast<const float2*>(a.row_sums) + r);
    s.rows[threadIdx.x] = {a.rms ? 0.0f : __ldg(a.mean + r), __ldg(a.rstd + r), sums.x, sums.y};
  }
  __syncthreads();
  wait_for_slots();
  float2 dweight[4]{}, dbias[4]{};
#pragma unroll 2
  for (int k = 0; k < 8; ++k) {
    // NOTE: rows that do not exist add 0; nothing else comes of them.
    const float4 of = k < e.rows ? s.rows[at.r + k] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float d[8], h[8];
    read_slot<Dz>(d, dz_slot, k);
    read_slot<X>(h, x_slot, k);
    finish_gradients(d, h, weight, of, a.rms, dweight, dbias);
    write_row(a, d, row, col, e, k);
  }
  const float2 w = fold_sums(dweight, at), b = fold_sums(dbias, at);
  s.cols[at.band][at.folded_col()] = {w.x, b.x};
  s.cols[at.band][at.folded_col() + 1] = {w.y, b.y};
  __syncthreads();
  const int c = threadIdx.x;
  if (c < 128 && col0 + c < a.cols) {
    const float2 p0 = s.cols[0][c], p1 = s.cols[1][c], p2 = s.cols[2][c], p3 = s.cols[3][c];
    float* const to = a.partial + rt * 2 * a.cols + col0 + c;
    to[0] = (p0.x + p1.x) + (p2.x + p3.x);
    to[a.cols] = (p0.y + p1.y) + (p2.y + p3.y);
  }
  if (p.done != nullptr) add_up_last(p, ct, *reinterpret_cast<uint32_t*>(s.rows));
}

template <class Dz, class X>
Status launch_backward(const GradParams& p, unsigned ctas, cudaStream_t stream) {
  return launch_early(norm_backward_kernel<Dz, X>,
                      {dim3(ctas), kQuantizeThreads, stream, kGradSmem<Dz, X>}, p);
}

int bytes_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

}  // namespace

Status normalize_backward(const NormGradArgs& args) {
  const Matrix &dz = args.dz, &x = args.x;
  if (!known(dz.dtype) || !known(x.dtype) || !known(args.dx_dtype) || !known(args.weight_dtype) ||
      dz.rows != x.rows || dz.cols != x.cols || x.rows < 0 || x.cols < 0) {
    return Status::bad_argument;
  }
  if (dz.col_stride != 1 || x.col_stride != 1) return Status::unsupported;
  if (x.rows == 0 || x.cols == 0) return Status::ok;
  const int64_t row_tiles = (x.rows + 127) / 128, col_tiles = (x.cols + 127) / 128;
  uint32_t* const counters =
      counters_of(args.execution, args.counters, norm_counters(x.rows) + col_tiles);
  if (counters == nullptr || args.row_sums == nullptr || args.partial == nullptr ||
      (args.mean == nullptr) != args.rms || args.dweight == nullptr) {
    return Status::bad_argument;
  }
  NormGradTask a{};
  a.dz = rows_of(dz), a.x = rows_of(x), a.rows = x.rows, a.cols = x.cols;
  a.dz_dtype = dz.dtype, a.x_dtype = x.dtype, a.dx_dtype = args.dx_dtype;
  a.rms = args.rms, a.inverse = args.inverse, a.weight = args.weight;
  a.weight_dtype = args.weight_dtype;
  a.mean = args.mean, a.rstd = args.rstd, a.dx = args.dx, a.dweight = args.dweight,
  a.dbias = args.dbias;
  a.row_sums = args.row_sums, a.partial = args.partial, a.counters = counters;
  a.stream = args.execution.stream;
  Status status = fits_strips(a) ? norm_backward_strips(a) : Status::unsupported;
  if (status != Status::unsupported) return status;
  GradParams p{a};
  unsigned ctas = 0;
  const int bytes = bytes_of(a.dz_dtype) + bytes_of(a.x_dtype);
  status = make_bands(p.bands, a.counters, a.rows, a.cols, bytes, ctas);
  if (status != Status::ok) return status;
  p.row_tiles = static_cast<int>(row_tiles), p.col_tiles = static_cast<int>(col_tiles);
  // NOTE: one CTA would take long over the sums of more; a launch is short beside as many tiles.
  constexpr int kMostAtOnce = 32;
  const bool at_once = args.counters == nullptr && row_tiles <= kMostAtOnce;
  if (at_once) p.done = counters + norm_counters(x.rows);
  const auto aligned = [](const void* from) { return reinterpret_cast<uintptr_t>(from) % 16 == 0; };
  const auto whole = [&](const Rows& m, DType dtype) {
    return m.stride * bytes_of(dtype) % 16 == 0 && aligned(m.data);
  };
  p.vectors = a.cols % 8 == 0 && whole(a.dz, a.dz_dtype) && whole(a.x, a.x_dtype);
  p.weight_vectors = a.cols % 8 == 0 && aligned(a.weight);
  const auto stream = static_cast<cudaStream_t>(a.stream);
  status = clear_bands(p.bands, args.counters, stream);
  if (status != Status::ok) return status;
  if (a.dz_dtype == a.x_dtype) {
    status = a.x_dtype == DType::bf16
                 ? launch_backward<__nv_bfloat16, __nv_bfloat16>(p, ctas, stream)
             : a.x_dtype == DType::f16 ? launch_backward<__half, __half>(p, ctas, stream)
                                       : launch_backward<float, float>(p, ctas, stream);
  } else if (a.x_dtype == DType::f32) {
    status = a.dz_dtype == DType::bf16 ? launch_backward<__nv_bfloat16, float>(p, ctas, stream)
                                       : launch_backward<__half, float>(p, ctas, stream);
  } else {
    return Status::unsupported;
  }
  if (status != Status::ok || at_once) return status;
  return launch_two_sums(a.partial, a.dweight, a.dbias, a.weight_dtype, p.row_tiles, a.cols,
                         stream);
}

}  // namespace te_mx::sm90
