// Host side of the GEMM: the kinds of problems, how a kernel is counted, the launcher of each
// compiled configuration.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

#include "common/device.h"
#include "te_mx/sm90.h"

namespace te_mx::sm90 {

// Whether the epilogue is more than bias and accumulation.
inline bool needs_full(const Epilogue& e) {
  return e.aux != nullptr || e.gelu_in != nullptr || e.gelu != Gelu::none || e.bias_grad != nullptr;
}

// How many clusters of one kernel run at the same time, per device. Asked once: a persistent grid
// larger than that would leave whole clusters to run after the others.
class ClusterCount {
 public:
  // Into `count`; unsupported when the device cannot run the kernel.
  Status of(int device, const void* kernel, int threads, int smem, int cluster, int& count);

 private:
  std::atomic<int> counts_[64] = {};
};

// Blocks along M that are walked together: one wave of `clusters` blocks of bm x bn covers a nearly
// square region.
inline int group_size(int clusters, int bm, int bn) {
  int best = 1;
  int64_t least = INT64_MAX;
  for (int g = 1; g <= clusters; ++g) {
    const int64_t rows = static_cast<int64_t>(g) * bm;
    if (rows + bn >= least) break;  // and so do all taller ones: a call of a small problem counts
    const int64_t cols = static_cast<int64_t>((clusters + g - 1) / g) * bn;
    if (rows + cols < least) least = rows + cols, best = g;
  }
  return best;
}

// ok, or what is wrong with operands that should have these layouts: both MX, or both with fp32
// factors, lhs in blocks of 1 x 128; rhs not in E5M2; and with an epilogue.
Status check_sides(const GemmArgs& a, Layout lhs, Layout rhs);
Status check_epilogue(const Epilogue& e, int64_t n);

// One launcher for each configuration of each kind of GEMM, in the order of kDenseTiles,
// kGroupedTiles and kSplitTiles.
Status launch_192x128_cluster2(const GemmArgs& args, const Device& device);
Status launch_256x128_cluster2(const GemmArgs& args, const Device& device);
Status launch_128x128(const GemmArgs& args, const Device& device);
Status launch_64x128(const GemmArgs& args, const Device& device);

// The same of operands with fp32 factors, in the order of kTileFactorTiles and kRowFactorTiles.
Status launch_tile_factors_192x128_cluster2(const GemmArgs& args, const Device& device);
Status launch_tile_factors_256x128_cluster2(const GemmArgs& args, const Device& device);
Status launch_row_factors_192x128_cluster2(const GemmArgs& args, const Device& device);
Status launch_row_factors_256x128_cluster2(const GemmArgs& args, const Device& device);

Status launch_grouped_192x128_cluster2(const GroupedGemmArgs& args, const Device& device);
Status launch_grouped_256x128(const GroupedGemmArgs& args, const Device& device);
Status launch_grouped_tile_factors_192x128_cluster2(const GroupedGemmArgs& args,
                                                    const Device& device);
Status launch_grouped_row_factors_192x128_cluster2(const GroupedGemmArgs& args,
                                                   const Device& device);

Status launch_split_128x128(const GemmArgs& args, const Device& device);
Status launch_split_64x128(const GemmArgs& args, const Device& device);

// K in parts that are added up inside of clusters. The workspace has the partial sums of the bias
// gradient alone.
Status gemm_cluster(const GemmArgs& args, const Device& device);

// Operands of which rhs lies in plain codes of 4 bits, lhs in tiles. lhs_comes: of the kernel
// before, which is unpack() and nothing else.
Status launch_codes_e4m3(const GemmArgs& args, bool lhs_comes, const Device& device);
Status launch_codes_e5m2(const GemmArgs& args, bool lhs_comes, const Device& device);

// K in parts. The workspace holds their sums, fp32 [parts, rows, pitch], and behind them partial
// sums of the bias gradient, [ceil(M / kFinishRows), N].
inline constexpr int kFinishRows = 8;
// Units of kFinishRows rows that a cluster of so many CTAs ends between them (gemm_exchange.cuh):
// whether each has room for what it is sent. Of seven, two would end three units.
inline constexpr int kUnits = 128 / kFinishRows;
constexpr bool exchange_fits(int parts) {
  return (kUnits + parts - 1) / parts * (parts - 1) <= kUnits;
}
struct SplitSums {
  int64_t rows, pitch;  // whole waves; whole 16 bytes
  int64_t bytes;
};
inline SplitSums split_sums(const GemmArgs& a) {
  const int64_t m = a.lhs.rows, n = a.rhs.rows;
  const int64_t rows = (m + 63) / 64 * 64, pitch = (n + 3) / 4 * 4;
  const int64_t sums = a.execution.parts * rows * pitch;
  const int64_t columns =
      a.epilogue.bias_grad == nullptr ? 0 : (m + kFinishRows - 1) / kFinishRows * n;
  return {rows, pitch, 4 * (sums + columns)};
}
Status finish_split(const GemmArgs& a);

// bias_grad[n] = sum over blocks of rows of partial[block, n], in order.
Status reduce_columns(const float* partial, float* out, int64_t blocks, int64_t n,
                      cudaStream_t stream);

}  // namespace te_mx::sm90
