// Normalization, quantized as it is computed: row statistics and tiles in one kernel (bands.cuh).
#include "norm_stats.cuh"
#include "quantize_launch.h"
#include "te_mx/sm90_fused.h"

namespace te_mx::sm90 {

namespace {

struct NormParams {
  QuantizeParams q;
  NormRows n;
  Bands bands;
  const float* weight;
  const float* bias;
  void* z;
  bool vectors;  // x has 16-byte vectors of 8 elements only, aligned
};

template <class In, class T, tile::Fp8 kFmt, bool kPlain>
__global__ void __launch_bounds__(kQuantizeThreads, sizeof(In) == 2 ? 4 : (sizeof(T) == 2 ? 3 : 2))
    norm_kernel(const __grid_constant__ NormParams p) {
  extern __shared__ __align__(16) char smem[];
  RowSumSmem& sums = *reinterpret_cast<RowSumSmem*>(smem);
  tile::let_dependents_start();
  tile::await_predecessors();
  const BandItem item = take_item(p.bands, sums.ticket);
  if (item.stats) {
    if (item.band >= p.bands.bands || item.row(p.bands) >= p.n.rows) return;
    norm_statistics<In>(sums, p.n, item.row(p.bands));
    publish(p.bands, item.band);
    return;
  }
  QuantizeSmem& s = *reinterpret_cast<QuantizeSmem*>(smem);
  uint4* const slot = own_slots(smem);
  Tile t;
  place_tile(t, p.q, item.row_tile(p.bands), item.col_tile(p.bands));
  if (t.rt >= p.q.row_tiles) return;
  const Place at;
  const Extent e(p.q, t, at);
  const int64_t row = t.r0 + at.r, col = t.c0() + at.c;
  fill_slot<In>(slot, static_cast<const In*>(p.n.x.data) + row * p.n.x.stride + col, p.n.x.stride,
                e, p.vectors);
  float weight[8], bias[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    weight[j] = j < e.cols ? __ldg(p.weight + col + j) : 0.0f;
    bias[j] = p.bias != nullptr && j < e.cols ? __ldg(p.bias + col + j) : 0.0f;
  }
  const OutRows<T> out(p.z, p.q.a.cols, row, col);
  await(p.bands, item.band);
  wait_for_slots();
#pragma unroll 1
  for (int k = 0; k < 8; ++k) {
    const bool exists = k < e.rows;
    const float rstd = exists ? __ldcg(p.n.rstd + row + k) : 0.0f;
    const float mean = exists && !p.n.rms ? __ldcg(p.n.mean + row + k) : 0.0f;
    float v[8];
    read_slot<In>(v, slot, k);
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = mul(mul(sub(v[j], mean), rstd), weight[j]);
    if (p.bias != nullptr) {
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = add(v[j], bias[j]);
    }
    finish_row<In>(slot, k, v, e, out);
  }
  quantize_slot<In, T, kFmt, kPlain>(s, p.q, slot, t);
}

template <class In, class T, tile::Fp8 kFmt>
Status launch_format(const NormParams& p, unsigned ctas, cudaStream_t stream) {
  constexpr int kSmem = fused_smem_bytes<In>(1);
  if constexpr (std::is_same_v<In, __nv_bfloat16>) {
    if (!wants_plain(p.q))
      return launch_fused(norm_kernel<In, T, kFmt, false>, dim3(ctas), kSmem, stream, p);
  }
  return launch_fused(norm_kernel<In, T, kFmt, true>, dim3(ctas), kSmem, stream, p);
}

template <class In, class T>
Status launch_norm(const NormParams& p, unsigned ctas, cudaStream_t stream) {
  return p.q.a.fmt == Format::e4m3 ? launch_format<In, T, tile::Fp8::e4m3>(p, ctas, stream)
                                   : launch_format<In, T, tile::Fp8::e5m2>(p, ctas, stream);
}

}  // namespace

Status norm_quantize(const NormQuantizeArgs& a) {
  const QuantizeArgs& q = a.quantized;
  if (q.rows == 0 || q.cols == 0) return Status::ok;
  if (a.ws == nullptr || a.rstd == nullptr || (a.mean == nullptr) != a.rms || q.col_sum != nullptr)
    return Status::bad_argument;
  NormParams p{};
  Status status = quantize_params(q, p.q);
  if (status != Status::ok) return status;
  const int bytes = a.x_dtype == DType::f32 ? 4 : 2;
  const auto address = reinterpret_cast<uintptr_t>(a.x.data);
  p.vectors = q.cols % 8 == 0 && a.x.stride * bytes % 16 == 0 && address % 16 == 0;
  p.n = {a.x,
         q.rows,
         q.cols,
         a.rms,
         q.cols % 2 == 0 && a.x.stride % 2 == 0 && address % (2 * bytes) == 0,
         a.eps,
         a.inverse,
         a.mean,
         a.rstd};
  p.weight = a.weight, p.bias = a.bias, p.z = a.z;
  unsigned ctas = 0;
  status = make_bands(p.bands, a.ws, q.rows, q.cols, bytes, ctas);
  if (status != Status::ok) return status;
  const auto stream = static_cast<cudaStream_t>(q.stream);
  status = clear_bands(p.bands, stream);
  if (status != Status::ok) return status;
  if (a.x_dtype == DType::f32) {
    return q.x_dtype == DType::bf16  ? launch_norm<float, __nv_bfloat16>(p, ctas, stream)
           : q.x_dtype == DType::f16 ? launch_norm<float, __half>(p, ctas, stream)
                                     : launch_norm<float, float>(p, ctas, stream);
  }
  if (a.x_dtype != q.x_dtype) return Status::unsupported;
  return a.x_dtype == DType::bf16 ? launch_norm<__nv_bfloat16, __nv_bfloat16>(p, ctas, stream)
                                  : launch_norm<__half, __half>(p, ctas, stream);
}

}  // namespace te_mx::sm90
