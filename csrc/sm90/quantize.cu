// Entry point of quantize: picks the instance for the input type and the format.
#include "gemm_launch.h"
#include "quantize_kernel.cuh"

namespace te_mx::sm90 {

namespace {

template <class T, tile::Fp8 kFmt>
Status launch_quantize(const QuantizeParams& p, cudaStream_t stream) {
  const auto kernel = quantize_kernel<T, kFmt>;
  constexpr int kBytes = sizeof(QuantizeSmem<T>);
  int device = 0;
  static std::atomic<uint64_t> prepared{0};
  if (cudaGetDevice(&device) != cudaSuccess) return Status::unsupported;
  const uint64_t bit = uint64_t{1} << (device & 63);
  if ((prepared.load(std::memory_order_relaxed) & bit) == 0) {
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes) !=
        cudaSuccess) {
      return Status::unsupported;
    }
    prepared.fetch_or(bit, std::memory_order_relaxed);
  }
  kernel<<<static_cast<unsigned>(p.row_tiles * p.col_tiles), kQuantizeThreads, kBytes, stream>>>(p);
  return cudaGetLastError() == cudaSuccess ? Status::ok : Status::unsupported;
}

template <class T>
Status launch_format(const QuantizeParams& p, cudaStream_t stream) {
  return p.a.fmt == Format::e4m3 ? launch_quantize<T, tile::Fp8::e4m3>(p, stream)
                                 : launch_quantize<T, tile::Fp8::e5m2>(p, stream);
}

}  // namespace

Status quantize(const QuantizeArgs& a) {
  if (a.rows < 0 || a.cols < 0 || a.spread < 0 || a.spread > kMaxSpread ||
      (a.row_codes != nullptr && a.row_packed.codes != nullptr) ||
      (a.col_codes != nullptr && a.col_packed.codes != nullptr) ||
      (a.col_sum != nullptr && a.col_sum_ws == nullptr)) {
    return Status::bad_argument;
  }
  if (a.rows == 0 || a.cols == 0) return Status::ok;
  const int64_t row_tiles = (a.rows + 127) / 128, col_tiles = (a.cols + 127) / 128;
  constexpr int kGroup = 8;
  if (row_tiles > INT32_MAX / col_tiles || col_tiles > INT32_MAX / kGroup)
    return Status::unsupported;
  const QuantizeParams p{a, static_cast<int>(row_tiles), static_cast<int>(col_tiles), kGroup};
  const auto stream = static_cast<cudaStream_t>(a.stream);
  const Status status = a.x_dtype == DType::bf16  ? launch_format<__nv_bfloat16>(p, stream)
                        : a.x_dtype == DType::f16 ? launch_format<__half>(p, stream)
                                                  : launch_format<float>(p, stream);
  if (status != Status::ok || a.col_sum == nullptr) return status;
  return reduce_columns(a.col_sum_ws, a.col_sum, p.row_tiles, a.cols, stream);
}

}  // namespace te_mx::sm90
