// Entry point of the activations: picks the instance for the type and the format.
#include "fused/act_rows.h"
#include "fused/fused_act.cuh"
#include "quantize/group_rows.h"
#include "quantize/quantize_launch.h"

namespace te_mx::sm90 {

namespace {

template <class T, tile::Fp8 kFmt, Sink kSink>
Status launch_instance(const ActParams& p, dim3 grid, cudaStream_t stream) {
  using Smem = SinkSmem<T, kSink>;
  if (p.grad.data == nullptr) {
    const int smem = fused_smem_bytes<T, Smem>(1 + p.act.gated);
    return launch_early(act_kernel<T, kFmt, kSink>, {grid, kQuantizeThreads, stream, smem}, p);
  }
  return launch_early(dact_kernel<T, kFmt, kSink>,
                      {grid, kQuantizeThreads, stream, fused_smem_bytes<T, Smem>(2)}, p);
}

// fp16, fp32 and FP4 have one instance for packed and plain codes. FP4 is made of bf16 alone.
template <class T, tile::Fp8 kFmt>
Status launch_plain(const ActParams& p, dim3 grid, cudaStream_t stream) {
  constexpr bool kBf16 = std::is_same_v<T, __nv_bfloat16>;
  if constexpr (kBf16 && !kIsFp4<kFmt>) {
    if (!wants_plain(p.q)) return launch_instance<T, kFmt, Sink::packed>(p, grid, stream);
  }
  if constexpr (kBf16 || !kIsFp4<kFmt>) {
    return launch_instance<T, kFmt, Sink::plain>(p, grid, stream);
  } else {
    return Status::unsupported;
  }
}

// Fp32 factors are those of E4M3, made of bf16 alone.
Status launch_factors(const ActParams& p, dim3 grid, cudaStream_t stream) {
  if (p.q.a.x_dtype != DType::bf16 || p.q.a.element != Element::e4m3) return Status::unsupported;
  return launch_instance<__nv_bfloat16, tile::Fp8::e4m3, Sink::factors>(p, grid, stream);
}

template <class T>
Status launch_act(const ActParams& p, dim3 grid, cudaStream_t stream) {
  return with_element(p.q.a.element,
                      [&]<tile::Fp8 kFmt>() { return launch_plain<T, kFmt>(p, grid, stream); });
}

Status run(const ActArgs& a, const Groups* groups) {
  const bool backward = a.grad.data != nullptr;
  const int64_t cols = a.gated ? a.h.cols / 2 : a.h.cols;
  if ((a.gated && a.h.cols % 2 != 0) ||
      (backward && (a.grad.rows != a.h.rows || a.grad.cols != cols)) || a.act < Act::gelu ||
      a.act > Act::gelu_erf) {
    return Status::bad_argument;
  }
  if (a.in_pairs && (backward || !a.gated)) return Status::bad_argument;
  if (a.h.dtype != a.out_dtype ||
      (backward && (a.grad.dtype != a.out_dtype || a.grad.col_stride != 1))) {
    return Status::unsupported;
  }
  QuantizeTask q;
  // What is quantized lies nowhere.
  Status status =
      make_task(q, {nullptr, a.h.rows, backward ? a.h.cols : cols, 0, a.h.col_stride, a.out_dtype},
                a.to, a.execution.stream, groups == nullptr ? Layout::tiles : Layout::group_rows,
                groups == nullptr ? Layout::tiles : Layout::group_k);
  if (status != Status::ok) return status;
  ActParams p{};
  if (groups == nullptr) {
    if (q.rows == 0 || q.cols == 0) return Status::ok;
    status = sink_params(q, a.to, p.q);
  } else {
    status = check_groups(q, *groups);
    if (status != Status::ok) return status;
    const int64_t tiles = group_tiles(groups->rows, groups->count);
    status =
        a.out != nullptr ? Status::unsupported : sink_params(q, a.to, tiles, tiles * kTile, p.q);
    p.groups = group_table(*groups);
  }
  if (status != Status::ok) return status;
  if (groups == nullptr) status = act_rows(a, q);
  if (groups != nullptr || status == Status::unsupported)
    status = activate_group_rows(a, q, groups);
  if (status != Status::unsupported) return status;
  p.in_pairs = a.in_pairs;
  p.h = rows_of(a.h), p.grad = rows_of(a.grad), p.cols = cols, p.out = a.out;
  p.act = {a.act, a.gated, a.limit, a.alpha, a.offset};
  const int bytes = q.x_dtype == DType::f32 ? 4 : 2;
  const auto whole = [bytes](const Matrix& m) {
    return m.row_stride * bytes % 16 == 0 && reinterpret_cast<uintptr_t>(m.data) % 16 == 0;
  };
  p.vectors = cols % 8 == 0 && whole(a.h) && (!backward || whole(a.grad));
  p.halves = backward && a.gated && p.vectors && cols % kTile == 0;
  const auto stream = static_cast<cudaStream_t>(q.stream);
  const dim3 grid = tile_grid(p.q, p.halves ? p.q.col_tiles / 2 : p.q.col_tiles);
  status = is_blockwise(a.to.scaling) ? launch_factors(p, grid, stream)
           : q.x_dtype == DType::bf16 ? launch_act<__nv_bfloat16>(p, grid, stream)
           : q.x_dtype == DType::f16  ? launch_act<__half>(p, grid, stream)
                                      : launch_act<float>(p, grid, stream);
  if (status != Status::ok || q.col_sum == nullptr) return status;
  return groups == nullptr
             ? launch_sums(q.col_sum_ws, q.col_sum, q.col_sum_dtype, p.q.row_tiles, q.cols, stream)
             : launch_group_sums(q, *groups);
}

}  // namespace

Status activate(const ActArgs& args) { return run(args, nullptr); }

Status activate_grouped(const ActArgs& args, const Groups& groups) { return run(args, &groups); }

}  // namespace te_mx::sm90
