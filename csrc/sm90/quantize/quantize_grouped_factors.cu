// The quantizer to codes with fp32 factors of the rows of all groups, and of several matrices.
#include "quantize/factor_launch.cuh"
#include "quantize/quantize_places.cuh"

namespace te_mx::sm90 {

Status quantize_grouped_factors(const QuantizeTask& a, const GroupedQuantizeArgs& args) {
  const QuantizeOut& to = args.all.to;
  Status status = check_factors(to);
  if (status != Status::ok) return status;
  // NOTE: a square block would hold rows of several groups.
  if (to.scaling.block_rows != 1) return Status::unsupported;
  const int64_t tiles = group_tiles(args.groups.rows, args.groups.count);
  FactorParams p;
  status = factor_params(a, to, tiles, tiles * kTile, p);
  if (status != Status::ok) return status;
  const auto stream = static_cast<cudaStream_t>(a.stream);
  return launch_factors(to, p, row_tiles_of(a.x, group_table(args.groups)),
                        tile_grid(p, p.col_tiles), tiles * p.col_tiles, stream, Start::early);
}

Status quantize_stacked_factors(const QuantizeTask& a, const QuantizeOut& to, const void* const* xs,
                                int64_t count) {
  Status status = check_factors(to);
  if (status != Status::ok) return status;
  FactorParams p;
  status = factor_params(a, to, (a.rows + 127) / 128, a.rows, p);
  if (status != Status::ok) return status;
  const bool square = to.scaling.block_rows != 1;
  // Scales of one matrix whose operand has so many steps along K. Those that nobody wants stay
  // null.
  const auto factors = [&](const FactorsOut& of, const Packed& packed, int64_t rows,
                           int64_t steps) -> int64_t {
    if (of.scales == nullptr) return 0;
    if (packed.codes != nullptr) return steps * of.k_step;
    return steps * (square ? (rows + 127) / 128 : rows);
  };
  Stack stack{};
  stack.row_codes = a.rows * p.row.ld;
  stack.col_codes = (a.col_lies_as_x ? a.rows : a.cols) * p.col.ld;
  stack.row_factors = factors(p.row_factors, a.row_packed, a.rows, p.col_tiles);
  stack.col_factors = factors(p.col_factors, a.col_packed, a.cols, p.row_tiles);
  if (wants_aligned(to)) stack.col_scales = packed_scale_words(a.cols, a.rows);
  p.x_vectors = p.x_vectors && all_aligned(xs, count);
  const auto stream = static_cast<cudaStream_t>(a.stream);
  return with_blocks(to, [&]<FactorBlocks kBlocks>() {
    return launch_stacks(stack, xs, count, [&](const Stack& some, int64_t now) {
      const int64_t tiles = now * p.row_tiles * p.col_tiles;
      return launch_factors<kBlocks>(p, some, tile_grid(p, p.col_tiles, now), tiles, stream,
                                     Start::early);
    });
  });
}

}  // namespace te_mx::sm90
