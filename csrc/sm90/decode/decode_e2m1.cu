#include "decode/decode_run.cuh"

namespace te_mx::sm90 {

Status run_decode_e2m1(const DecodeTask& t, bool halves) {
  return run_decode_any<Element::e2m1, false>(t, halves);
}

}  // namespace te_mx::sm90
