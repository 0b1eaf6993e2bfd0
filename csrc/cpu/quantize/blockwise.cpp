// quantize() of fp32 scales: checks, the loop over tiles and the column sums.
#include "quantize/blockwise.hpp"

#include <algorithm>
#include <cstring>

#include "common/check.h"
#include "common/groups.h"
#include "common/isa.h"
#include "common/parallel.h"
#include "common/sizes.h"
#include "mxtile/mx/float_mode.hpp"

namespace te_mx::cpu {
namespace {

using blockwise::kTile;
using blockwise::Tile;
using blockwise::TileKernel;

constexpr int64_t kItemCols = 512;
constexpr int64_t kSerialElements = 64 * 1024;  // below, waking threads costs more than they save
static_assert(kColSumRows % kTile == 0);

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

Tile tile_at(const QuantizeArgs& a, int64_t r0, int64_t c0) {
  const Matrix& x = a.x;
  Tile t = blockwise::tile_to(a.to, x.rows, x.cols, r0, c0);
  t.x = static_cast<const char*>(x.data) +
        (r0 * x.row_stride + c0 * x.col_stride) * element_bytes(x.dtype);
  t.row_stride = x.row_stride;
  t.col_stride = x.col_stride;
  return t;
}

bool aligned(const uint8_t* codes, int64_t stride) {
  return codes == nullptr || (reinterpret_cast<uintptr_t>(codes) % 64 == 0 && stride % 64 == 0);
}

// The rows and columns of one item.
void run_item(const QuantizeArgs& a, TileKernel kernel, int64_t r_begin, int64_t r_end,
              int64_t c_begin) {
  const mxtile::mx::KeepDenormals keep_denormals;
  const bool stream = blockwise::wants_stream(a.to, a.x.rows, a.x.cols);
  const int64_t c_end = std::min(a.x.cols, c_begin + kItemCols);
  float sums[kItemCols] = {};
  for (int64_t r = r_begin; r < r_end; r += kTile) {
    for (int64_t c = c_begin; c < c_end; c += kTile) {
      Tile t = tile_at(a, r, c);
      const int64_t next_r = c + kTile < c_end ? r : r + kTile;
      const int64_t next_c = c + kTile < c_end ? c + kTile : c_begin;
      t.next = static_cast<const uint8_t*>(t.x);
      if (next_r + kTile <= r_end && next_c + kTile <= c_end) {
        t.next = static_cast<const uint8_t*>(tile_at(a, next_r, next_c).x);
      }
      t.stream = stream;
      t.last = next_r >= r_end;
      if (a.to.col_sum) t.col_sum = sums + (c - c_begin);
      kernel(t);
    }
  }
  if (a.to.col_sum) {
    std::memcpy(a.to.col_sum_ws + r_begin / kColSumRows * a.x.cols + c_begin, sums,
                sizeof(float) * static_cast<size_t>(c_end - c_begin));
  }
}

void add_partial_sums(const QuantizeArgs& a) {
  const mxtile::mx::KeepDenormals keep_denormals;
  float* sum = static_cast<float*>(a.to.col_sum);
  std::fill(sum, sum + a.x.cols, 0.0f);
  for (int64_t g = 0; g < ceil_div(a.x.rows, kColSumRows); ++g) {
    const float* partial = a.to.col_sum_ws + g * a.x.cols;
    for (int64_t c = 0; c < a.x.cols; ++c) sum[c] += partial[c];
  }
}

bool valid(const QuantizeArgs& a) {
  const auto& [x, to, execution] = a;
  if (x.rows < 0 || x.cols < 0 || !known(x.dtype)) return false;
  if (x.rows == 0 || x.cols == 0) return true;
  return x.data && !to.row.codes == !to.row.scales && !to.col.codes == !to.col.scales &&
         (!to.col_sum || to.col_sum_ws);
}

}  // namespace

namespace blockwise {

TileKernel find(DType dtype, Element element) {
  const Isa isa = isa_native();
#if defined(TE_MX_HAVE_AVX512_BF16)
  if (isa >= Isa::avx512_bf16) return find_avx512_vbmi(dtype, element);
#endif
#if defined(TE_MX_HAVE_AVX512)
  if (isa >= Isa::avx512) return find_avx512(dtype, element);
#endif
#if defined(TE_MX_HAVE_AVX2)
  if (isa >= Isa::avx2) return find_avx2(dtype, element);
#endif
  (void)isa;
  return find_portable(dtype, element);
}

Tile tile_to(const QuantizeOut& to, int64_t rows, int64_t cols, int64_t r0, int64_t c0) {
  const bool square = to.scaling.block_rows != 1;
  const int64_t row_blocks = ceil_div(rows, kTile), col_blocks = ceil_div(cols, kTile);
  const int64_t r = square ? r0 / kTile : r0, c = square ? c0 / kTile : c0;
  Tile t{};
  t.rows = static_cast<int>(std::min<int64_t>(kTile, rows - r0));
  t.cols = static_cast<int>(std::min<int64_t>(kTile, cols - c0));
  t.square = square;
  t.pow2 = to.rule == ScaleRule::pow2;
  t.epsilon = bits_of(to.amax_epsilon);
  if (to.row.codes) {
    t.row_codes = to.row.codes + r0 * cols + c0;
    t.row_code_stride = cols;
    t.row_scales = static_cast<float*>(to.row.scales) + r * col_blocks + c0 / kTile;
    t.row_scale_stride = col_blocks;
  }
  if (to.col.codes) {
    t.transposed = to.col.layout == Layout::k_last;
    float* scales = static_cast<float*>(to.col.scales);
    if (t.transposed) {
      t.col_codes = to.col.codes + c0 * rows + r0;
      t.col_code_stride = rows;
      t.col_scales = scales + c * row_blocks + r0 / kTile;
      t.col_scale_stride = row_blocks;
    } else {
      t.col_codes = to.col.codes + r0 * cols + c0;
      t.col_code_stride = cols;
      t.col_scales = scales + r0 / kTile * (square ? col_blocks : cols) + c;
      t.col_scale_stride = 1;
    }
  }
  return t;
}

bool wants_stream(const QuantizeOut& to, int64_t rows, int64_t cols) {
  const int64_t directions = (to.row.codes != nullptr) + (to.col.codes != nullptr);
  return rows * cols * directions >= kPastCaches && aligned(to.row.codes, cols) &&
         aligned(to.col.codes, cols);
}

}  // namespace blockwise

Status quantize_blockwise(const QuantizeArgs& args) {
  const Status status = check_blockwise_out(args.to);
  if (status != Status::ok) return status;
  if (!valid(args)) return Status::bad_argument;
  const int64_t rows = args.x.rows, cols = args.x.cols;
  if (rows > 0 && cols > 0 && (args.to.row.codes || args.to.col.codes || args.to.col_sum)) {
    const TileKernel kernel = blockwise::find(args.x.dtype, args.to.element);
    const int64_t item_rows = args.to.col_sum ? kColSumRows : kTile;
    const int64_t chunks = ceil_div(cols, kItemCols);
    const int threads = rows * cols < kSerialElements ? 1 : args.execution.threads;
    parallel_for(threads, ceil_div(rows, item_rows) * chunks, [&](int64_t item) {
      const int64_t r = item / chunks * item_rows;
      run_item(args, kernel, r, std::min(rows, r + item_rows), item % chunks * kItemCols);
    });
  }
  if (args.to.col_sum && cols > 0) add_partial_sums(args);
  return Status::ok;
}

}  // namespace te_mx::cpu
