// Normalization, quantized as it is computed: row statistics and tiles in one kernel (bands.cuh).
#include "fused/norm_stats.cuh"
#include "quantize/quantize_launch.h"
#include "te_mx/sm90.h"

namespace te_mx::sm90 {

namespace {

struct NormParams {
  FactorParams q;
  NormRows n;
  Bands bands;
  const void* weight;
  const void* bias;
  DType weight_dtype;
  void* z;
  bool vectors;        // x has 16-byte vectors of 8 elements only, aligned
  bool scale_vectors;  // weight and bias likewise
};

template <class In, class T, tile::Fp8 kFmt, Sink kSink>
__global__ void __launch_bounds__(kQuantizeThreads, sizeof(T) == 4                             ? 2
                                                    : sizeof(In) == 2 && kSink == Sink::packed ? 4
                                                                                               : 3)
    norm_kernel(const __grid_constant__ NormParams p) {
  extern __shared__ __align__(16) char smem[];
  auto& s = *reinterpret_cast<SinkSmem<T, kSink>*>(smem);
  // Mean and reciprocal deviation of the tile's rows, where the quantizer would have column sums;
  // before, the ticket.
  float2* const stats = reinterpret_cast<float2*>(s.sums);
  tile::let_dependents_start();
  tile::await_predecessors();
  const BandItem item = take_item(p.bands, *reinterpret_cast<uint32_t*>(s.sums));
  if (item.stats) {
    const int64_t row = item.row(p.bands);
    if (item.band >= p.bands.bands || row >= p.n.rows) return;
    norm_statistics<In>(p.n, row);
    if (threadIdx.x % 32 == 0) publish(p.bands, item.band);
    return;
  }
  uint4* const slot = own_slots(s);
  Tile t;
  place_tile(t, p.q, item.row_tile(p.bands), item.col_tile(p.bands));
  if (t.rt >= p.q.row_tiles) return;
  const Place at;
  const Extent e(p.q, t, at);
  const int64_t row = t.r0 + at.r, col = t.c0() + at.c;
  fill_slot<In>(slot, static_cast<const In*>(p.n.x.data) + row * p.n.x.stride + col, p.n.x.stride,
                e, p.vectors);
  float weight[8], bias[8]{};
  load_weights(weight, p.weight, p.weight_dtype, col, e.cols, p.scale_vectors);
  if (p.bias != nullptr) load_weights(bias, p.bias, p.weight_dtype, col, e.cols, p.scale_vectors);
  const OutRows<T> out(p.z, p.q.a.cols, row, col);
  await(p.bands, item.band);
  if (threadIdx.x < t.rows) {
    const int64_t r = t.r0 + threadIdx.x;
    stats[threadIdx.x] = {p.n.rms ? 0.0f : __ldcg(p.n.mean + r), __ldcg(p.n.rstd + r)};
  }
  __syncthreads();
  wait_for_slots();
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const float2 row_stats = stats[at.r + k];
    float v[8];
    read_slot<In>(v, slot, k);
    if (!p.n.rms) {
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = sub(v[j], row_stats.x);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = mul(mul(v[j], row_stats.y), weight[j]);
    if (p.bias != nullptr) {
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = add(v[j], bias[j]);
    }
    finish_row<In>(slot, k, v, e, out);
  }
  // NOTE: what is known of the tile would stay in registers all along, as in quantize_slot.
  place_tile(t, p.q, tile::opaque(t.rt), tile::opaque(t.ct));
  quantize_slot<In, T, kFmt, kSink, false>(s, p.q, slot, t);
}

template <class In, class T, tile::Fp8 kFmt, Sink kSink>
Status launch_instance(const NormParams& p, unsigned ctas, cudaStream_t stream) {
  constexpr int kSmem = fused_smem_bytes<In, SinkSmem<T, kSink>>(1);
  return launch_early(norm_kernel<In, T, kFmt, kSink>,
                      {dim3(ctas), kQuantizeThreads, stream, kSmem}, p);
}

template <class In, class T, tile::Fp8 kFmt>
Status launch_format(const NormParams& p, unsigned ctas, cudaStream_t stream) {
  if constexpr (std::is_same_v<In, __nv_bfloat16> && !kIsFp4<kFmt>) {
    if (!wants_plain(p.q)) return launch_instance<In, T, kFmt, Sink::packed>(p, ctas, stream);
  }
  if constexpr (kIsFp4<kFmt> && !std::is_same_v<T, __nv_bfloat16>) {
    return Status::unsupported;  // FP4 is made of bf16 alone
  } else {
    return launch_instance<In, T, kFmt, Sink::plain>(p, ctas, stream);
  }
}

template <class In, class T>
Status launch_norm(const NormParams& p, unsigned ctas, cudaStream_t stream) {
  return with_weights(
      p.q.a.element, [&]<tile::Fp8 kFmt>() { return launch_format<In, T, kFmt>(p, ctas, stream); });
}

// Fp32 factors are those of E4M3, made of bf16 alone.
Status launch_factors(const NormParams& p, DType in, unsigned ctas, cudaStream_t stream) {
  using T = __nv_bfloat16;
  if (p.q.a.x_dtype != DType::bf16 || p.q.a.element != Element::e4m3 || in == DType::f16)
    return Status::unsupported;
  return in == DType::bf16
             ? launch_instance<T, T, tile::Fp8::e4m3, Sink::factors>(p, ctas, stream)
             : launch_instance<float, T, tile::Fp8::e4m3, Sink::factors>(p, ctas, stream);
}

}  // namespace

Status normalize(const NormArgs& a) {
  if (!known(a.x.dtype) || !known(a.z_dtype) || !known(a.weight_dtype)) return Status::bad_argument;
  QuantizeTask q;
  // What is quantized lies nowhere.
  Status status = make_task(q, {nullptr, a.x.rows, a.x.cols, 0, a.x.col_stride, a.z_dtype}, a.to,
                            a.execution.stream);
  if (status != Status::ok) return status;
  if (q.rows == 0 || q.cols == 0) return Status::ok;
  uint32_t* const counters = counters_of(a.execution, a.counters, norm_counters(q.rows));
  if (counters == nullptr || a.rstd == nullptr || (a.mean == nullptr) != a.rms ||
      q.col_sum != nullptr) {
    return Status::bad_argument;
  }
  NormParams p{};
  status = sink_params(q, a.to, p.q);
  if (status != Status::ok) return status;
  const int bytes = a.x.dtype == DType::f32 ? 4 : 2;
  const auto aligned = [](const void* from) { return reinterpret_cast<uintptr_t>(from) % 16 == 0; };
  p.vectors = q.cols % 8 == 0 && a.x.row_stride * bytes % 16 == 0 && aligned(a.x.data);
  p.scale_vectors = q.cols % 8 == 0 && aligned(a.weight) && aligned(a.bias);
  p.n = {rows_of(a.x), q.rows, q.cols, a.rms, p.vectors, a.eps, a.inverse, a.mean, a.rstd};
  p.weight = a.weight, p.bias = a.bias, p.weight_dtype = a.weight_dtype, p.z = a.z;
  unsigned ctas = 0;
  status = make_bands(p.bands, counters, q.rows, q.cols, bytes, ctas);
  if (status != Status::ok) return status;
  const auto stream = static_cast<cudaStream_t>(q.stream);
  status = clear_bands(p.bands, a.counters, stream);
  if (status != Status::ok) return status;
  if (is_blockwise(a.to.scaling)) return launch_factors(p, a.x.dtype, ctas, stream);
  if (a.x.dtype == DType::f32) {
    return q.x_dtype == DType::bf16  ? launch_norm<float, __nv_bfloat16>(p, ctas, stream)
           : q.x_dtype == DType::f16 ? launch_norm<float, __half>(p, ctas, stream)
                                     : launch_norm<float, float>(p, ctas, stream);
  }
  if (a.x.dtype != q.x_dtype) return Status::unsupported;
  return a.x.dtype == DType::bf16 ? launch_norm<__nv_bfloat16, __nv_bfloat16>(p, ctas, stream)
                                  : launch_norm<__half, __half>(p, ctas, stream);
}

}  // namespace te_mx::sm90
