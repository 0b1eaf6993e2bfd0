// Entry points of the grouped GEMM: argument checks, configuration, launch.
#include <iterator>

#include "common/groups.cuh"
#include "gemm/gemm_launch.h"
#include "te_mx/sm90_choice.h"

namespace te_mx::sm90 {

// MXFP4 weights that stand still (gemm_standing.cuh).
Status launch_grouped_standing(const GroupedGemmArgs& args, const Device& device);

namespace {

using Launch = Status (*)(const GroupedGemmArgs&, const Device&);
constexpr Launch kLaunches[] = {launch_grouped_192x128_cluster2, launch_grouped_256x128};
// With fp32 factors there is one configuration for each kind of rhs.
constexpr Launch kTileFactors = launch_grouped_tile_factors_192x128_cluster2;
constexpr Launch kRowFactors = launch_grouped_row_factors_192x128_cluster2;
constexpr int kConfigs = std::size(kLaunches);
static_assert(kConfigs == std::size(kGroupedTiles));

}  // namespace

int grouped_config_count() { return kConfigs; }
const char* grouped_config_name(int config) {
  return config >= 0 && config < kConfigs ? kGemmTiles[kGroupedTiles[config]].name : "";
}

Status gemm_grouped(const GroupedGemmArgs& args) {
  const GemmArgs& a = args.gemm;
  const Groups& g = args.groups;
  const int64_t m = a.lhs.rows, n = a.rhs.rows, k = a.lhs.k;
  int config = a.execution.kernel;
  const Layout lhs = args.along_k ? Layout::group_k : Layout::group_rows;
  const bool stands = !args.along_k && a.rhs.layout == Layout::standing;
  const Layout rhs = args.along_k ? Layout::group_k : stands ? Layout::standing : Layout::tiles;
  Status status = check_sides(a, lhs, rhs);
  if (status == Status::ok) status = check_epilogue(a.epilogue, n);
  if (status != Status::ok) return status;
  const bool factors = is_blockwise(a.lhs.scaling),
             squares = factors && a.rhs.scaling.block_rows != 1;
  if (!valid(g) || m <= 0 || n <= 0 || config >= (factors ? 1 : kConfigs) ||
      needs_full(a.epilogue) || (args.along_k && squares) ||
      (args.along_k ? a.epilogue.bias != nullptr : k <= 0 || m != g.rows || k != a.rhs.k)) {
    return Status::bad_argument;
  }
  constexpr int64_t kMost = INT32_MAX - 256;
  if (m > kMost || n > kMost || k > kMost || g.count * (args.along_k ? m : n) > kMost ||
      (args.first_rows != nullptr && g.count > kMostPlaces) || a.execution.parts > 1) {
    return Status::unsupported;
  }
  if (stands && a.rhs.element != Element::e2m1) return Status::unsupported;
  const Device device = current_device();
  if (device.sms == 0) return Status::unsupported;
  if (stands) return launch_grouped_standing(args, device);
  if (factors) return (squares ? kTileFactors : kRowFactors)(args, device);
  if (config < 0) config = choose_grouped_config(m, n, g.count, args.along_k, device.sms);
  return kLaunches[config](args, device);
}

}  // namespace te_mx::sm90
