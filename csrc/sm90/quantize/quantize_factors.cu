// The quantizer to codes with fp32 factors of one matrix.
#include "quantize/factor_launch.cuh"

namespace te_mx::sm90 {

Status quantize_factors(const QuantizeTask& a, const QuantizeOut& to) {
  if (a.rows == 0 || a.cols == 0) return Status::ok;
  FactorParams p;
  Status status = factor_params(a, to, (a.rows + 127) / 128, a.rows, p);
  if (status != Status::ok) return status;
  const auto stream = static_cast<cudaStream_t>(a.stream);
  const int64_t tiles = static_cast<int64_t>(p.row_tiles) * p.col_tiles;
  const dim3 grid = tile_grid(p, p.col_tiles);
  status = to.scaling.block_rows == 1 ? launch_factors<false>(p, OneMatrix{}, grid, tiles, stream)
                                      : launch_factors<true>(p, OneMatrix{}, grid, tiles, stream);
  if (status != Status::ok || a.col_sum == nullptr) return status;
  return launch_sums(a.col_sum_ws, a.col_sum, a.col_sum_dtype, p.row_tiles, a.cols, stream);
}

}  // namespace te_mx::sm90
