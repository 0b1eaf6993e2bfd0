// The decode kernel of one matrix of weights: its rows, and the choice of an instance.
#pragma once

#include "decode/decode_launch.cuh"

namespace te_mx::sm90 {

// Blocks of rows as they lie.
struct DenseRows {
  int64_t m;
  int rows;  // of a block
  int64_t first = 0;

  static constexpr bool kEarly = true, kWeighted = false;
  __device__ __forceinline__ bool begin(int block) {
    first = int64_t{block} * rows;
    return true;
  }
  __device__ __forceinline__ int expert() const { return 0; }
  __device__ __forceinline__ int count() const {
    return static_cast<int>(min(m - first, int64_t{rows}));
  }
  __device__ __forceinline__ int64_t in_row(int i) const { return first + i; }
  __device__ __forceinline__ int64_t out_row(int i) const { return first + i; }
};

// A product whose arguments are right, with what of its parameters does not depend on the instance.
struct DenseTask {
  DecodeParams p;
  DecodeSplit split;
  int64_t m, n, k;
  void* workspace;
  void* stream;
};

template <class Math>
Status run_dense(DenseTask t) {
  constexpr int kRows = Math::kRows;
  const Status status = cut_decode(t.p, t.split, Math::kFmt, t.n, t.k, kRows, Math::kHalves);
  if (status != Status::ok) return status;
  const DenseRows rows{t.m, kRows};
  const int64_t blocks = (t.m + kRows - 1) / kRows;
  if constexpr (kRows > kDecodeOwnRows) {
    const Status prepared = launch_prepare<Math>(t.p, rows, blocks, t.workspace, t.stream);
    if (prepared != Status::ok) return prepared;
  }
  return launch_decode<Math>(t.p, rows, blocks, t.stream);
}

// NOTE: as many columns of the tensor cores as the rows need, with the same sums of each row.
template <Element kFmt, bool kHalves, bool kFactors>
Status run_dense_rows(const DenseTask& t) {
  if (t.m <= 8) return run_dense<DecodeMath<kFmt, 8, kHalves, kFactors>>(t);
  if (t.m <= 16) return run_dense<DecodeMath<kFmt, 16, kHalves, kFactors>>(t);
  if (t.m <= 32) return run_dense<DecodeMath<kFmt, 32, kHalves, kFactors>>(t);
  return run_dense<DecodeMath<kFmt, kDecodeMostRows, kHalves, kFactors>>(t);
}

template <Element kFmt, bool kFactors>
Status run_dense_any(const DenseTask& t, bool halves) {
  return halves ? run_dense_rows<kFmt, true, kFactors>(t)
                : run_dense_rows<kFmt, false, kFactors>(t);
}

Status run_dense_e4m3(const DenseTask& t, bool halves);
Status run_dense_e5m2(const DenseTask& t, bool halves);
Status run_dense_e2m1(const DenseTask& t, bool halves);
Status run_dense_factors_e4m3(const DenseTask& t, bool halves);
Status run_dense_factors_e5m2(const DenseTask& t, bool halves);

}  // namespace te_mx::sm90
