// Quantizes the rows of all groups, or the weights of all groups, in one launch: the kernel of one
// matrix, told where a tile lies. Weights are not in E5M2.
#include "quantize/group_rows.h"
#include "quantize/quantize_places.cuh"

namespace te_mx::sm90 {

namespace {

// out[group, col] = sum over the group's tiles of partial[tile, col].
__global__ void __launch_bounds__(kSumWidth* kSumHeight)
    sum_group_tiles(const float* partial, void* out, DType out_dtype, const GroupTable table,
                    int64_t cols) {
  tile::let_dependents_start();
  tile::await_predecessors();
  const GroupRows group = find_group(table, static_cast<int>(blockIdx.y));
  add_tiles(partial + group.first_tile() * cols, cols, out, out_dtype, blockIdx.y * cols,
            group.tiles(), cols);
}

}  // namespace

Status check_groups(const QuantizeTask& a, const Groups& groups) {
  const bool bad = !valid(groups) || a.rows != groups.rows || a.row_codes != nullptr ||
                   a.col_codes != nullptr || a.cols == 0 || groups.count > 65535;
  return bad ? Status::bad_argument : Status::ok;
}

Status launch_group_sums(const QuantizeTask& a, const Groups& groups) {
  const float* const partial = a.col_sum_ws;
  return launch_adding(sum_group_tiles, a.cols, groups.count, static_cast<cudaStream_t>(a.stream),
                       partial, a.col_sum, a.col_sum_dtype, group_table(groups), a.cols);
}

Status quantize_grouped(const GroupedQuantizeArgs& args) {
  const Groups& groups = args.groups;
  QuantizeTask a;
  const QuantizeOut& to = args.all.to;
  Status status = make_task(a, args.all.x, plainly(to), args.all.execution.stream,
                            Layout::group_rows, Layout::group_k);
  if (status != Status::ok) return status;
  status = check_groups(a, groups);
  if (status != Status::ok) return status;
  if (args.gather != nullptr && (!rounds_plainly(to) || is_blockwise(to.scaling)))
    return Status::unsupported;
  if (!rounds_plainly(to)) {
    status = is_blockwise(to.scaling) ? Status::unsupported : quantize_randomly(a, to, &groups);
  } else if (is_blockwise(to.scaling)) {
    status = quantize_grouped_factors(a, args);
  } else {
    const int64_t tiles = group_tiles(groups.rows, groups.count);
    QuantizeParams p;
    status = quantize_params(a, tiles, tiles * kTile, p);
    if (status != Status::ok) return status;
    status = quantize_group_rows(a, groups, args.gather);
    if (status != Status::unsupported) return status;
    RowTiles where = row_tiles_of(a.x, group_table(groups));
    where.gather = args.gather;
    status = launch_quantize(p, where, tile_grid(p, p.col_tiles), tiles * p.col_tiles,
                             static_cast<cudaStream_t>(a.stream), Start::early);
  }
  return status != Status::ok || a.col_sum == nullptr ? status : launch_group_sums(a, groups);
}

Status quantize_stacked(const QuantizeArgs& args, const void* const* xs, int64_t count) {
  QuantizeTask a;
  Status status = make_task(a, args.x, args.to, args.execution.stream);
  if (status != Status::ok) return status;
  if (a.col_sum != nullptr || a.rows > 128 * 32768) return Status::bad_argument;
  if (!is_of_weights(a.element)) return Status::unsupported;
  if (a.rows == 0 || a.cols == 0) return Status::ok;
  if (is_blockwise(args.to.scaling)) return quantize_stacked_factors(a, args.to, xs, count);
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
  p.x_vectors = p.x_vectors && all_aligned(xs, count);
  const auto stream = static_cast<cudaStream_t>(a.stream);
  return launch_stacks(stack, xs, count, [&](const Stack& some, int64_t now) {
    const int64_t tiles = now * p.row_tiles * p.col_tiles;
    const dim3 grid = tile_grid(p, p.col_tiles, now);
    return plain ? launch_quantize<true>(p, some, grid, tiles, stream, Start::early)
                 : launch_quantize<false>(p, some, grid, tiles, stream, Start::early);
  });
}

}  // namespace te_mx::sm90
