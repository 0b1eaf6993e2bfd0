// Quantizes matrices that lie apart as one, their rows behind each other: the kernel of one matrix,
// told where a tile lies.
#include "quantize/quantize_places.cuh"

namespace te_mx::sm90 {

namespace {

struct Joined {
  template <class Params>
  using Outputs = const Params&;
  int begins[kMostJoined];    // the first tile of rows; past all tiles where there is no matrix
  uintptr_t xs[kMostJoined];  // where row 0 of all would be, if every row were this matrix's

  __device__ __forceinline__ const void* x(const QuantizeParams&, const Tile& t) const {
    uintptr_t from = xs[0];
#pragma unroll
    for (int i = 1; i < kMostJoined; ++i) from = t.rt < begins[i] ? from : xs[i];
    return reinterpret_cast<const void*>(from);
  }
  template <class Params>
  __device__ __forceinline__ const Params& outputs(const Params& p, const Tile&) const {
    return p;
  }
  __device__ __forceinline__ bool find(Tile& t, const QuantizeParams& p) const {
    return find_tile(t, p);
  }
};

// The task of a call, and in `from` the first tile of every matrix of sizes[i], of `size` in all.
template <class From>
Status task_of(const QuantizeArgs& args, const int64_t* sizes, int64_t count, int64_t size,
               QuantizeTask& a, From& from) {
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

template <class From>
Status launch(const QuantizeParams& p, const From& from) {
  if (wants_plain(p)) return Status::unsupported;
  return launch_quantize<false>(p, from, tile_grid(p, p.col_tiles),
                                static_cast<int64_t>(p.row_tiles) * p.col_tiles,
                                static_cast<cudaStream_t>(p.a.stream), Start::early);
}

int64_t bytes_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

}  // namespace

Status quantize_joined(const QuantizeArgs& args, const void* const* xs, const int64_t* rows,
                       int64_t count) {
  QuantizeTask a;
  Joined from{};
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
  return launch(p, from);
}

}  // namespace te_mx::sm90
