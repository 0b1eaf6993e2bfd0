// Entry points of quantize: one matrix, and two at a time; host code shared with other quantizers.
#include "quantize_launch.cuh"

namespace te_mx::sm90 {

namespace {

__global__ void __launch_bounds__(kSumWidth* kSumHeight)
    sum_tiles(const float* partial, void* out, DType out_dtype, int64_t tiles, int64_t cols) {
  tile::let_dependents_start();
  tile::await_predecessors();
  add_tiles(partial, out, out_dtype, 0, tiles, cols);
}

int last_of(int64_t size) { return static_cast<int>((size - 1) % kTile + 1); }

// Rows of `width` codes, in vectors of `bytes` where every row allows it.
CodesOut codes_out(uint8_t* plain, const Packed& packed, int64_t width, int bytes) {
  CodesOut out{};
  out.packed = packed.codes != nullptr;
  out.codes = out.packed ? packed.codes : plain;
  out.wanted = out.codes != nullptr;
  out.ld = out.packed ? packed_ld(width) : width;
  out.last_width = last_of(out.ld);
  out.vectors = out.ld % bytes == 0 && reinterpret_cast<uintptr_t>(out.codes) % bytes == 0;
  return out;
}

}  // namespace

bool wants_plain(const QuantizeParams& p) {
  return (p.row.wanted && !p.row.packed) || (p.col.wanted && !p.col.packed);
}

dim3 tile_grid(const QuantizeParams& p, int col_tiles, int64_t matrices) {
  const int64_t groups = (p.row_tiles + (1ll << p.group_bits) - 1) >> p.group_bits;
  constexpr int64_t kMaxY = 32768;
  return dim3(static_cast<unsigned>(col_tiles) << p.group_bits,
              static_cast<unsigned>(groups < kMaxY ? groups : kMaxY),
              static_cast<unsigned>(matrices * ((groups + kMaxY - 1) / kMaxY)));
}

Status launch_sums(const float* partial, void* out, DType out_dtype, int64_t tiles, int64_t cols,
                   cudaStream_t stream) {
  return launch_adding(sum_tiles, cols, 1, stream, partial, out, out_dtype, tiles, cols);
}

Status quantize_params(const QuantizeArgs& a, QuantizeParams& p) {
  return quantize_params(a, (a.rows + 127) / 128, a.rows, p);
}

Status quantize_params(const QuantizeArgs& a, int64_t row_tiles, int64_t k, QuantizeParams& p) {
  if (a.rows < 0 || a.cols < 0 || a.spread < 0 || a.spread > kMaxSpread ||
      (a.row_codes != nullptr && a.row_packed.codes != nullptr) ||
      (a.col_codes != nullptr && a.col_packed.codes != nullptr) ||
      (a.col_lies_as_x && a.col_packed.codes != nullptr) ||
      (a.col_sum != nullptr && a.col_sum_ws == nullptr)) {
    return Status::bad_argument;
  }
  const int64_t col_tiles = (a.cols + 127) / 128;
  // Eight row tiles at a time keep both the rows and the columns that are written together long.
  int group_bits = 0;
  while (group_bits < 3 && (1 << group_bits) < row_tiles) ++group_bits;
  if (row_tiles > INT32_MAX || col_tiles > INT32_MAX >> group_bits) return Status::unsupported;
  p = {};
  p.a = a;
  p.row = codes_out(a.row_codes, a.row_packed, a.cols, 8);
  p.col = a.col_lies_as_x ? codes_out(a.col_codes, {}, a.cols, 8)
                          : codes_out(a.col_codes, a.col_packed, k, 16);
  p.x_vectors = a.cols % 8 == 0 && a.x_stride * (a.x_dtype == DType::f32 ? 4 : 2) % 16 == 0 &&
                reinterpret_cast<uintptr_t>(a.x) % 16 == 0;
  p.row_tiles = static_cast<int>(row_tiles), p.col_tiles = static_cast<int>(col_tiles);
  p.last_rows = last_of(a.rows), p.last_cols = last_of(a.cols);
  p.group_bits = group_bits;
  if ((p.row.packed && !p.row.vectors) || (p.col.packed && !p.col.vectors))
    return Status::bad_argument;
  return Status::ok;
}

namespace {

Status launch(const QuantizeArgs& a, Start start) {
  if (a.rows == 0 || a.cols == 0) return Status::ok;
  QuantizeParams p;
  Status status = quantize_params(a, p);
  if (status != Status::ok) return status;
  const auto stream = static_cast<cudaStream_t>(a.stream);
  const dim3 grid = tile_grid(p, p.col_tiles);
  const int64_t tiles = static_cast<int64_t>(p.row_tiles) * p.col_tiles;
  status = wants_plain(p) ? launch_quantize<true>(p, OneMatrix{}, grid, tiles, stream, start)
                          : launch_quantize<false>(p, OneMatrix{}, grid, tiles, stream, start);
  if (status != Status::ok || a.col_sum == nullptr) return status;
  return launch_sums(a.col_sum_ws, a.col_sum, a.col_sum_dtype, p.row_tiles, a.cols, stream);
}

}  // namespace

Status quantize(const QuantizeArgs& a) { return launch(a, Start::early); }

Status quantize_two(const QuantizeArgs& first, const QuantizeArgs& second) {
  if (first.col_sum != nullptr || first.stream != second.stream) return Status::bad_argument;
  if (first.rows == 0 || first.cols == 0) return quantize(second);
  // NOTE: what ran before is over when the first starts, so the second need not wait for it.
  const Status status = launch(first, Start::after);
  return status == Status::ok ? launch(second, Start::beside) : status;
}

}  // namespace te_mx::sm90
