// Launches an instance of the quantizer to fp32 factors.
#pragma once

#include "quantize/factor_kernel.cuh"
#include "quantize/quantize_launch.cuh"

namespace te_mx::sm90 {

// Of an operand of `blocks` blocks of rows and `steps` steps of 128 along K, where the plain one
// lies along K or `lies_as_x`, and the packed one has `packed_blocks`.
inline FactorsOut factors_out(void* plain, const Packed& packed, bool lies_as_x, int64_t blocks,
                              int64_t steps, int64_t packed_blocks) {
  if (packed.codes != nullptr)
    return {reinterpret_cast<float*>(packed.scales), 1, packed_blocks, true};
  float* const scales = static_cast<float*>(plain);
  return lies_as_x ? FactorsOut{scales, 1, blocks, false} : FactorsOut{scales, steps, 1, false};
}

// For rows that are cut into `row_tiles` tiles, with `k` codes in a row of the columns.
inline Status factor_params(const QuantizeTask& a, const QuantizeOut& to, int64_t row_tiles,
                            int64_t k, FactorParams& p) {
  p = {};
  const Status status = quantize_params(a, row_tiles, k, p);
  if (status != Status::ok) return status;
  const bool square = to.scaling.block_rows != 1;
  const auto blocks = [&](int64_t size) { return square ? (size + 127) / 128 : size; };
  const auto packed = [&](int64_t tiles) {
    return square ? block_tiles(128 * tiles) : packed_tiles(128 * tiles) * 128;
  };
  p.row_factors = factors_out(a.row_scales, a.row_packed, false, blocks(a.rows), p.col_tiles,
                              packed(row_tiles));
  p.col_factors = factors_out(a.col_scales, a.col_packed, a.col_lies_as_x, blocks(a.cols),
                              row_tiles, packed(p.col_tiles));
  p.epsilon = to.amax_epsilon, p.power_of_two = to.rule == ScaleRule::pow2;
  return Status::ok;
}

template <bool kSquare, class T, tile::Fp8 kFmt, class Where>
Status launch_factor_instance(const FactorParams& p, const Where& where, dim3 grid, int64_t tiles,
                              cudaStream_t stream) {
  const auto kernel = factor_kernel<T, kFmt, kSquare, Where>;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(kQuantizeThreads);
  config.stream = stream;
  const Device device = current_device();
  static std::atomic<bool> ready[64];
  std::atomic<bool>& allowed = ready[device.index & 63];
  if (!allowed.load(std::memory_order_relaxed)) {
    const Status status = started(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSpreadingSmem));
    if (status != Status::ok) return status;
    allowed.store(true, std::memory_order_relaxed);
  }
  config.dynamicSmemBytes = spreading_smem(tiles, device.sms);
  cudaLaunchAttribute early = early_start();
  config.attrs = &early, config.numAttrs = 1;
  return started(cudaLaunchKernelEx(&config, kernel, p, where));
}

// kSquare: one factor for 128 x 128. `tiles`: CTAs that have work, as far as the host knows.
template <bool kSquare, class Where>
Status launch_factors(const FactorParams& p, const Where& where, dim3 grid, int64_t tiles,
                      cudaStream_t stream) {
  const auto go = [&]<class T>(T) {
    return p.a.element == Element::e4m3
               ? launch_factor_instance<kSquare, T, tile::Fp8::e4m3>(p, where, grid, tiles, stream)
               : launch_factor_instance<kSquare, T, tile::Fp8::e5m2>(p, where, grid, tiles, stream);
  };
  return p.a.x_dtype == DType::bf16  ? go(__nv_bfloat16{})
         : p.a.x_dtype == DType::f16 ? go(__half{})
                                     : go(float{});
}

}  // namespace te_mx::sm90
