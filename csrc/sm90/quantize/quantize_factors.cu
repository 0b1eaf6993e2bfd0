// The quantizer to codes with fp32 factors of one matrix.
#include "quantize/factor_launch.cuh"

namespace te_mx::sm90 {

Status quantize_factors(const QuantizeTask& a, const QuantizeOut& to, Start start) {
  Status status = check_factors(to);
  if (status != Status::ok || a.rows == 0 || a.cols == 0) return status;
  FactorParams p;
  status = factor_params(a, to, (a.rows + 127) / 128, a.rows, p);
  if (status != Status::ok) return status;
  const auto stream = static_cast<cudaStream_t>(a.stream);
  const int64_t tiles = static_cast<int64_t>(p.row_tiles) * p.col_tiles;
  const dim3 grid = tile_grid(p, p.col_tiles);
  const auto launch = [&]<FactorBlocks kBlocks>() {
    return launch_factors<kBlocks>(p, OneMatrix{}, grid, tiles, stream, start);
  };
  status = to.scaling.block_rows != 1 ? launch.template operator()<FactorBlocks::squares>()
           : wants_aligned(to)        ? launch.template operator()<FactorBlocks::rows_aligned>()
                                      : launch.template operator()<FactorBlocks::rows>();
  if (status != Status::ok || a.col_sum == nullptr) return status;
  return launch_sums(a.col_sum_ws, a.col_sum, a.col_sum_dtype, p.row_tiles, a.cols, stream);
}

}  // namespace te_mx::sm90
