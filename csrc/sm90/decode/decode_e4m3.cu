#include "decode/decode_dense.cuh"

namespace te_mx::sm90 {

Status run_dense_e4m3(const DenseTask& t, bool halves) {
  return run_dense_any<Element::e4m3, false>(t, halves);
}

}  // namespace te_mx::sm90
