#include "te_mx/sm90_linear.h"

namespace te_mx::sm90 {

namespace {

constexpr int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

Packed place(const uint8_t* buffer, const LinearRoom& at) {
  uint8_t* const base = const_cast<uint8_t*>(buffer);
  return {base + at.codes, reinterpret_cast<uint32_t*>(base + at.scales)};
}

QuantizeArgs quantizer(const LinearMatrix& x, int64_t rows, int64_t cols, Format fmt,
                       const LinearFormat& format, void* stream) {
  QuantizeArgs q{};
  q.x = x.data, q.rows = rows, q.cols = cols, q.x_stride = x.stride, q.x_dtype = x.dtype;
  q.fmt = fmt, q.rule = format.rule, q.spread = format.spread, q.stream = stream;
  return q;
}

// out[m, n] = lhs[m, k] @ rhs[n, k]^T.
GemmArgs product(const Packed& lhs, Format lhs_fmt, const Packed& rhs, Format rhs_fmt, int64_t m,
                 int64_t n, int64_t k, const LinearResult& out, void* stream) {
  GemmArgs g{};
  g.lhs = lhs, g.rhs = rhs, g.lhs_fmt = lhs_fmt, g.rhs_fmt = rhs_fmt;
  g.m = m, g.n = n, g.k = k;
  g.out = out.data, g.out_dtype = out.dtype, g.ldo = n;
  g.config = -1, g.stream = stream;
  return g;
}

}  // namespace

LinearRoom linear_room(int64_t at, int64_t rows, int64_t k) {
  const int64_t scales = at + aligned(rows * packed_ld(k));
  return {at, scales, scales + aligned(packed_scale_words(rows, k) * 4)};
}

LinearRooms linear_rooms(const LinearShape& s) {
  LinearRooms r{};
  r.x_row = linear_room(0, s.m, s.k);
  r.w_row = linear_room(r.x_row.end, s.n, s.k);
  if (s.x_columns) r.x_col = linear_room(0, s.k, s.m);
  r.w_col = {r.x_col.end, r.x_col.end, r.x_col.end};
  if (s.w_columns) r.w_col = linear_room(r.x_col.end, s.k, s.n);
  if (s.w_columns) r.g_row = linear_room(0, s.m, s.n);
  r.g_col = {r.g_row.end, r.g_row.end, r.g_row.end};
  if (s.x_columns) r.g_col = linear_room(r.g_row.end, s.n, s.m);
  r.sums = r.g_col.end;
  r.backward_bytes = r.sums + aligned((s.m + 127) / 128 * s.n * 4);
  return r;
}

Status linear_forward(const LinearForward& a) {
  const LinearShape& s = a.shape;
  const LinearRooms rooms = linear_rooms(s);
  const Format fmt = a.format.forward;
  QuantizeArgs x = quantizer(a.x, s.m, s.k, fmt, a.format, a.stream);
  QuantizeArgs w = quantizer(a.w, s.n, s.k, fmt, a.format, a.stream);
  x.row_packed = place(a.temp, rooms.x_row), w.row_packed = place(a.temp, rooms.w_row);
  if (s.x_columns) x.col_packed = place(a.saved, rooms.x_col);
  if (s.w_columns) w.col_packed = place(a.saved, rooms.w_col);
  const Status status = quantize_two(w, x);
  if (status != Status::ok) return status;
  GemmArgs y = product(x.row_packed, fmt, w.row_packed, fmt, s.m, s.n, s.k, a.y, a.stream);
  y.bias = a.bias, y.bias_dtype = a.bias_dtype;
  return gemm(y);
}

Status linear_backward(const LinearBackward& a) {
  const LinearShape& s = a.shape;
  if ((a.dx.data != nullptr) != s.w_columns || (a.dw.data != nullptr) != s.x_columns ||
      !(s.w_columns || s.x_columns)) {
    return Status::bad_argument;
  }
  const LinearRooms rooms = linear_rooms(s);
  const Format forward = a.format.forward, backward = a.format.backward;
  QuantizeArgs g = quantizer(a.g, s.m, s.n, backward, a.format, a.stream);
  if (s.w_columns) g.row_packed = place(a.temp, rooms.g_row);
  if (s.x_columns) g.col_packed = place(a.temp, rooms.g_col);
  g.col_sum = a.db.data, g.col_sum_dtype = a.db.dtype;
  if (a.db.data != nullptr) g.col_sum_ws = reinterpret_cast<float*>(a.temp + rooms.sums);
  Status status = quantize(g);
  if (status == Status::ok && s.w_columns) {
    status = gemm(product(g.row_packed, backward, place(a.saved, rooms.w_col), forward, s.m, s.k,
                          s.n, a.dx, a.stream));
  }
  if (status == Status::ok && s.x_columns) {
    status = gemm(product(g.col_packed, backward, place(a.saved, rooms.x_col), forward, s.n, s.k,
                          s.m, a.dw, a.stream));
  }
  return status;
}

}  // namespace te_mx::sm90
