// The end of a fused step: values that were computed into a small buffer go through the quantizer's
// tile kernels.
#pragma once

#include "quantize/blockwise.hpp"
#include "quantize/quantize.hpp"
#include "te_mx/fused.h"

namespace te_mx::cpu {

// Rows and columns of values that are computed before they are quantized: of MX, and of fp32
// scales.
inline constexpr int kStageRows = 32, kStageCols = quantize_tile::kTileCols;
inline constexpr int kWideStage = blockwise::kTile;

// Elements of one dtype.
struct alignas(64) Stage {
  uint8_t bytes[kWideStage * kWideStage * 4];
};
static_assert(sizeof(Stage) >= kStageRows * kStageCols * 4);

// Where values of a matrix [rows, cols] are quantized to.
class TileOut {
 public:
  TileOut(const QuantizeOut& out, int64_t rows, int64_t cols, DType dtype);

  bool enabled() const { return kernel_ != nullptr || wide_ != nullptr; }

  // Of a whole stage.
  int stage_rows() const { return wide_ ? kWideStage : kStageRows; }
  int stage_cols() const { return wide_ ? kWideStage : kStageCols; }

  // Quantizes rows x cols elements of a stage, whose rows are stage_cols() apart, to (r0, c0),
  // where a stage starts. What lies past them in the stage is overwritten with zeros. sums (or
  // null): of these columns, running. `last`: stores are complete on return.
  void put(Stage& stage, int64_t r0, int64_t c0, int rows, int cols, float* sums, bool last) const;

 private:
  void put_blocks(Stage& stage, int64_t r0, int64_t c0, int rows, int cols, float* sums,
                  bool last) const;
  void put_part(const uint8_t* x, int64_t r0, int64_t c0, int rows, int cols, float* sums) const;
  quantize_tile::Tile place(int64_t r0, int64_t c0) const;

  QuantizeOut out_;
  int64_t rows_, cols_;
  int element_bytes_;
  bool stream_ = false;
  quantize_tile::Kernel kernel_ = nullptr;  // of MX
  blockwise::TileKernel wide_ = nullptr;    // of fp32 scales
};

// ok, or what is wrong with what a fused step is asked to quantize to.
Status check_tiles(const QuantizeOut& out);

// col_sum = the sum of its partial sums, in order.
void add_partial_sums(const float* partial, int64_t groups, int64_t cols, float* sums);

}  // namespace te_mx::cpu
