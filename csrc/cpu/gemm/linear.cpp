// A linear layer without gradients as one call: quantizes x and w into the workspace and
// multiplies. Bits are those of the three calls; a small layer spends its time between them.
#include "common/check.h"
#include "common/sizes.h"
#include "common/task_team.h"
#include "gemm/gemm_internal.hpp"
#include "te_mx/cpu.h"

namespace te_mx::cpu {
namespace {

constexpr int64_t kAlign = 64;

int64_t aligned(int64_t bytes) { return round_up(bytes, kAlign); }

int64_t scale_bytes(const Scaling& s, int64_t rows, int64_t k) {
  const int64_t bytes = s.type == ScaleType::f32 ? 4 : 1;
  return bytes * ceil_div(rows, s.block_rows) * ceil_div(k, s.block_k);
}

// Where codes and scales lie in the workspace, and behind them the GEMM's own.
struct Places {
  int64_t x_codes, x_scales, w_codes, w_scales, gemm;
};

Places places(const LinearArgs& a) {
  Places p{};
  p.x_scales = aligned(a.m * a.k);
  p.w_codes = p.x_scales + aligned(scale_bytes(a.scaling, a.m, a.k));
  p.w_scales = p.w_codes + aligned(a.n * a.k);
  p.gemm = p.w_scales + aligned(scale_bytes(a.w_scaling, a.n, a.k));
  return p;
}

Operand operand(const LinearArgs& a, int64_t rows, const Scaling& scaling, const uint8_t* codes,
                const uint8_t* scales) {
  Operand o;
  o.codes = codes, o.scales = scales;
  o.rows = rows, o.k = a.k;
  o.element = a.forward, o.scaling = scaling;
  return o;
}

GemmArgs product(const LinearArgs& a, uint8_t* base) {
  const Places p = places(a);
  GemmArgs g;
  g.lhs = operand(a, a.m, a.scaling, base + p.x_codes, base + p.x_scales);
  g.rhs = operand(a, a.n, a.w_scaling, base + p.w_codes, base + p.w_scales);
  g.epilogue.out = a.y, g.epilogue.ldo = a.n, g.epilogue.out_dtype = a.y_dtype;
  g.epilogue.bias = a.bias, g.epilogue.bias_dtype = a.bias_dtype;
  g.execution = a.execution;
  g.execution.workspace = base + p.gemm;
  g.execution.workspace_bytes = a.execution.workspace_bytes - p.gemm;
  return g;
}

Status rowwise(const LinearArgs& a, const Matrix& x, const Operand& to) {
  QuantizeArgs q;
  q.x = x;
  q.to.element = to.element, q.to.scaling = to.scaling;
  q.to.rule = a.rule, q.to.amax_epsilon = a.amax_epsilon;
  q.to.row.codes = const_cast<uint8_t*>(to.codes);
  q.to.row.scales = const_cast<void*>(to.scales);
  q.execution.threads = a.execution.threads;
  return quantize(q);
}

// ok, or what is wrong with the formats: both of MX, or both with fp32 scales.
Status check_formats(const LinearArgs& a) {
  if (!is_blockwise(a.scaling)) {
    if (!known(a.rule)) return Status::bad_argument;
    Status status = check_mx(a.forward, a.scaling);
    if (status == Status::ok) status = check_mx(a.forward, a.w_scaling);
    return status == Status::ok && is_f32_rule(a.rule) ? Status::unsupported : status;
  }
  QuantizeOut out;
  out.element = a.forward, out.scaling = a.scaling;
  out.rule = a.rule, out.amax_epsilon = a.amax_epsilon;
  const Status status = check_blockwise_out(out);
  return status == Status::ok && !is_blockwise(a.w_scaling) ? Status::unsupported : status;
}

}  // namespace

int64_t workspace_bytes(const LinearArgs& a) {
  for (const Scaling& s : {a.scaling, a.w_scaling}) {
    if (s.block_rows < 1 || s.block_k < 1) return 0;  // which linear_forward() refuses
  }
  return places(a).gemm + workspace_bytes(product(a, nullptr));
}

Status linear_forward(const LinearArgs& a, Kernel& ran) {
  ran = static_cast<Kernel>(a.execution.kernel);
  if (a.m <= 0 || a.n <= 0 || a.k <= 0 || a.x_columns || a.w_columns) return Status::unsupported;
  if (a.x.rows != a.m || a.x.cols != a.k || a.w.rows != a.n || a.w.cols != a.k)
    return Status::bad_argument;
  const Status format = check_formats(a);
  if (format != Status::ok) return format;
  if (a.execution.workspace_bytes < workspace_bytes(a)) return Status::small_workspace;
  const GemmArgs g = product(a, static_cast<uint8_t*>(a.execution.workspace));
  Status status = Status::ok;
  const int threads = a.m * a.n * a.k < kSerialProducts ? 1 : a.execution.threads;
  parallel_tasks(threads, 1, 1, [&](int64_t, int) {
    status = rowwise(a, a.x, g.lhs);
    if (status == Status::ok) status = rowwise(a, a.w, g.rhs);
    if (status == Status::ok) status = gemm(g, ran);
  });
  return status;
}

}  // namespace te_mx::cpu
