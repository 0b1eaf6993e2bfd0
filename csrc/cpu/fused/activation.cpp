// activate(): tiles shared out to threads; a tile is computed into a buffer and quantized from
// there.
#include <algorithm>
#include <cstring>

#include "common/parallel.h"
#include "common/room.h"
#include "fused/fused_rows.h"
#include "fused/tile_out.hpp"
#include "mxtile/mx/float_mode.hpp"

namespace te_mx::cpu {
namespace {

constexpr int64_t kItemCols = 1024;
// A tile ahead lines come to L2: rows a power of two apart share sets of L1, which has no room for
// two tiles. From there they come to L1 so many rows ahead.
constexpr int kL1 = 3, kL2 = 2, kNear = 2;
constexpr int64_t kSerialElements = 16 * 1024;  // below, waking threads costs more than they save

struct Problem {
  const ActArgs& args;
  const RowKernels& kernels;
  TileOut out;
  int64_t rows, cols;  // of the activated values
  int64_t width;       // of the result
  int64_t element_bytes, item_rows, chunks;
};

// Columns [c, c + n) of the result from a stage to memory.
void store(const Problem& p, const Stage& stage, int64_t r0, int64_t c, int rows, int n) {
  const int64_t bytes = p.element_bytes;
  uint8_t* out = static_cast<uint8_t*>(p.args.out);
  for (int r = 0; r < rows; ++r) {
    std::memcpy(out + ((r0 + r) * p.width + c) * bytes,
                stage.bytes + r * p.out.stage_cols() * bytes, static_cast<size_t>(n * bytes));
  }
}

// Fetches what the row of a tile will read: rows of a tile lie too far apart for any prefetcher.
template <int kLevel>
void fetch(const ActArgs& a, int64_t row, int64_t c, int64_t n) {
  const auto lines = [&](const Matrix& m, int64_t col) {
    const int64_t bytes = m.dtype == DType::f32 ? 4 : 2;
    const char* p = static_cast<const char*>(m.data) + (row * m.row_stride + col) * bytes;
    for (int64_t i = 0; i < n * bytes; i += 64) __builtin_prefetch(p + i, 0, kLevel);
  };
  lines(a.h, c);
  if (a.gated) lines(a.h, c + act_cols(a));
  if (a.grad.data != nullptr) lines(a.grad, c);
}

void run_item(const Problem& p, int64_t item) {
  const mxtile::mx::KeepDenormals keep_denormals;
  const ActArgs& a = p.args;
  const bool halves = a.grad.data && a.gated;
  const int64_t group = item / p.chunks, c_begin = item % p.chunks * kItemCols;
  const int64_t c_end = std::min(p.cols, c_begin + kItemCols);
  const int64_t r_end = std::min(p.rows, (group + 1) * p.item_rows);
  const int stage_rows = p.out.stage_rows(), stage_cols = p.out.stage_cols();
  const int64_t stride = stage_cols * p.element_bytes;
  float sums[2][kItemCols] = {};
  const InRoom<Stage[2]> in_room;
  Stage(&stages)[2] = *in_room;
  for (int64_t r = group * p.item_rows; r < r_end; r += stage_rows) {
    const int rows = static_cast<int>(std::min<int64_t>(stage_rows, r_end - r));
    for (int64_t c = c_begin; c < c_end; c += stage_cols) {
      const int n = static_cast<int>(std::min<int64_t>(stage_cols, c_end - c));
      const bool next_rows = c + stage_cols >= c_end;
      const int64_t next_r = next_rows ? r + stage_rows : r;
      const int64_t next_c = next_rows ? c_begin : c + stage_cols;
      const int64_t next_n = std::min<int64_t>(stage_cols, c_end - next_c);
      for (int i = 0; i < rows; ++i) {
        if (next_r + i < p.rows) fetch<kL2>(a, next_r + i, next_c, next_n);
        if (i + kNear < rows) fetch<kL1>(a, r + i + kNear, c, n);
        p.kernels.activate(a, r + i, c, n, stages[0].bytes + i * stride,
                           halves ? stages[1].bytes + i * stride : nullptr);
      }
      const bool last = r + rows >= r_end && c + n >= c_end;
      for (int h = 0; h <= (halves ? 1 : 0); ++h) {
        const int64_t to = h * p.cols + c;
        if (a.out) store(p, stages[h], r, to, rows, n);
        if (p.out.enabled()) {
          float* part = a.to.col_sum ? sums[h] + (c - c_begin) : nullptr;
          p.out.put(stages[h], r, to, rows, n, part, last);
        }
      }
    }
  }
  for (int h = 0; a.to.col_sum && h <= (halves ? 1 : 0); ++h) {
    float* to = a.to.col_sum_ws + group * p.width + h * p.cols + c_begin;
    std::copy(sums[h], sums[h] + (c_end - c_begin), to);
  }
}

bool valid_args(const ActArgs& a) {
  const int act = static_cast<int>(a.act);
  const auto matrix = [](const Matrix& m) { return m.col_stride == 1 && known(m.dtype); };
  const bool sizes = a.h.rows > 0 && act_cols(a) > 0 && (!a.gated || a.h.cols % 2 == 0);
  const bool grads = !a.grad.data || (a.grad.rows == a.h.rows && a.grad.cols == act_cols(a));
  return sizes && grads && a.h.data && act >= 0 && act <= 7 && matrix(a.h) && matrix(a.grad) &&
         known(a.out_dtype);
}

}  // namespace

Status activate(const ActArgs& args) {
  const Status status = check_tiles(args.to);
  if (status != Status::ok) return status;
  if (!valid_args(args)) return Status::bad_argument;
  const int64_t rows = args.h.rows, cols = act_cols(args);
  const int64_t width = args.grad.data && args.gated ? 2 * cols : cols;
  const TileOut out(args.to, rows, width, args.out_dtype);
  const Problem p{args,
                  row_kernels(),
                  out,
                  rows,
                  cols,
                  width,
                  args.out_dtype == DType::f32 ? 4 : 2,
                  args.to.col_sum ? kColSumRows : out.stage_rows(),
                  (cols + kItemCols - 1) / kItemCols};
  const int64_t block = is_blockwise(args.to.scaling) ? kWideBlock : kBlock;
  if (p.out.enabled() && width != cols && cols % block != 0) return Status::unsupported;
  const int threads = rows * cols < kSerialElements ? 1 : args.execution.threads;
  const int64_t groups = (rows + p.item_rows - 1) / p.item_rows;
  parallel_for(threads, groups * p.chunks, [&](int64_t item) { run_item(p, item); });
  if (args.to.col_sum) {
    const int64_t partials = (rows + kColSumRows - 1) / kColSumRows;
    add_partial_sums(args.to.col_sum_ws, partials, width, static_cast<float*>(args.to.col_sum));
  }
  return Status::ok;
}

}  // namespace te_mx::cpu
