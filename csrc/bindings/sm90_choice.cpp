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
  m.def(
      "sm90_gemm_parts",
      [](int64_t m, int64_t n, int64_t k, int sms) {
        check(m, n, k, sms);
        return choose_parts(m, n, k, sms);
      },
      arg("m"), arg("n"), arg("k"), arg("sms"));
  m.def(
      "sm90_product_us",
      [](int64_t m, int64_t n, int64_t k, int sms, int parts) {
        check(m, n, k, sms, parts);
        return product_us(m, n, k, sms, parts);
      },
      arg("m"), arg("n"), arg("k"), arg("sms"), arg("parts"));
  m.def(
      "sm90_split_us",
      [](int64_t m, int64_t n, int64_t k, int sms, int parts) {
        check(m, n, k, sms, parts);
        return split_us(m, n, k, sms, parts);
      },
      arg("m"), arg("n"), arg("k"), arg("sms"), arg("parts"));
}

}  // namespace te_mx::bindings
