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
};

Status check(const DecodeArgs& a) {
  if (a.m < 1 || a.n < 1 || a.k < 1 || a.w == nullptr || a.x == nullptr || a.out == nullptr)
    return Status::bad_argument;
  if (!known(a.x_dtype) || !known(a.out_dtype) || !known(a.bias_dtype)) return Status::bad_argument;
  const int64_t most = (int64_t{1} << 31) - 257;
  if (a.m > most || a.n > most || a.k > most) return Status::unsupported;
  const Status status = check_mx(a.w_element, {}, a.rule);
  if (status != Status::ok) return status;
  if (a.x_as_is && (a.x_dtype == DType::f32 || a.x_scales != nullptr)) return Status::unsupported;
  return is_fp8(a.x_element) ? Status::ok : Status::unsupported;
}

bool vectors(const DecodeArgs& a) {
  const int64_t bytes = a.x_scales != nullptr ? 1 : a.x_dtype == DType::f32 ? 4 : 2;
  const int64_t step = a.x_scales != nullptr ? 8 : 16;
  return reinterpret_cast<uintptr_t>(a.x) % step == 0 && a.ldx * bytes % step == 0;
}

template <Element kFmt, int kTiles, bool kSteps>
Status run(DecodeParams& p, const DecodeArgs& a) {
  const int rows = 8 * kTiles, blocks = static_cast<int>((a.m + rows - 1) / rows);
  const DenseRows policy{a.m, rows};
  if constexpr (kSteps) {
    const Status status =
        launch_prepare(p, policy, rows, blocks, a.execution.workspace, a.execution.stream);
    if (status != Status::ok) return status;
  }
  return launch_decode<kFmt, kTiles, kSteps>(p, policy, blocks, a.execution.stream);
}

}  // namespace

int64_t decode_workspace(int64_t m, int64_t k) {
  if (m <= 8) return 0;
  return decode_quads(k) * decode_input_bytes(32) * ((m + 31) / 32);
}

Status decode(const DecodeArgs& a) {
  const Status status = check(a);
  if (status != Status::ok) return status;
  if (a.execution.workspace_bytes < decode_workspace(a.m, a.k)) return Status::small_workspace;
  const int sms = current_device().sms;
  if (sms == 0) return Status::unsupported;
  DecodeParams p;
  p.w = a.w;
  p.in = {a.x, a.ldx, a.x_scales, a.x_dtype, a.x_element == Element::e5m2, vectors(a)};
  p.in.as_is = a.x_as_is;
  set_rule(p.in, a.rule);
  p.out = {a.out, a.ldo, a.out_dtype, a.bias, a.bias_dtype};
  const auto fits = [&](int tiles, bool resident) {
    return cut_decode(p, a.w_element, a.n, a.k, 8 * tiles, resident, sms) == Status::ok;
  };
  // Every CTA quantizes its slice of up to 16 rows; more rows are quantized by a kernel before.
  return with_element(a.w_element, [&]<Element kFmt>() -> Status {
    if (a.m <= 8) return fits(1, true) ? run<kFmt, 1, false>(p, a) : Status::unsupported;
    if (a.m <= 16 && fits(2, true)) return run<kFmt, 2, false>(p, a);
    if (a.m > 16 && fits(4, false)) return run<kFmt, 4, true>(p, a);
    return fits(2, false) ? run<kFmt, 2, true>(p, a) : Status::unsupported;
  });
}

}  // namespace te_mx::sm90
