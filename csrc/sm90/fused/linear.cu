#include "te_mx/sm90.h"

namespace te_mx::sm90 {

namespace {

constexpr int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// How an operand is scaled, and what the quantizer calls the way it lies.
struct Form {
  Scaling scaling;
  Layout layout;
};

Form rows_of(const LinearArgs& a) { return {a.scaling, Layout::tiles}; }
// Of x and the gradient, which are multiplied with each other: aligned where scales are powers of
// two.
Form columns_of(const LinearArgs& a) {
  const bool aligns = is_blockwise(a.scaling) && a.rule == ScaleRule::pow2;
  return {a.scaling, aligns ? Layout::aligned_tiles : Layout::tiles};
}
Form weight(const LinearArgs& a) { return {a.w_scaling, Layout::tiles}; }

int64_t scale_bytes(const Form& form, int64_t rows, int64_t k) {
  if (!is_blockwise(form.scaling) || form.layout == Layout::aligned_tiles)
    return packed_scale_words(rows, k) * 4;
  const int64_t tile =
      form.scaling.block_rows == 1 ? packed_tiles(rows) * kTile : block_tiles(rows);
  return (k + kTile - 1) / kTile * tile * 4;
}

OperandOffsets offsets(int64_t at, int64_t rows, int64_t k, const Form& form) {
  const int64_t scales = at + aligned(rows * packed_ld(k));
  return {at, scales, scales + aligned(scale_bytes(form, rows, k))};
}

OperandOut to(void* buffer, const OperandOffsets& at) {
  uint8_t* const base = static_cast<uint8_t*>(buffer);
  return {base + at.codes, base + at.scales};
}

OperandOut in(const OperandOut& place, const Form& form) {
  return {place.codes, place.scales, form.layout};
}

// What was written of a matrix [rows, k].
Operand from(const OperandOut& made, int64_t rows, int64_t k, Element element, const Form& form) {
  Operand o{};
  o.codes = made.codes, o.scales = made.scales;
  o.rows = rows, o.k = k;
  o.element = element, o.layout = Layout::tiles;
  // NOTE: aligned tiles are operands of MX.
  if (form.layout != Layout::aligned_tiles) o.scaling = form.scaling;
  return o;
}

QuantizeArgs quantizer(const LinearArgs& a, const Matrix& x, Element element,
                       const Scaling& scaling) {
  QuantizeArgs q{};
  q.x = x;
  q.to.element = element, q.to.scaling = scaling, q.to.rule = a.rule, q.to.spread = a.spread;
  q.to.amax_epsilon = a.amax_epsilon;
  q.execution.stream = a.execution.stream;
  return q;
}

// out[m, n] = lhs[m, k] @ rhs[n, k]^T.
GemmArgs product(const LinearArgs& a, const Operand& lhs, const Operand& rhs, void* out,
                 DType out_dtype) {
  GemmArgs g{};
  g.lhs = lhs, g.rhs = rhs;
  g.epilogue.out = out, g.epilogue.out_dtype = out_dtype, g.epilogue.ldo = rhs.rows;
  g.execution.stream = a.execution.stream;
  return g;
}

}  // namespace

OperandOffsets operand_offsets(int64_t at, int64_t rows, int64_t k) {
  return offsets(at, rows, k, {Scaling{}, Layout::tiles});
}

LinearOffsets linear_offsets(const LinearArgs& a) {
  const Form rows = rows_of(a), columns = columns_of(a), w = weight(a);
  LinearOffsets o{};
  o.x_row = offsets(0, a.m, a.k, rows);
  o.x_col = offsets(0, a.k, a.m, columns);
  o.w_col = offsets(0, a.k, a.n, w);
  o.g_kept = offsets(0, a.n, a.m, columns);
  o.w_row = offsets(0, a.n, a.k, w);
  o.forward_bytes = o.w_row.end;
  if (a.w_columns) o.g_row = offsets(0, a.m, a.n, rows);
  o.g_col = {o.g_row.end, o.g_row.end, o.g_row.end};
  if (a.x_columns) o.g_col = offsets(o.g_row.end, a.n, a.m, columns);
  o.w_again = {o.g_col.end, o.g_col.end, o.g_col.end};
  if (a.w_columns && !a.w_kept) o.w_again = offsets(o.g_col.end, a.k, a.n, w);
  o.sums = o.w_again.end;
  o.backward_bytes = o.sums + aligned((a.m + 127) / 128 * a.n * 4);
  return o;
}

Status linear_forward(const LinearArgs& a) {
  const LinearOffsets at = linear_offsets(a);
  if (a.execution.workspace_bytes < at.forward_bytes) return Status::small_workspace;
  if (a.x.rows != a.m || a.x.cols != a.k || a.w.rows != a.n || a.w.cols != a.k ||
      a.x_row.codes == nullptr || (a.x_columns && a.x_col.codes == nullptr) ||
      (a.w_given && a.w_row.codes == nullptr)) {
    return Status::bad_argument;
  }
  const Form rows = rows_of(a), of_w = weight(a);
  QuantizeArgs x = quantizer(a, a.x, a.forward, a.scaling),
               w = quantizer(a, a.w, a.forward, a.w_scaling);
  const OperandOut w_row = a.w_given ? a.w_row : to(a.execution.workspace, at.w_row);
  x.to.row = in(a.x_row, rows), w.to.row = in(w_row, of_w);
  if (a.x_columns) x.to.col = in(a.x_col, columns_of(a));
  if (a.w_columns && a.w_kept) w.to.col = in(a.w_col, of_w);
  Status status = Status::ok;
  if (!a.x_given && !a.w_given) {
    status = quantize_two(w, x);
  } else if (!a.x_given) {
    status = quantize(x);
  } else if (!a.w_given) {
    status = quantize(w);
  }
  if (status != Status::ok) return status;
  GemmArgs y = product(a, from(a.x_row, a.m, a.k, a.forward, rows),
                       from(w_row, a.n, a.k, a.forward, of_w), a.y, a.y_dtype);
  y.epilogue.bias = a.bias, y.epilogue.bias_dtype = a.bias_dtype;
  return gemm(y);
}

Status linear_wgrad(const LinearArgs& a) {
  if (!a.x_columns || a.dw == nullptr || a.g_col.codes == nullptr || a.x_col.codes == nullptr)
    return Status::bad_argument;
  const Form columns = columns_of(a);
  GemmArgs dw = product(a, from(a.g_col, a.n, a.m, a.backward, columns),
                        from(a.x_col, a.k, a.m, a.forward, columns), a.dw, a.dw_dtype);
  dw.epilogue.accumulate = a.dw_accumulate;
  return gemm(dw);
}

Status linear_backward(const LinearArgs& a) {
  const bool later = a.g_col.codes != nullptr;
  if ((a.dx != nullptr) != a.w_columns || (a.dw != nullptr || later) != a.x_columns ||
      (a.dw != nullptr && later) || !(a.w_columns || a.x_columns) || a.g.rows != a.m ||
      a.g.cols != a.n) {
    return Status::bad_argument;
  }
  const LinearOffsets at = linear_offsets(a);
  if (a.execution.workspace_bytes < at.backward_bytes) return Status::small_workspace;
  const Form rows = rows_of(a), columns = columns_of(a), of_w = weight(a);
  uint8_t* const temp = static_cast<uint8_t*>(a.execution.workspace);
  QuantizeArgs g = quantizer(a, a.g, a.backward, a.scaling);
  const OperandOut g_row = to(temp, at.g_row), g_col = later ? a.g_col : to(temp, at.g_col);
  if (a.w_columns) g.to.row = in(g_row, rows);
  if (a.x_columns) g.to.col = in(g_col, columns);
  g.to.col_sum = a.db, g.to.col_sum_dtype = a.db_dtype;
  if (a.db != nullptr) g.to.col_sum_ws = reinterpret_cast<float*>(temp + at.sums);
  OperandOut w_col = a.w_col;
  Status status;
  if (a.w_columns && !a.w_kept) {
    QuantizeArgs w = quantizer(a, a.w, a.forward, a.w_scaling);
    w_col = to(temp, at.w_again), w.to.col = in(w_col, of_w);
    status = quantize_two(w, g);
  } else {
    status = quantize(g);
  }
  if (status == Status::ok && a.w_columns) {
    GemmArgs dx = product(a, from(g_row, a.m, a.n, a.backward, rows),
                          from(w_col, a.k, a.n, a.forward, of_w), a.dx, a.dx_dtype);
    dx.epilogue.accumulate = a.dx_accumulate;
    status = gemm(dx);
  }
  if (status != Status::ok || a.dw == nullptr) return status;
  LinearArgs with_columns = a;
  with_columns.g_col = g_col;
  return linear_wgrad(with_columns);
}

}  // namespace te_mx::sm90
