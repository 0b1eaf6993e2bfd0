// The quantizer to codes with fp32 factors of one matrix, and its instances for rows of groups.
#include "quantize/factor_launch.cuh"

namespace te_mx::sm90 {

Status launch_factors(const QuantizeOut& to, const FactorParams& p, const RowTiles& where,
                      dim3 grid, int64_t tiles, cudaStream_t stream, Start start) {
  return with_blocks(to, [&]<FactorBlocks kBlocks>() {
    return launch_factors<kBlocks>(p, where, grid, tiles, stream, start);
  });
}

Status quantize_factors(const QuantizeTask& a, const QuantizeOut& to, Start start) {
  Status status = check_factors(to);
  if (status != Status::ok || a.rows == 0 || a.cols == 0) return status;
  FactorParams p;
  status = factor_params(a, to, (a.rows + 127) / 128, a.rows, p);
  if (status != Status::ok) return status;
  const auto stream = static_cast<cudaStream_t>(a.stream);
  const int64_t tiles = static_cast<int64_t>(p.row_tiles) * p.col_tiles;
  status =
      launch_factors(to, p, row_tiles_of(a.x), tile_grid(p, p.col_tiles), tiles, stream, start);
  if (status != Status::ok || a.col_sum == nullptr) return status;
  return launch_sums(a.col_sum_ws, a.col_sum, a.col_sum_dtype, p.row_tiles, a.cols, stream);
}

}  // namespace te_mx::sm90
