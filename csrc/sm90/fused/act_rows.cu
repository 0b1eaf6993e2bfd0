// Gated activations of rows, quantized to plain codes along them: nothing of a row waits for other
// rows, so that half a warp has 128 of a row, and few rows are done soon. The bytes are those of
// act_kernel (fused_act.cuh).
#include "common/launch.h"
#include "decode/decode_values.cuh"
#include "fused/act_rows.h"

namespace te_mx::sm90 {
namespace {

constexpr int kThreads = 256, kRows = kThreads / 16, kQuad = 128;

struct Params {
  DecodeInput in;
  int64_t rows;
  int cols;
  uint8_t* codes;   // [rows, cols]
  uint8_t* scales;  // [rows, ceil(cols / 32)]
};

template <class T, Element kFmt>
__device__ __forceinline__ void act_rows(const Params& p) {
  const int lane = threadIdx.x % 16;
  const int64_t row = int64_t{blockIdx.y} * kRows + threadIdx.x / 16;
  const int col = static_cast<int>(blockIdx.x) * kQuad + lane * 8;
  EightGated<EightValues<T, kFmt, true, false, false>, T> x;
  x.load(p.in, row < p.rows ? row : 0, col, p.cols - col);
  const EightMade made = x.made(p.in);
  if (row >= p.rows || col >= p.cols) return;
  *reinterpret_cast<uint2*>(p.codes + row * p.cols + col) = {made.words.x, made.words.y};
  if (lane % 4 == 0)
    p.scales[row * ((p.cols + 31) / 32) + col / 32] =
        static_cast<uint8_t>(__float_as_uint(made.scale) >> 23);
}

template <class T>
__device__ __forceinline__ void act_rows(const Params& p) {
  if (p.in.e5m2) return act_rows<T, Element::e5m2>(p);
  act_rows<T, Element::e4m3>(p);
}

// Grid: x = 128 columns, y = kRows rows.
__global__ void __launch_bounds__(kThreads, 4) act_rows_kernel(const __grid_constant__ Params p) {
  tile::let_dependents_start();
  tile::await_predecessors();
  if (p.in.dtype == DType::bf16) return act_rows<__nv_bfloat16>(p);
  act_rows<__half>(p);
}

}  // namespace

Status act_rows(const ActArgs& a, const QuantizeTask& q) {
  const int64_t blocks = (q.rows + kRows - 1) / kRows, bytes = 2;
  const auto whole = [&](const void* at, int64_t ld) {
    return reinterpret_cast<uintptr_t>(at) % 16 == 0 && ld * bytes % 16 == 0;
  };
  Params p;
  const auto* const gate = static_cast<const uint16_t*>(a.h.data) + q.cols;
  p.in.x = a.h.data, p.in.ld = a.h.row_stride, p.in.dtype = q.x_dtype,
  p.in.e5m2 = q.element == Element::e5m2;
  if (!a.gated || a.in_pairs || !rounds_plainly(a.to) || a.grad.data != nullptr ||
      a.out != nullptr || a.h.col_stride != 1 || q.x_dtype == DType::f32 || is_f32_rule(q.rule) ||
      !is_fp8(q.element) || q.row_codes == nullptr || q.col_codes != nullptr ||
      q.col_packed.codes != nullptr || q.col_sum != nullptr || q.cols % 8 != 0 ||
      q.cols > INT32_MAX - kQuad || blocks > 65535 || !whole(a.h.data, a.h.row_stride) ||
      !whole(gate, a.h.row_stride) || reinterpret_cast<uintptr_t>(q.row_codes) % 8 != 0 ||
      !set_gate(p.in, gate, a.h.row_stride, a.act))
    return Status::unsupported;
  set_rule(p.in, q.rule, 0.0f);
  p.rows = q.rows, p.cols = static_cast<int>(q.cols);
  p.codes = q.row_codes, p.scales = q.row_scales;
  const dim3 grid(static_cast<unsigned>((q.cols + kQuad - 1) / kQuad),
                  static_cast<unsigned>(blocks));
  const Launch at{grid, dim3(kThreads), q.stream};
  return launch_early(act_rows_kernel, at, p);
}

}  // namespace te_mx::sm90
