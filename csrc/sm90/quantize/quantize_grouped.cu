// Quantizes the rows of all groups, or the weights of all groups, in one launch: the kernel of one
// matrix, told where a tile lies.
#include <algorithm>

#include "common/groups.cuh"
#include "quantize/quantize_launch.cuh"

namespace te_mx::sm90 {

namespace {

// Tiles of 128 rows that begin anew with every group.
struct TokenTiles {
  template <class Params>
  using Outputs = const Params&;
  GroupTable table;

  __device__ __forceinline__ const void* x(const QuantizeParams& p, const Tile&) const {
    return p.a.x;
  }
  template <class Params>
  __device__ __forceinline__ const Params& outputs(const Params& p, const Tile&) const {
    return p;
  }
  __device__ __forceinline__ bool find(Tile& t, const QuantizeParams& p) const {
    GroupRows group;
    if (!find_tile(t, p) || !find_tile(table, t.rt, group)) return false;
    const int inside = 128 * (t.rt - group.first_tile());
    t.r0 = group.start + inside, t.rows = min(128, group.size() - inside);
    t.last_row = false;  // whole tiles are written along K, and the words need no padding
    return true;
  }
};

// Matrices of one size, each with a pointer of its own.
struct Stack {
  template <class Params>
  using Outputs = Params;
  static constexpr int kMost = 256;  // of one launch
  // From matrix to matrix; words of packed, bytes of plain scales.
  int64_t row_codes, row_scales, col_codes, col_scales;
  int first;
  const void* xs[kMost];

  __device__ __forceinline__ const void* x(const QuantizeParams&, const Tile& t) const {
    return xs[t.matrix];
  }
  template <class Params>
  __device__ __forceinline__ Params outputs(const Params& all, const Tile& t) const {
    Params p = all;
    const int64_t i = first + t.matrix;
    p.row.codes += i * row_codes, p.col.codes += i * col_codes;
    p.a.row_packed.scales += i * row_scales, p.a.col_packed.scales += i * col_scales;
    p.a.row_scales += i * row_scales, p.a.col_scales += i * col_scales;
    return p;
  }
  __device__ __forceinline__ bool find(Tile& t, const QuantizeParams& p) const {
    const bool found = find_tile(t, p, blockIdx.y);
    t.matrix = blockIdx.z;
    return found;
  }
};

// out[group, col] = sum over the group's tiles of partial[tile, col].
__global__ void __launch_bounds__(kSumWidth* kSumHeight)
    sum_group_tiles(const float* partial, void* out, DType out_dtype, const GroupTable table,
                    int64_t cols) {
  tile::let_dependents_start();
  tile::await_predecessors();
  const GroupRows group = find_group(table, static_cast<int>(blockIdx.y));
  add_tiles(partial + group.first_tile() * cols, out, out_dtype, blockIdx.y * cols, group.tiles(),
            cols);
}

}  // namespace

Status quantize_grouped(const GroupedQuantizeArgs& args) {
  const Groups& groups = args.groups;
  QuantizeTask a;
  Status status = make_task(a, args.all.x, args.all.to, args.all.execution.stream,
                            Layout::group_rows, Layout::group_k);
  if (status != Status::ok) return status;
  if (!valid(groups) || a.rows != groups.rows || a.row_codes != nullptr || a.col_codes != nullptr ||
      a.cols == 0 || groups.count > 65535) {
    return Status::bad_argument;
  }
  const int64_t tiles = group_tiles(groups.rows, groups.count);
  QuantizeParams p;
  status = quantize_params(a, tiles, tiles * kTile, p);
  if (status != Status::ok) return status;
  const auto stream = static_cast<cudaStream_t>(a.stream);
  const GroupTable table = group_table(groups);
  status = launch_quantize<false>(p, TokenTiles{table}, tile_grid(p, p.col_tiles),
                                  tiles * p.col_tiles, stream, Start::early);
  if (status != Status::ok || a.col_sum == nullptr) return status;
  const float* const partial = a.col_sum_ws;
  return launch_adding(sum_group_tiles, a.cols, groups.count, stream, partial, a.col_sum,
                       a.col_sum_dtype, table, a.cols);
}

Status quantize_stacked(const QuantizeArgs& args, const void* const* xs, int64_t count) {
  QuantizeTask a;
  Status status = make_task(a, args.x, args.to, args.execution.stream);
  if (status != Status::ok) return status;
  if (a.col_sum != nullptr || a.rows > 128 * 32768) return Status::bad_argument;
  if (a.rows == 0 || a.cols == 0) return Status::ok;
  QuantizeParams p;
  status = quantize_params(a, p);
  if (status != Status::ok) return status;
  const bool plain = wants_plain(p);
  Stack stack{};
  stack.row_codes = a.rows * p.row.ld,
  stack.col_codes = (a.col_lies_as_x ? a.rows : a.cols) * p.col.ld;
  stack.row_scales =
      p.row.packed ? packed_scale_words(a.rows, a.cols) : a.rows * ((a.cols + 31) / 32);
  stack.col_scales =
      p.col.packed ? packed_scale_words(a.cols, a.rows) : a.cols * ((a.rows + 31) / 32);
  for (int64_t i = 0; i < count; ++i)
    p.x_vectors = p.x_vectors && reinterpret_cast<uintptr_t>(xs[i]) % 16 == 0;
  for (int64_t first = 0; first < count; first += Stack::kMost) {
    const int64_t now = std::min<int64_t>(Stack::kMost, count - first);
    stack.first = static_cast<int>(first);
    std::copy(xs + first, xs + first + now, stack.xs);
    const int64_t tiles = now * p.row_tiles * p.col_tiles;
    const dim3 grid = tile_grid(p, p.col_tiles, now);
    const auto stream = static_cast<cudaStream_t>(a.stream);
    const Status launched =
        plain ? launch_quantize<true>(p, stack, grid, tiles, stream, Start::early)
              : launch_quantize<false>(p, stack, grid, tiles, stream, Start::early);
    if (launched != Status::ok) return launched;
  }
  return Status::ok;
}

}  // namespace te_mx::sm90
