// The end of a fused step: values that were computed into a small buffer go through the quantizer's
// tile kernels.
#pragma once

#include "quantize/quantize.hpp"
#include "te_mx/fused.h"

namespace te_mx::cpu {

inline constexpr int kStageRows = 32;
inline constexpr int kStageCols = quantize_tile::kTileCols;

// [kStageRows][kStageCols] elements of one dtype.
struct alignas(64) Stage {
  uint8_t bytes[kStageRows * kStageCols * 4];
};

// Where values of a matrix [rows, cols] are quantized to.
class TileOut {
 public:
  TileOut(const QuantizeOut& out, int64_t rows, int64_t cols, DType dtype);

  bool enabled() const { return kernel_ != nullptr; }

  // Quantizes rows x cols elements of a stage to (r0, c0), a multiple of 32 both. What lies past
  // them in the stage is overwritten with zeros. sums (or null): of these columns, running. `last`:
  // stores are complete on return.
  void put(Stage& stage, int64_t r0, int64_t c0, int rows, int cols, float* sums, bool last) const;

 private:
  void put_part(const uint8_t* x, int64_t r0, int64_t c0, int rows, int cols, float* sums) const;
  quantize_tile::Tile place(int64_t r0, int64_t c0) const;

  QuantizeOut out_;
  int64_t rows_, cols_;
  int element_bytes_;
  bool stream_;
  quantize_tile::Kernel kernel_;
};

// ok, or what is wrong with what a fused step is asked to quantize to.
Status check_tiles(const QuantizeOut& out);

// col_sum = the sum of its partial sums, in order.
void add_partial_sums(const float* partial, int64_t groups, int64_t cols, float* sums);

}  // namespace te_mx::cpu
