#include "fused/tile_out.hpp"

#include <algorithm>
#include <cstring>

#include "common/check.h"
#include "mxtile/mx/float_mode.hpp"

namespace te_mx::cpu {
namespace {

using quantize_tile::code_bytes;
using quantize_tile::Columns;
using quantize_tile::kTile;
using quantize_tile::Tile;

bool aligned(const uint8_t* codes, int64_t cols) {
  return codes == nullptr || (reinterpret_cast<uintptr_t>(codes) % 64 == 0 && cols % 64 == 0);
}

void copy_rows(uint8_t* to, int64_t to_stride, const uint8_t* from, int64_t from_stride, int rows,
               int bytes) {
  for (int r = 0; r < rows; ++r) {
    std::memcpy(to + r * to_stride, from + r * from_stride, static_cast<size_t>(bytes));
  }
}

}  // namespace

Status check_tiles(const QuantizeOut& out) {
  const Status status = check_out(out);
  if (status != Status::ok) return status;
  if (!rounds_plainly(out)) return Status::unsupported;
  if (out.col.codes && out.col.layout != Layout::k_first) return Status::unsupported;
  const bool whole = !out.row.codes == !out.row.scales && !out.col.codes == !out.col.scales &&
                     (!out.col_sum || out.col_sum_ws);
  return whole ? Status::ok : Status::bad_argument;
}

TileOut::TileOut(const QuantizeOut& out, int64_t rows, int64_t cols, DType dtype)
    : out_(out),
      rows_(rows),
      cols_(cols),
      element_bytes_(dtype == DType::f32 ? 4 : 2),
      stream_(false),
      kernel_(nullptr) {
  if (!out.row.codes && !out.col.codes && !out.col_sum) return;
  const Columns columns = out.col.codes ? Columns::plain : Columns::none;
  kernel_ = quantize_tile::find(dtype, out.element, out.row.codes != nullptr, columns);
  const int64_t directions = (out.row.codes != nullptr) + (out.col.codes != nullptr);
  stream_ = rows * cols * directions >= kPastCaches &&
            (is_fp4(out.element) || aligned(out.row.codes, cols)) && aligned(out.col.codes, cols);
}

Tile TileOut::place(int64_t r0, int64_t c0) const {
  const int64_t row_blocks = (cols_ + kBlock - 1) / kBlock;
  Tile t{};
  t.rows = kStageRows;
  t.rule = static_cast<mxtile::mx::Rule>(out_.rule);
  if (out_.row.codes) {
    t.row_code_stride = code_bytes(out_.element, cols_);
    t.row_codes = out_.row.codes + r0 * t.row_code_stride + code_bytes(out_.element, c0);
    t.row_scales = static_cast<uint8_t*>(out_.row.scales) + r0 * row_blocks + c0 / kBlock;
    t.row_scale_stride = row_blocks;
  }
  if (out_.col.codes) {
    t.col_codes = out_.col.codes + r0 * cols_ + c0;
    t.col_code_stride = cols_;
    t.col_scales = static_cast<uint8_t*>(out_.col.scales) + r0 / kBlock * cols_ + c0;
    t.col_scale_stride = cols_;
  }
  return t;
}

void TileOut::put(Stage& stage, int64_t r0, int64_t c0, int rows, int cols, float* sums,
                  bool last) const {
  const int whole = rows == kStageRows ? cols / kTile * kTile : 0;
  const int64_t stride = int64_t{kStageCols} * element_bytes_;
  if (whole < cols) {  // zeros change no maximum
    const int padded = (cols + kTile - 1) / kTile * kTile;
    for (int r = 0; r < rows; ++r) {
      std::memset(stage.bytes + r * stride + cols * element_bytes_, 0,
                  static_cast<size_t>((padded - cols) * element_bytes_));
    }
    for (int r = rows; r < kStageRows; ++r) {
      std::memset(stage.bytes + r * stride, 0, static_cast<size_t>(padded * element_bytes_));
    }
  }
  if (whole > 0) {
    Tile t = place(r0, c0);
    t.x = t.next = stage.bytes;
    t.row_stride = kStageCols;
    t.cols = whole;
    t.stream = stream_;
    t.last = last;
    t.col_sum = sums;
    kernel_(t);
  }
  for (int c = whole; c < cols; c += kTile) {
    put_part(stage.bytes + c * element_bytes_, r0, c0 + c, rows, std::min(kTile, cols - c),
             sums ? sums + c : nullptr);
  }
}

// A part that sticks out of the matrix: its codes pass through a tile of their own.
void TileOut::put_part(const uint8_t* x, int64_t r0, int64_t c0, int rows, int cols,
                       float* sums) const {
  alignas(64) uint8_t row_codes[kStageRows * kTile], col_codes[kStageRows * kTile];
  alignas(64) uint8_t row_scales[kStageRows * 2], col_scales[kTile];
  float part_sums[kTile] = {};
  const Tile to = place(r0, c0);
  Tile t = to;
  t.x = t.next = x;
  t.row_stride = kStageCols;
  t.cols = kTile;
  t.last = true;
  t.row_code_stride = t.col_code_stride = kTile;
  t.row_scale_stride = 2;
  t.col_scale_stride = kTile;
  if (to.row_codes) {
    t.row_codes = row_codes;
    t.row_scales = row_scales;
  }
  if (to.col_codes) {
    t.col_codes = col_codes;
    t.col_scales = col_scales;
  }
  if (sums) {
    std::copy(sums, sums + cols, part_sums);
    t.col_sum = part_sums;
  }
  kernel_(t);
  if (sums) std::copy(part_sums, part_sums + cols, sums);
  if (to.row_codes) {
    copy_rows(to.row_codes, to.row_code_stride, row_codes, kTile, rows,
              static_cast<int>(code_bytes(out_.element, cols)));
    copy_rows(to.row_scales, to.row_scale_stride, row_scales, 2, rows, (cols + 31) / 32);
  }
  if (to.col_codes) {
    copy_rows(to.col_codes, to.col_code_stride, col_codes, kTile, rows, cols);
    std::memcpy(to.col_scales, col_scales, static_cast<size_t>(cols));
  }
}

void add_partial_sums(const float* partial, int64_t groups, int64_t cols, float* sums) {
  const mxtile::mx::KeepDenormals keep_denormals;
  std::fill(sums, sums + cols, 0.0f);
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t c = 0; c < cols; ++c) sums[c] += partial[g * cols + c];
  }
}

}  // namespace te_mx::cpu
