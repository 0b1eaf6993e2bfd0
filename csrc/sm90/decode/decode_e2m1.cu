#include "decode/decode_run.cuh"

namespace te_mx::sm90 {

Status run_decode_e2m1(const DecodeTask& t) {
  return run_decode_narrow<Element::e2m1, true, false>(t,
                                                       decode_rows(t.rows.m, t.rows.groups.count));
}

}  // namespace te_mx::sm90
