#include "te_mx/sm90_choice.h"

#include <iterator>
#include <string>

#include "record.hpp"

namespace te_mx::bindings {

namespace {

using namespace te_mx::sm90;

// The cost models count blocks in 64 bits and divide by the number of multiprocessors.
void check(int64_t m, int64_t n, int64_t k, int sms, int parts = 1) {
  constexpr int64_t kMost = int64_t{1} << 40;
  const auto size = [](int64_t of) { return of >= 0 && of <= kMost; };
  if (size(m) && size(n) && size(k) && sms >= 1 && parts >= 1 && parts <= kMostParts) return;
  throw py::value_error("sm90: sizes must be 0 to 2^40, multiprocessors 1 or more and parts 1 to " +
                        std::to_string(kMostParts) + ", got m=" + std::to_string(m) +
                        ", n=" + std::to_string(n) + ", k=" + std::to_string(k) +
                        ", sms=" + std::to_string(sms) + ", parts=" + std::to_string(parts));
}

constexpr const char* kKinds[kSplitKinds] = {"tiles", "codes",   "codes_before", "decode",
                                             "wide",  "factors", "nvfp4",        "routed"};

}  // namespace

void bind_sm90_choice(py::module_& m) {
  using py::arg;
  m.attr("SM90_MOST_PARTS") = kMostParts;
  m.attr("SM90_STEP_K") = kStepK;
  // The blocks of D that the GEMM of Hopper computes: a dict for each, by configuration.
  m.def("sm90_gemm_tiles", [] {
    py::list tiles;
    for (const int index : kDenseTiles) {
      const GemmTile& t = kGemmTiles[index];
      tiles.append(py::dict(arg("name") = t.name, arg("m") = t.m, arg("n") = t.n,
                            arg("cluster") = t.cluster, arg("full") = t.full,
                            arg("cycles") = t.cycles, arg("us") = t.us));
    }
    return tiles;
  });
  m.def(
      "sm90_gemm_config",
      [](int64_t m, int64_t n, bool full, int sms) {
        check(m, n, 0, sms);
        return choose_config(kDenseTiles, static_cast<int>(std::size(kDenseTiles)), m, n, full,
                             sms);
      },
      arg("m"), arg("n"), arg("full"), arg("sms"));
  // Parts of K by the kind of product, of which `decode`, `wide` and `routed` do not read m.
  m.def(
      "sm90_num_splits",
      [](const std::string& kind, int64_t m, int64_t n, int64_t k, int sms, int64_t groups,
         int64_t block) {
        check(m, n, k, sms);
        check(groups, block, 0, 1);
        for (int i = 0; i < kSplitKinds; ++i)
          if (kind == kKinds[i])
            return num_splits({static_cast<SplitKind>(i), n, k, sms, groups, m, block});
        throw py::value_error("sm90: no kind of product is called " + kind);
      },
      arg("kind"), arg("m"), arg("n"), arg("k"), arg("sms"), arg("groups") = 0, arg("block") = 64);
  // Microseconds of `tiles` as they run with K in parts, and of `codes`.
  m.def(
      "sm90_split_us",
      [](const std::string& kind, int64_t m, int64_t n, int64_t k, int sms, int parts) {
        check(m, n, k, sms, parts);
        if (kind == "codes") return codes_us(m, n, k, sms, parts);
        if (kind == "tiles") return product_us(m, n, k, sms, parts);
        throw py::value_error("sm90: there is no model of " + kind);
      },
      arg("kind"), arg("m"), arg("n"), arg("k"), arg("sms"), arg("parts"));
}

}  // namespace te_mx::bindings
