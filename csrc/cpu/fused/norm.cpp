// normalize() and normalize_backward(): rows shared out to threads. A group of 32 rows, or of 128
// where scales are fp32, is read for its sums, normalized from the cache a tile at a time, and
// quantized from there.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>

#include "common/isa.h"
#include "common/parallel.h"
#include "common/room.h"
#include "fused/fused_rows.h"
#include "fused/tile_out.hpp"
#include "mxtile/mx/float_mode.hpp"

namespace te_mx::cpu {

const RowKernels& row_kernels() {
  const Isa isa = isa_native();
#if defined(TE_MX_HAVE_AVX512)
  if (isa >= Isa::avx512) return row_kernels_avx512();
#endif
#if defined(TE_MX_HAVE_AVX2)
  if (isa >= Isa::avx2) return row_kernels_avx2();
#endif
  (void)isa;
  return row_kernels_portable();
}

namespace {

constexpr int64_t kSerialElements = 16 * 1024;  // below, waking threads costs more than they save

int64_t bytes_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

void normalize_group(const NormArgs& args, const RowKernels& kernels, const TileOut& out,
                     int64_t group) {
  const mxtile::mx::KeepDenormals keep_denormals;
  const int64_t r0 = group * out.stage_rows(), z_bytes = bytes_of(args.z_dtype);
  const int stage_cols = out.stage_cols();
  const int rows = static_cast<int>(std::min<int64_t>(out.stage_rows(), args.x.rows - r0));
  float mean[kWideStage], rstd[kWideStage];
  for (int r = 0; r < rows; ++r) kernels.stats(args, r0 + r, mean + r, rstd + r);
  if (args.mean) std::copy(mean, mean + rows, args.mean + r0);
  std::copy(rstd, rstd + rows, args.rstd + r0);
  if (!args.z && !out.enabled()) return;
  const InRoom<Stage> in_room;
  Stage& stage = *in_room;
  for (int64_t c = 0; c < args.x.cols; c += stage_cols) {
    const int cols = static_cast<int>(std::min<int64_t>(stage_cols, args.x.cols - c));
    for (int r = 0; r < rows; ++r) {
      uint8_t* to = stage.bytes + r * stage_cols * z_bytes;
      kernels.normalize(args, r0 + r, mean[r], rstd[r], c, cols, to);
      if (args.z) {
        std::memcpy(static_cast<uint8_t*>(args.z) + ((r0 + r) * args.x.cols + c) * z_bytes, to,
                    static_cast<size_t>(cols * z_bytes));
      }
    }
    if (out.enabled()) out.put(stage, r0, c, rows, cols, nullptr, c + cols >= args.x.cols);
  }
}

bool rows_ok(const Matrix& x) {
  return x.rows > 0 && x.cols > 0 && x.data && x.col_stride == 1 && known(x.dtype);
}

}  // namespace

Status normalize(const NormArgs& args) {
  const Status status = check_tiles(args.to);
  if (status != Status::ok) return status;
  if (!rows_ok(args.x) || !args.weight || !args.rstd || (!args.rms && !args.mean) ||
      !known(args.z_dtype) || args.to.col_sum || args.weight_dtype != DType::f32) {
    return Status::bad_argument;
  }
  const RowKernels& kernels = row_kernels();
  const TileOut out(args.to, args.x.rows, args.x.cols, args.z_dtype);
  const int64_t groups = (args.x.rows + out.stage_rows() - 1) / out.stage_rows();
  const int threads = args.x.rows * args.x.cols < kSerialElements ? 1 : args.execution.threads;
  parallel_for(threads, groups, [&](int64_t group) { normalize_group(args, kernels, out, group); });
  return Status::ok;
}

Status normalize_backward(const NormGradArgs& args) {
  if (!rows_ok(args.x) || !rows_ok(args.dz) || args.dz.rows != args.x.rows ||
      args.dz.cols != args.x.cols || !args.weight || !args.rstd || (!args.rms && !args.mean) ||
      !args.dx || !args.dweight || !args.partial || !known(args.dx_dtype) ||
      args.weight_dtype != DType::f32) {
    return Status::bad_argument;
  }
  const RowKernels& kernels = row_kernels();
  const int64_t groups = (args.x.rows + kColSumRows - 1) / kColSumRows, cols = args.x.cols;
  const int64_t padded = (cols + kNormLanes - 1) / kNormLanes * kNormLanes;
  // Scratch of one row for each group: threads that run at the same time run different groups.
  const std::unique_ptr<float[]> scratch(
      new (std::nothrow) float[static_cast<size_t>(2 * padded * groups)]);
  if (!scratch) return Status::small_workspace;
  const int threads = args.x.rows * cols < kSerialElements ? 1 : args.execution.threads;
  parallel_for(threads, groups, [&](int64_t group) {
    const mxtile::mx::KeepDenormals keep_denormals;
    float* dweight = args.partial + group * cols;
    float* dbias = args.dbias ? args.partial + (groups + group) * cols : nullptr;
    std::fill(dweight, dweight + cols, 0.0f);
    if (dbias) std::fill(dbias, dbias + cols, 0.0f);
    float* row = scratch.get() + 2 * padded * group;
    const int64_t end = std::min(args.x.rows, (group + 1) * kColSumRows);
    for (int64_t r = group * kColSumRows; r < end; ++r) {
      kernels.normalize_backward(args, r, dweight, dbias, row, row + padded);
    }
  });
  add_partial_sums(args.partial, groups, cols, static_cast<float*>(args.dweight));
  if (args.dbias)
    add_partial_sums(args.partial + groups * cols, groups, cols, static_cast<float*>(args.dbias));
  return Status::ok;
}

}  // namespace te_mx::cpu
