// Launches an instance of the quantizer to fp32 factors for the blocks, the input type, the format
// and the place of its tiles.
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

inline bool wants_aligned(const QuantizeOut& to) {
  return to.col.codes != nullptr &&
         (to.col.layout == Layout::aligned_tiles || to.col.layout == Layout::aligned_group_k);
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
  p.aligned = wants_aligned(to);
  return Status::ok;
}

// ok, or what is wrong with what a quantizer to fp32 factors is asked for.
inline Status check_factors(const QuantizeOut& to) {
  const bool square = to.scaling.block_rows != 1;
  return wants_aligned(to) && (square || to.rule != ScaleRule::pow2) ? Status::bad_argument
                                                                     : Status::ok;
}

// `tiles`: CTAs that have work, as far as the host knows.
template <FactorBlocks kBlocks, class Where>
Status launch_factors(const FactorParams& p, const Where& where, dim3 grid, int64_t tiles,
                      cudaStream_t stream, Start start) {
  const auto go = [&]<class T>(T) {
    const auto run = [&]<tile::Fp8 kFmt>() {
      return launch_spread(factor_kernel<T, kFmt, kBlocks, Where>, p, where, grid, tiles, stream,
                           start);
    };
    if constexpr (Where::kOfWeights) {
      return run.template operator()<tile::Fp8::e4m3>();
    } else {
      return p.a.element == Element::e4m3 ? run.template operator()<tile::Fp8::e4m3>()
                                          : run.template operator()<tile::Fp8::e5m2>();
    }
  };
  return p.a.x_dtype == DType::bf16  ? go(__nv_bfloat16{})
         : p.a.x_dtype == DType::f16 ? go(__half{})
                                     : go(float{});
}

// Calls launch<kBlocks>() for the blocks of what is asked for.
template <class Launch>
Status with_blocks(const QuantizeOut& to, const Launch& launch) {
  return to.scaling.block_rows != 1 ? launch.template operator()<FactorBlocks::squares>()
         : wants_aligned(to)        ? launch.template operator()<FactorBlocks::rows_aligned>()
                                    : launch.template operator()<FactorBlocks::rows>();
}

// The instances for rows.
Status launch_factors(const QuantizeOut& to, const FactorParams& p, const RowTiles& where,
                      dim3 grid, int64_t tiles, cudaStream_t stream, Start start);

}  // namespace te_mx::sm90
