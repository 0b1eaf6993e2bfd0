#include "decode/decode_run.cuh"

namespace te_mx::sm90 {

Status run_decode_factors_e5m2(const DecodeTask& t, bool halves) {
  return run_decode_any<Element::e5m2, true>(t, halves);
}

}  // namespace te_mx::sm90
