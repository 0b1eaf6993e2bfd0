#include "decode/decode_dense.cuh"

namespace te_mx::sm90 {

Status run_dense_factors_e5m2(const DenseTask& t, bool halves) {
  return run_dense_any<Element::e5m2, true>(t, halves);
}

}  // namespace te_mx::sm90
