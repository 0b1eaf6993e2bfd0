// Quantizes matrices that lie apart as one, their rows behind each other: the kernel of one matrix,
// told where a tile lies.
#include "quantize/quantize_places.cuh"

namespace te_mx::sm90 {

namespace {

// The task of a call, and in `from` the first tile of every matrix of sizes[i], of `size` in all.
Status task_of(const QuantizeArgs& args, const int64_t* sizes, int64_t count, int64_t size,
               QuantizeTask& a, RowTiles& from) {
  const Status status = make_task(a, args.x, args.to, args.execution.stream);
  if (status != Status::ok) return status;
  if (count < 1 || a.rows == 0 || a.cols == 0) return Status::bad_argument;
  if (count > kMostJoined || is_blockwise(args.to.scaling)) return Status::unsupported;
  int64_t before = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (sizes[i] <= 0) return Status::bad_argument;
    if (before % kTile != 0) return Status::unsupported;
    from.begins[i] = static_cast<int>(before / kTile);
    before += sizes[i];
  }
  if (before != size) return Status::bad_argument;
  for (int64_t i = count; i < kMostJoined; ++i)
    from.begins[i] = static_cast<int>((size + kTile - 1) / kTile);
  return Status::ok;
}

int64_t bytes_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

}  // namespace

Status quantize_joined(const QuantizeArgs& args, const void* const* xs, const int64_t* rows,
                       int64_t count) {
  QuantizeTask a;
  RowTiles from{};
  Status status = task_of(args, rows, count, args.x.rows, a, from);
  if (status != Status::ok) return status;
  if (a.col_sum != nullptr) return Status::bad_argument;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t before = from.begins[i] * int64_t{kTile};
    from.xs[i] = reinterpret_cast<uintptr_t>(xs[i]) - before * a.x_stride * bytes_of(a.x_dtype);
  }
  QuantizeParams p;
  status = quantize_params(a, p);
  if (status != Status::ok) return status;
  p.x_vectors = p.x_vectors && all_aligned(xs, count);
  if (wants_plain(p)) return Status::unsupported;
  return launch_quantize(p, from, tile_grid(p, p.col_tiles), int64_t{p.row_tiles} * p.col_tiles,
                         static_cast<cudaStream_t>(a.stream), Start::early);
}

}  // namespace te_mx::sm90
