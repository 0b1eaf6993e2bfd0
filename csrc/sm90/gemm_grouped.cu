// Entry points of the grouped GEMM: argument checks, configuration, launch.
#include "gemm_launch.h"
#include "groups.cuh"

namespace te_mx::sm90 {

namespace {

struct Choice {
  const char* name;
  int m, n, cluster;  // m, n: of what a cluster computes at once
  Status (*launch)(const GemmArgs&, const GroupedCall&, const Device&);
};

constexpr Choice kChoices[] = {
    {"192x128, clusters of 2", 192, 256, 2, launch_grouped_192x128_cluster2},
    {"256x128", 256, 128, 1, launch_grouped_256x128},
};
constexpr int kChoiceCount = sizeof(kChoices) / sizeof(kChoices[0]);

// As for one product (gemm.cu), with half a block wasted at the end of a group: how rows are shared
// out is not known here. Along K, blocks without clusters take 5 % longer than that, measured.
int choose(const GemmArgs& a, const Groups& g, bool along_k, int sms) {
  int best = 0;
  double least = 1e300;
  for (int i = 0; i < kChoiceCount; ++i) {
    const Choice& c = kChoices[i];
    const double m_blocks = along_k ? static_cast<double>(g.count * ((a.m + c.m - 1) / c.m))
                                    : static_cast<double>(g.rows) / c.m + 0.5 * g.count;
    const double blocks = m_blocks * static_cast<double>((a.n + c.n - 1) / c.n);
    const int64_t waves = static_cast<int64_t>(blocks * c.cluster / sms) + 1;
    const double cost = static_cast<double>(waves * c.m * c.n / c.cluster) *
                        (along_k && c.cluster == 1 ? 1.05 : 1.0);
    if (cost < least) least = cost, best = i;
  }
  return best;
}

Status run(const GemmArgs& a, const GroupedCall& call) {
  const Groups& g = call.groups;
  const bool along_k = call.along_k;
  if (!valid(g) || a.m <= 0 || a.n <= 0 || a.ldo < a.n || a.config >= kChoiceCount ||
      needs_full(a) || (along_k ? a.bias != nullptr : a.k <= 0 || a.m != g.rows)) {
    return Status::bad_argument;
  }
  constexpr int64_t kMost = INT32_MAX - 256;
  if (a.m > kMost || a.n > kMost || a.k > kMost || g.count * (along_k ? a.m : a.n) > kMost ||
      (call.first_rows != nullptr && g.count > kMostPlaces)) {
    return Status::unsupported;
  }
  const Device device = current_device();
  if (device.sms == 0) return Status::unsupported;
  const int config = a.config >= 0 ? a.config : choose(a, g, along_k, device.sms);
  return kChoices[config].launch(a, call, device);
}

}  // namespace

int grouped_config_count() { return kChoiceCount; }
const char* grouped_config_name(int config) {
  return config >= 0 && config < kChoiceCount ? kChoices[config].name : "";
}

Status gemm_rows(const GemmArgs& a, const Groups& groups) {
  return run(a, {groups, false, nullptr});
}
Status gemm_k(const GemmArgs& a, const Groups& groups, const int32_t* first_rows) {
  return run(a, {groups, true, first_rows});
}

}  // namespace te_mx::sm90
