// The choice of an instance of the decode kernel.
#pragma once

#include "decode/decode_launch.cuh"

namespace te_mx::sm90 {

// A product whose arguments are right, with what of its parameters does not depend on the instance.
struct DecodeTask {
  DecodeParams p;
  DecodeSplit split;
  DecodeRows rows;
  int64_t n = 0, k = 0;
  void* workspace = nullptr;
  void* stream = nullptr;
};

template <class Math>
Status run_decode(DecodeTask t) {
  constexpr int kRows = Math::kRows;
  const DecodeSplit split = Math::kWide ? t.split : decode_narrowed(t.split);
  const Status status = cut_decode(t.p, split, Math::kFmt, t.n, t.k, kRows, Math::kHalves);
  if (status != Status::ok) return status;
  t.rows.most = kRows;
  const int64_t blocks = decode_blocks(t.rows.m, t.rows.groups.count, kRows);
  if constexpr (kRows > kDecodeOwnRows) {
    const Status prepared = launch_prepare<Math>(t.p, t.rows, blocks, t.workspace, t.stream);
    if (prepared != Status::ok) return prepared;
  }
  return launch_decode<Math>(t.p, t.rows, blocks, t.stream);
}

// NOTE: as many columns of the tensor cores as the rows need, with the same sums of each row.
template <Element kFmt, bool kHalves, bool kFactors, int kWarps>
Status run_decode_rows(const DecodeTask& t, int rows) {
  if (rows == 8) {
    if constexpr (!kHalves) {
      if (t.p.in.plain(t.k))
        return run_decode<DecodeMath<kFmt, 8, false, kFactors, true, kWarps>>(t);
    }
    return run_decode<DecodeMath<kFmt, 8, kHalves, kFactors, false, 8>>(t);
  }
  if (rows == 16) return run_decode<DecodeMath<kFmt, 16, kHalves, kFactors, true, kWarps>>(t);
  if (rows == 32) return run_decode<DecodeMath<kFmt, 32, kHalves, kFactors, true, kWarps>>(t);
  return run_decode<DecodeMath<kFmt, kDecodeMostRows, kHalves, kFactors, true, kWarps>>(t);
}

template <Element kFmt, bool kFactors>
Status run_decode_any(const DecodeTask& t, bool halves) {
  const int rows = decode_rows(t.rows.m, t.rows.groups.count);
  if (halves) return run_decode_rows<kFmt, true, kFactors, 8>(t, rows);
  return t.split.warpgroups == 4 ? run_decode_rows<kFmt, false, kFactors, 16>(t, rows)
                                 : run_decode_rows<kFmt, false, kFactors, 8>(t, rows);
}

Status run_decode_e4m3(const DecodeTask& t, bool halves);
Status run_decode_e5m2(const DecodeTask& t, bool halves);
Status run_decode_e2m1(const DecodeTask& t, bool halves);
Status run_decode_factors_e4m3(const DecodeTask& t, bool halves);
Status run_decode_factors_e5m2(const DecodeTask& t, bool halves);

}  // namespace te_mx::sm90
