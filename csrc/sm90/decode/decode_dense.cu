// The decode kernel of one matrix of weights.
#include "common/formats.h"
#include "decode/decode_launch.cuh"

namespace te_mx::sm90 {
namespace {

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
  __device__ __forceinline__ float weight(int) const { return 1.0f; }
};

Status check(const DecodeArgs& a) {
  if (a.m < 1 || a.n < 1 || a.k < 1 || a.w == nullptr || a.x == nullptr || a.out == nullptr)
    return Status::bad_argument;
  if (!known(a.x_dtype) || !known(a.out_dtype) || !known(a.bias_dtype))
    return Status::bad_argument;
  const int64_t most = (int64_t{1} << 31) - 257;
  if (a.m > most || a.n > most || a.k > most) return Status::unsupported;
  const Status status = check_mx(a.w_element, {}, a.rule);
  if (status != Status::ok) return status;
  return is_fp8(a.x_element) ? Status::ok : Status::unsupported;
}

bool vectors(const DecodeArgs& a) {
  const int64_t bytes = a.x_scales != nullptr ? 1 : a.x_dtype == DType::f32 ? 4 : 2;
  const int64_t step = a.x_scales != nullptr ? 8 : 16;
  return reinterpret_cast<uintptr_t>(a.x) % step == 0 && a.ldx * bytes % step == 0;
}

template <Element kFmt, int kTiles>
Status run(const DecodeParams& p, const DecodeArgs& a) {
  const int rows = 8 * kTiles;
  return launch_decode<kFmt, kTiles>(p, DenseRows{a.m, rows},
                                     static_cast<int>((a.m + rows - 1) / rows), a.execution.stream);
}

}  // namespace

Status decode(const DecodeArgs& a) {
  const Status status = check(a);
  if (status != Status::ok) return status;
  DecodeParams p;
  p.w = a.w;
  p.in = {a.x, a.ldx, a.x_scales, a.x_dtype, a.rule, a.x_element == Element::e5m2, vectors(a)};
  p.out = {a.out, a.ldo, a.out_dtype, a.bias, a.bias_dtype};
  const int sms = current_device().sms;
  if (sms == 0) return Status::unsupported;
  // The smallest blocks that hold all rows, at most 64; or smaller ones, several, where their
  // inputs leave too little room for weights on their way.
  int tiles = a.m <= 8 ? 1 : a.m <= 16 ? 2 : a.m <= 32 ? 4 : 8;
  for (;; tiles /= 2) {
    if (tiles == 0) return Status::unsupported;
    const Status cut = cut_decode(p, a.w_element, a.n, a.k, 8 * tiles, sms);
    if (cut == Status::ok && (tiles == 1 || enough(p, a.w_element))) break;
  }
  return with_element(a.w_element, [&]<Element kFmt>() -> Status {
    return tiles == 1   ? run<kFmt, 1>(p, a)
           : tiles == 2 ? run<kFmt, 2>(p, a)
           : tiles == 4 ? run<kFmt, 4>(p, a)
                        : run<kFmt, 8>(p, a);
  });
}

}  // namespace te_mx::sm90
