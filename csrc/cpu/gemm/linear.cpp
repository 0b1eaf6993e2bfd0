// A linear layer as one call each way: quantizes and multiplies with the kernels of separate calls,
// and with their bits; a small layer spends its time between those calls.
#include <algorithm>

#include "common/check.h"
#include "common/sizes.h"
#include "common/task_team.h"
#include "gemm/gemm_internal.hpp"
#include "gemm/gemm_plan.hpp"
#include "mxtile/mx/float_mode.hpp"
#include "mxtile/mx/round.hpp"
#include "te_mx/cpu.h"

namespace te_mx::cpu {
namespace {

constexpr int64_t kAlign = 64;
constexpr int64_t kSerialElements = 64 * 1024;  // as for quantizers
// No size of a layer reaches this, so that no number of bytes overflows.
constexpr int64_t kMostSize = int64_t{1} << 40, kMostElements = int64_t{1} << 50;

int64_t aligned(int64_t bytes) { return round_up(bytes, kAlign); }

// One operand: how it is scaled, and along what its codes lie.
struct Form {
  int64_t rows, k;
  Element element;
  Scaling scaling;
  Layout layout;
};

Form x_rows(const LinearArgs& a) { return {a.m, a.k, a.forward, a.scaling, Layout::k_last}; }
Form x_columns(const LinearArgs& a) { return {a.k, a.m, a.forward, a.scaling, Layout::k_first}; }
Form w_rows(const LinearArgs& a) { return {a.n, a.k, a.forward, a.w_scaling, Layout::k_last}; }
Form w_columns(const LinearArgs& a) { return {a.k, a.n, a.forward, a.w_scaling, Layout::k_first}; }
Form g_rows(const LinearArgs& a) { return {a.m, a.n, a.backward, a.scaling, Layout::k_last}; }
Form g_columns(const LinearArgs& a) { return {a.n, a.m, a.backward, a.scaling, Layout::k_first}; }

OperandOffsets offsets(int64_t at, const Form& f) {
  const bool nibbles = is_fp4(f.element) && f.layout == Layout::k_last;
  const int64_t codes = f.rows * (nibbles ? ceil_div(f.k, 2) : f.k);
  const int64_t blocks = ceil_div(f.rows, f.scaling.block_rows) * ceil_div(f.k, f.scaling.block_k);
  const bool floats = f.scaling.type == ScaleType::f32;
  const int64_t scales = at + (floats ? round_up(codes, 4) : codes);
  return {at, scales, scales + (floats ? 4 * blocks : blocks)};
}

// In a workspace, where something follows.
OperandOffsets followed(int64_t at, const Form& f) {
  OperandOffsets o = offsets(at, f);
  o.end = aligned(o.end);
  return o;
}

OperandOut to(void* buffer, const OperandOffsets& at) {
  uint8_t* const base = static_cast<uint8_t*>(buffer);
  return {base + at.codes, base + at.scales};
}

Operand from(const OperandOut& made, const Form& f) {
  Operand o;
  o.codes = made.codes, o.scales = made.scales;
  o.rows = f.rows, o.k = f.k;
  o.element = f.element, o.layout = f.layout, o.scaling = f.scaling;
  return o;
}

bool whole(const OperandOut& o) { return o.codes != nullptr && o.scales != nullptr; }

// The stream kernel of a panel kernel's level where it is the faster one.
Kernel kernel_of(int32_t panel, int64_t m, int64_t n, int64_t k) {
  constexpr int32_t kToStream =
      static_cast<int32_t>(Kernel::amx_stream) - static_cast<int32_t>(Kernel::amx_bf16);
  const Kernel stream = static_cast<Kernel>(panel + kToStream);
  return stream_pays(stream, m, n, k) ? stream : static_cast<Kernel>(panel);
}

bool is_panel(int32_t kernel) {
  return kernel >= static_cast<int32_t>(Kernel::portable_f32) &&
         kernel <= static_cast<int32_t>(Kernel::amx_bf16);
}

// out[m, n] = lhs[m, k] @ rhs[n, k]^T.
GemmArgs product(const LinearArgs& a, const Operand& lhs, const Operand& rhs, void* out,
                 DType out_dtype) {
  GemmArgs g;
  g.lhs = lhs, g.rhs = rhs;
  g.epilogue.out = out, g.epilogue.ldo = rhs.rows, g.epilogue.out_dtype = out_dtype;
  g.execution.threads = a.execution.threads;
  g.execution.kernel =
      static_cast<int32_t>(kernel_of(a.execution.kernel, lhs.rows, rhs.rows, lhs.k));
  return g;
}

GemmArgs y_of(const LinearArgs& a, const OperandOut& x, const OperandOut& w) {
  GemmArgs y = product(a, from(x, x_rows(a)), from(w, w_rows(a)), a.y, a.y_dtype);
  y.epilogue.bias = a.bias, y.epilogue.bias_dtype = a.bias_dtype;
  return y;
}

GemmArgs dx_of(const LinearArgs& a, const OperandOut& g, const OperandOut& w) {
  GemmArgs dx = product(a, from(g, g_rows(a)), from(w, w_columns(a)), a.dx, a.dx_dtype);
  dx.epilogue.accumulate = a.dx_accumulate;
  return dx;
}

GemmArgs dw_of(const LinearArgs& a, const OperandOut& g, const OperandOut& x) {
  GemmArgs dw = product(a, from(g, g_columns(a)), from(x, x_columns(a)), a.dw, a.dw_dtype);
  dw.epilogue.accumulate = a.dw_accumulate;
  return dw;
}

// What a GEMM needs, behind `at` bytes of the workspace.
int64_t with_gemm(int64_t at, const GemmArgs& g) { return at + workspace_bytes(g); }

Status run_gemm(const LinearArgs& a, GemmArgs g, int64_t at, Kernel& ran) {
  g.execution.workspace = static_cast<char*>(a.execution.workspace) + at;
  g.execution.workspace_bytes = a.execution.workspace_bytes - at;
  return gemm(g, ran);
}

QuantizeArgs quantizer(const LinearArgs& a, const Matrix& x, Element element,
                       const Scaling& scaling) {
  QuantizeArgs q;
  q.x = x;
  q.to.element = element, q.to.scaling = scaling;
  q.to.rule = a.rule, q.to.amax_epsilon = a.amax_epsilon;
  q.to.col.layout = Layout::k_first;
  q.execution.threads = a.execution.threads;
  return q;
}

void set(OperandOut& to, const OperandOut& place) {
  to.codes = place.codes, to.scales = place.scales;
}

// ok, or what is wrong with the formats: all of MX, or all with fp32 scales.
Status check_formats(const LinearArgs& a) {
  if (!is_blockwise(a.scaling)) {
    if (!known(a.rule)) return Status::bad_argument;
    Status status = check_mx(a.forward, a.scaling);
    if (status == Status::ok) status = check_mx(a.forward, a.w_scaling);
    if (status == Status::ok) status = check_mx(a.backward, a.scaling);
    const bool other = is_f32_rule(a.rule) || is_writer(a.rule);
    return status == Status::ok && other ? Status::unsupported : status;
  }
  QuantizeOut out;
  out.element = a.forward, out.scaling = a.scaling;
  out.rule = a.rule, out.amax_epsilon = a.amax_epsilon;
  Status status = check_blockwise_out(out);
  out.element = a.backward;
  if (status == Status::ok) status = check_blockwise_out(out);
  return status == Status::ok && !is_blockwise(a.w_scaling) ? Status::unsupported : status;
}

bool sizes_ok(const LinearArgs& a) {
  for (const int64_t size : {a.m, a.n, a.k}) {
    if (size < 1 || size > kMostSize) return false;
  }
  for (const Scaling& s : {a.scaling, a.w_scaling}) {
    if (s.block_rows < 1 || s.block_k < 1) return false;
  }
  const int64_t most = std::max({a.m, a.n, a.k}),
                middle = a.m + a.n + a.k - most - std::min({a.m, a.n, a.k});
  return middle <= kMostElements / most;
}

Status check(const LinearArgs& a) {
  if (a.m == 0 || a.n == 0 || a.k == 0) return Status::unsupported;
  if (!sizes_ok(a) || !is_panel(a.execution.kernel)) return Status::bad_argument;
  return check_formats(a);
}

bool is_of(const Matrix& x, int64_t rows, int64_t cols) {
  return x.data != nullptr && x.rows == rows && x.cols == cols;
}

// Whether a call is over before a team has come. So it is with few products, and with somewhat more
// of matrices so small that their quantizers wake nobody either.
bool alone(const LinearArgs& a) {
  const bool small = std::max({a.m * a.k, a.n * a.k, a.m * a.n}) < kSerialElements;
  const int64_t most = small ? 4 * kSerialProducts : kSerialProducts;
  return a.m * a.n < most && a.m * a.n * a.k < most;
}

LinearArgs with_threads(const LinearArgs& given) {
  LinearArgs a = given;
  if (alone(a)) a.execution.threads = 1;
  return a;
}

// One team for all steps of a call.
template <class Steps>
Status in_one_region(const LinearArgs& a, Steps&& steps) {
  Status status = Status::ok;
  parallel_tasks(a.execution.threads, 1, 1, [&](int64_t, int) { status = steps(); });
  return status;
}

void round_sums(const float* sums, int64_t n, void* to, DType dtype) {
  const mxtile::mx::KeepDenormals keep_denormals;
  uint16_t* const out = static_cast<uint16_t*>(to);
  if (dtype == DType::bf16) {  // a loop of its own: compilers make vectors of it
    for (int64_t i = 0; i < n; ++i) out[i] = mxtile::mx::f32_to_bf16(mxtile::mx::as_bits(sums[i]));
  } else {
    for (int64_t i = 0; i < n; ++i) out[i] = mxtile::mx::f32_to_f16(mxtile::mx::as_bits(sums[i]));
  }
}

}  // namespace

LinearOffsets linear_offsets(const LinearArgs& a) {
  LinearOffsets o{};
  if (check(a) != Status::ok) return o;
  uint8_t place = 0;  // a workspace's size asks whether there are scales, not where
  const OperandOut any{&place, &place};
  o.x_row = offsets(0, x_rows(a)), o.x_col = offsets(0, x_columns(a));
  o.w_col = offsets(0, w_columns(a)), o.g_kept = offsets(0, g_columns(a));
  o.w_row = followed(0, w_rows(a));
  o.forward_bytes = with_gemm(o.w_row.end, y_of(a, any, any));
  if (a.w_columns) o.g_row = followed(0, g_rows(a));
  o.g_col = {o.g_row.end, o.g_row.end, o.g_row.end};
  if (a.x_columns) o.g_col = followed(o.g_row.end, g_columns(a));
  o.w_again = {o.g_col.end, o.g_col.end, o.g_col.end};
  if (a.w_columns && !a.w_kept) o.w_again = followed(o.g_col.end, w_columns(a));
  o.sums = o.w_again.end;
  // Partial sums, and whole ones that are rounded.
  const int64_t gemm = o.sums + aligned((ceil_div(a.m, kColSumRows) + 1) * a.n * 4);
  o.backward_bytes = gemm;
  if (a.w_columns) o.backward_bytes = with_gemm(gemm, dx_of(a, any, any));
  if (a.x_columns)
    o.backward_bytes = std::max(o.backward_bytes, with_gemm(gemm, dw_of(a, any, any)));
  return o;
}

Status linear_forward(const LinearArgs& given, Kernel& ran) {
  const LinearArgs a = with_threads(given);
  ran = static_cast<Kernel>(a.execution.kernel);
  const Status format = check(a);
  if (format != Status::ok) return format;
  if ((!a.x_given && !is_of(a.x, a.m, a.k)) || (!a.w_given && !is_of(a.w, a.n, a.k)) ||
      !whole(a.x_row) || (a.x_columns && !a.x_given && !whole(a.x_col)) ||
      (a.w_given ? !whole(a.w_row) : a.w_columns && a.w_kept && !whole(a.w_col))) {
    return Status::bad_argument;
  }
  const LinearOffsets at = linear_offsets(a);
  if (a.execution.workspace == nullptr || a.execution.workspace_bytes < at.forward_bytes)
    return Status::small_workspace;
  const OperandOut w_row = a.w_given ? a.w_row : to(a.execution.workspace, at.w_row);
  return in_one_region(a, [&] {
    Status status = Status::ok;
    if (!a.x_given) {
      QuantizeArgs x = quantizer(a, a.x, a.forward, a.scaling);
      set(x.to.row, a.x_row);
      if (a.x_columns) set(x.to.col, a.x_col);
      status = quantize(x);
    }
    if (status == Status::ok && !a.w_given) {
      QuantizeArgs w = quantizer(a, a.w, a.forward, a.w_scaling);
      set(w.to.row, w_row);
      if (a.w_columns && a.w_kept) set(w.to.col, a.w_col);
      status = quantize(w);
    }
    return status == Status::ok ? run_gemm(a, y_of(a, a.x_row, w_row), at.w_row.end, ran) : status;
  });
}

Status linear_wgrad(const LinearArgs& a, Kernel& ran) {
  ran = static_cast<Kernel>(a.execution.kernel);
  const Status format = check(a);
  if (format != Status::ok) return format;
  if (!a.x_columns || a.dw == nullptr || !whole(a.g_col) || !whole(a.x_col))
    return Status::bad_argument;
  return run_gemm(a, dw_of(a, a.g_col, a.x_col), 0, ran);
}

Status linear_backward(const LinearArgs& given, uint32_t& ran) {
  const LinearArgs a = with_threads(given);
  const uint32_t panel = static_cast<uint32_t>(a.execution.kernel);
  ran = panel | panel << 8;
  const Status format = check(a);
  if (format != Status::ok) return format;
  const bool later = a.g_col.codes != nullptr;
  if ((a.dx != nullptr) != a.w_columns || (a.dw != nullptr || later) != a.x_columns ||
      (a.dw != nullptr && later) || !(a.w_columns || a.x_columns) || !is_of(a.g, a.m, a.n) ||
      (later && !whole(a.g_col)) || (a.dw != nullptr && !whole(a.x_col)) || !known(a.db_dtype) ||
      (a.w_columns && !(a.w_kept ? whole(a.w_col) : is_of(a.w, a.n, a.k)))) {
    return Status::bad_argument;
  }
  const LinearOffsets at = linear_offsets(a);
  if (a.execution.workspace == nullptr || a.execution.workspace_bytes < at.backward_bytes)
    return Status::small_workspace;
  char* const temp = static_cast<char*>(a.execution.workspace);
  const OperandOut g_row = to(temp, at.g_row), g_col = later ? a.g_col : to(temp, at.g_col);
  const OperandOut w_col = a.w_kept ? a.w_col : to(temp, at.w_again);
  float* const sums = reinterpret_cast<float*>(temp + at.sums);
  const int64_t behind = at.sums + aligned((ceil_div(a.m, kColSumRows) + 1) * a.n * 4);
  return in_one_region(a, [&] {
    QuantizeArgs g = quantizer(a, a.g, a.backward, a.scaling);
    if (a.w_columns) set(g.to.row, g_row);
    if (a.x_columns) set(g.to.col, g_col);
    const bool rounds = a.db != nullptr && a.db_dtype != DType::f32;
    if (a.db != nullptr) g.to.col_sum = rounds ? sums : a.db, g.to.col_sum_ws = sums + a.n;
    Status status = quantize(g);
    if (status == Status::ok && rounds) round_sums(sums, a.n, a.db, a.db_dtype);
    if (status == Status::ok && a.w_columns && !a.w_kept) {
      QuantizeArgs w = quantizer(a, a.w, a.forward, a.w_scaling);
      set(w.to.col, w_col);
      status = quantize(w);
    }
    Kernel dx{}, dw{};
    if (status == Status::ok && a.w_columns) {
      const MoreSteps dw_follows(a.dw != nullptr);
      status = run_gemm(a, dx_of(a, g_row, w_col), behind, dx);
    }
    if (status == Status::ok && a.dw != nullptr)
      status = run_gemm(a, dw_of(a, g_col, a.x_col), behind, dw);
    ran = static_cast<uint32_t>(dx) | static_cast<uint32_t>(dw) << 8;
    return status;
  });
}

}  // namespace te_mx::cpu
