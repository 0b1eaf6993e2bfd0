// Entry points of the grouped GEMM: argument checks, configuration, launch.
#include "common/groups.cuh"
#include "gemm/gemm_launch.h"

namespace te_mx::sm90 {

namespace {

struct Choice {
  const char* name;
  int m, n, cluster;  // m, n: of what a cluster computes at once
  Status (*launch)(const GroupedGemmArgs&, const Device&);
};

constexpr Choice kChoices[] = {
    {"192x128, clusters of 2", 192, 256, 2, launch_grouped_192x128_cluster2},
    {"256x128", 256, 128, 1, launch_grouped_256x128},
};
constexpr int kChoiceCount = sizeof(kChoices) / sizeof(kChoices[0]);

// As for one product (gemm.cu), with half a block wasted at the end of a group: how rows are shared
// out is not known here. Along K, blocks without clusters take 5 % longer than that, measured.
int choose(const GroupedGemmArgs& args, int sms) {
  const int64_t m = args.gemm.lhs.rows, n = args.gemm.rhs.rows;
  const Groups& g = args.groups;
  int best = 0;
  double least = 1e300;
  for (int i = 0; i < kChoiceCount; ++i) {
    const Choice& c = kChoices[i];
    const double m_blocks = args.along_k ? static_cast<double>(g.count * ((m + c.m - 1) / c.m))
                                         : static_cast<double>(g.rows) / c.m + 0.5 * g.count;
    const double blocks = m_blocks * static_cast<double>((n + c.n - 1) / c.n);
    const int64_t waves = static_cast<int64_t>(blocks * c.cluster / sms) + 1;
    const double cost = static_cast<double>(waves * c.m * c.n / c.cluster) *
                        (args.along_k && c.cluster == 1 ? 1.05 : 1.0);
    if (cost < least) least = cost, best = i;
  }
  return best;
}

}  // namespace

int grouped_config_count() { return kChoiceCount; }
const char* grouped_config_name(int config) {
  return config >= 0 && config < kChoiceCount ? kChoices[config].name : "";
}

Status gemm_grouped(const GroupedGemmArgs& args) {
  const GemmArgs& a = args.gemm;
  const Groups& g = args.groups;
  const int64_t m = a.lhs.rows, n = a.rhs.rows, k = a.lhs.k;
  const Layout lhs = args.along_k ? Layout::group_k : Layout::group_rows;
  const Layout rhs = args.along_k ? Layout::group_k : Layout::tiles;
  Status status = check_sides(a, lhs, rhs);
  if (status == Status::ok) status = check_epilogue(a.epilogue, n);
  if (status != Status::ok) return status;
  if (!valid(g) || m <= 0 || n <= 0 || a.execution.kernel >= kChoiceCount ||
      needs_full(a.epilogue) ||
      (args.along_k ? a.epilogue.bias != nullptr : k <= 0 || m != g.rows || k != a.rhs.k)) {
    return Status::bad_argument;
  }
  constexpr int64_t kMost = INT32_MAX - 256;
  if (m > kMost || n > kMost || k > kMost || g.count * (args.along_k ? m : n) > kMost ||
      (args.first_rows != nullptr && g.count > kMostPlaces)) {
    return Status::unsupported;
  }
  const Device device = current_device();
  if (device.sms == 0) return Status::unsupported;
  const int config = a.execution.kernel >= 0 ? a.execution.kernel : choose(args, device.sms);
  return kChoices[config].launch(args, device);
}

}  // namespace te_mx::sm90
