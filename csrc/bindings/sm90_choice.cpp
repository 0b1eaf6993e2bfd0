#include "te_mx/sm90_choice.h"

#include <iterator>

#include "record.hpp"

namespace te_mx::bindings {

void bind_sm90_choice(py::module_& m) {
  using namespace te_mx::sm90;
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
        return choose_config(kDenseTiles, static_cast<int>(std::size(kDenseTiles)), m, n, full,
                             sms);
      },
      arg("m"), arg("n"), arg("full"), arg("sms"));
  m.def("sm90_gemm_parts", &choose_parts, arg("m"), arg("n"), arg("k"), arg("sms"));
  m.def("sm90_product_us", &product_us, arg("m"), arg("n"), arg("k"), arg("sms"), arg("parts"));
  m.def("sm90_split_us", &split_us, arg("m"), arg("n"), arg("k"), arg("sms"), arg("parts"));
}

}  // namespace te_mx::bindings
