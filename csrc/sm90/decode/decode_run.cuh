// The choice of an instance of the decode kernel.
#pragma once

#include "decode/decode_launch.cuh"

namespace te_mx::sm90 {

// A product whose arguments are right, with what of its parameters does not depend on the instance.
struct DecodeTask {
  DecodeParams p;
  DecodeCodes w;
  DecodeSplit split;
  DecodeRows rows;
  int64_t n = 0, k = 0;
  void* workspace = nullptr;
  void* stream = nullptr;
};

template <class Math>
Status run_decode(DecodeTask t) {
  constexpr int kRows = Math::kRows;
  const DecodeSplit split = Math::kWarps == 16 ? t.split : decode_narrowed(t.split);
  const Status status = cut_decode(t.p, split, t.n, t.k, kRows, Math::kHalves, Math::kPrepared);
  if (status != Status::ok) return status;
  t.rows.most = kRows;
  const int64_t blocks = decode_blocks(t.rows.m, t.rows.groups.count, kRows);
  if constexpr (Math::kPrepared) {
    const Status prepared = launch_prepare(t.p, t.rows, blocks, kRows, Math::kHalves,
                                           Math::kFactors, t.workspace, t.stream);
    if (prepared != Status::ok) return prepared;
  }
  return launch_decode<Math>(t.p, t.w, t.rows, blocks, t.stream);
}

// NOTE: as many columns of the tensor cores as the rows need, with the same sums of each row.
template <bool kHalves, bool kFactors>
Status run_decode_narrow(const DecodeTask& t, int rows) {
  constexpr auto kMade = DecodeX::prepared;
  if (rows == 8) {
    if constexpr (!kHalves) {
      if (t.p.in.plain(t.k))
        return run_decode<DecodeMath<8, false, kFactors, DecodeX::plain, 8>>(t);
    }
    return run_decode<DecodeMath<8, kHalves, kFactors, DecodeX::any, 8>>(t);
  }
  if (rows == 16) return run_decode<DecodeMath<16, kHalves, kFactors, kMade, 8>>(t);
  if (rows == 32) return run_decode<DecodeMath<32, kHalves, kFactors, kMade, 8>>(t);
  return run_decode<DecodeMath<kDecodeMostRows, kHalves, kFactors, kMade, 8>>(t);
}

// NOTE: beside prepared rows, CTAs of four warpgroups have an SM alone, so that the next product
// starts late. More than 16 rows pay for it only where two warpgroups would need clusters of four.
template <bool kFactors>
Status run_decode_wide(const DecodeTask& t, int rows) {
  constexpr auto kPlain = DecodeX::plain, kMade = DecodeX::prepared;
  const bool plain = t.p.in.plain(t.k);
  if ((rows == 8 && !plain) || (rows > 16 && t.split.tiles > 1))
    return run_decode_narrow<false, kFactors>(t, rows);
  const bool made = !plain || decode_is_long(t.rows.m, t.k);
  if (rows == 8 && !made) return run_decode<DecodeMath<8, false, kFactors, kPlain, 16>>(t);
  if (rows <= 16) {
    return made ? run_decode<DecodeMath<16, false, kFactors, kMade, 16>>(t)
                : run_decode<DecodeMath<16, false, kFactors, kPlain, 16>>(t);
  }
  if (rows == 32) return run_decode<DecodeMath<32, false, kFactors, kMade, 16>>(t);
  return run_decode<DecodeMath<kDecodeMostRows, false, kFactors, kMade, 16>>(t);
}

template <bool kFactors>
Status run_decode_any(const DecodeTask& t, bool halves) {
  const int rows = decode_rows(t.rows.m, t.rows.groups.count);
  if (halves) return run_decode_narrow<true, kFactors>(t, rows);
  // NOTE: of MXFP8 it is groups, and what no layer has, that come here.
  if constexpr (kFactors) {
    if (t.split.warpgroups == 4 && t.rows.groups.count == 0)
      return run_decode_wide<kFactors>(t, rows);
  }
  return run_decode_narrow<false, kFactors>(t, rows);
}

// tiles_kernel, of one matrix of MXFP8 in tiles; spread: the octaves that blocks of a row of x may
// be apart. unsupported: a part of k is too long.
Status run_tiles(const DecodeTask& t, int spread, int sms);
// dealt_kernel, of one matrix in tiles; unsupported: others are faster, or rows are not plain.
Status run_dealt(const DecodeTask& t, bool factors, int sms);
// whole_kernel, of one matrix in tiles; unsupported: others are faster.
Status run_whole(const DecodeTask& t, bool factors, int sms);
// ring_kernel, of weights in tiles, or one of those.
Status run_rows(const DecodeTask& t, bool factors, int sms);

Status run_decode_e4m3(const DecodeTask& t, bool halves);
Status run_decode_factors_e4m3(const DecodeTask& t, bool halves);
// factor_tiles, of one matrix in tiles; unsupported: scales start elsewhere than at whole 16 bytes.
Status run_factor_tiles(DecodeTask t, bool factor_rows, int sms);

}  // namespace te_mx::sm90
