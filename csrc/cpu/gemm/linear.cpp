// A linear layer without gradients as one call: quantizes x and w into the workspace and
// multiplies. Bits are those of the three calls; a small layer spends its time between them.
#include "common/check.h"
#include "te_mx/cpu.h"

namespace te_mx::cpu {
namespace {

constexpr int64_t kAlign = 64;

int64_t aligned(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }
int64_t blocks(int64_t k) { return (k + kBlock - 1) / kBlock; }

// Where codes and scales lie in the workspace, and behind them the GEMM's own.
struct Places {
  int64_t x_codes, x_scales, w_codes, w_scales, gemm;
};

Places places(const LinearArgs& a) {
  Places p{};
  p.x_scales = aligned(a.m * a.k);
  p.w_codes = p.x_scales + aligned(a.m * blocks(a.k));
  p.w_scales = p.w_codes + aligned(a.n * a.k);
  p.gemm = p.w_scales + aligned(a.n * blocks(a.k));
  return p;
}

Operand operand(const LinearArgs& a, int64_t rows, const uint8_t* codes, const uint8_t* scales) {
  Operand o;
  o.codes = codes, o.scales = scales;
  o.rows = rows, o.k = a.k;
  o.element = a.forward, o.scaling = a.scaling;
  return o;
}

GemmArgs product(const LinearArgs& a, uint8_t* base) {
  const Places p = places(a);
  GemmArgs g;
  g.lhs = operand(a, a.m, base + p.x_codes, base + p.x_scales);
  g.rhs = operand(a, a.n, base + p.w_codes, base + p.w_scales);
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
  q.to.element = a.forward, q.to.scaling = a.scaling, q.to.rule = a.rule;
  q.to.row.codes = const_cast<uint8_t*>(to.codes);
  q.to.row.scales = const_cast<void*>(to.scales);
  q.execution.threads = a.execution.threads;
  return quantize(q);
}

}  // namespace

int64_t workspace_bytes(const LinearArgs& a) {
  return places(a).gemm + workspace_bytes(product(a, nullptr));
}

Status linear_forward(const LinearArgs& a, Kernel& ran) {
  ran = static_cast<Kernel>(a.execution.kernel);
  if (a.m <= 0 || a.n <= 0 || a.k <= 0 || a.x_columns || a.w_columns) return Status::unsupported;
  if (a.x.rows != a.m || a.x.cols != a.k || a.w.rows != a.n || a.w.cols != a.k)
    return Status::bad_argument;
  if (!known(a.rule)) return Status::bad_argument;
  const Status format = check_mx(a.forward, a.scaling);
  if (format != Status::ok) return format;
  if (is_f32_rule(a.rule)) return Status::unsupported;
  if (a.execution.workspace_bytes < workspace_bytes(a)) return Status::small_workspace;
  const GemmArgs g = product(a, static_cast<uint8_t*>(a.execution.workspace));
  Status status = rowwise(a, a.x, g.lhs);
  if (status == Status::ok) status = rowwise(a, a.w, g.rhs);
  return status == Status::ok ? gemm(g, ran) : status;
}

}  // namespace te_mx::cpu
