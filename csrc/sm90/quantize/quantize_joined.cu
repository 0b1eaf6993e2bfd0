// Quantizes matrices that lie apart as one, their rows behind each other: the kernel of one matrix,
// told where the rows of a tile begin.
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

}  // namespace

Status quantize_joined(const QuantizeArgs& args, const void* const* xs, const int64_t* rows,
                       int64_t count) {
  QuantizeTask a;
  Status status = make_task(a, args.x, args.to, args.execution.stream);
  if (status != Status::ok) return status;
  if (count < 1 || a.col_sum != nullptr || a.cols == 0) return Status::bad_argument;
  if (count > kMostJoined || is_blockwise(args.to.scaling)) return Status::unsupported;
  Joined from{};
  int64_t before = 0;
  const int64_t row_bytes = a.x_stride * (a.x_dtype == DType::f32 ? 4 : 2);
  for (int64_t i = 0; i < count; ++i) {
    if (rows[i] <= 0) return Status::bad_argument;
    if (before % kTile != 0) return Status::unsupported;
    from.begins[i] = static_cast<int>(before / kTile);
    from.xs[i] = reinterpret_cast<uintptr_t>(xs[i]) - before * row_bytes;
    before += rows[i];
  }
  if (before != a.rows) return Status::bad_argument;
  QuantizeParams p;
  status = quantize_params(a, p);
  if (status != Status::ok) return status;
  if (wants_plain(p)) return Status::unsupported;
  for (int64_t i = count; i < kMostJoined; ++i) from.begins[i] = p.row_tiles;
  p.x_vectors = p.x_vectors && all_aligned(xs, count);
  return launch_quantize<false>(p, from, tile_grid(p, p.col_tiles),
                                static_cast<int64_t>(p.row_tiles) * p.col_tiles,
                                static_cast<cudaStream_t>(a.stream), Start::early);
}

}  // namespace te_mx::sm90
