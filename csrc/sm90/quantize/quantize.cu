// Entry points of quantize: one matrix, and two at a time; host code shared with other quantizers.
#include <cfloat>

#include "quantize/few_rows.h"
#include "quantize/quantize_launch.cuh"
#include "quantize/quantize_two.h"

namespace te_mx::sm90 {

namespace {

__global__ void __launch_bounds__(kSumWidth* kSumHeight)
    sum_tiles(const float* partial, void* out, void* second, DType out_dtype, int64_t tiles,
              int64_t cols, int64_t pitch) {
  tile::let_dependents_start();
  tile::await_predecessors();
  void* const to = blockIdx.y == 0 ? out : second;
  if (to != nullptr) add_tiles(partial + blockIdx.y * cols, pitch, to, out_dtype, 0, tiles, cols);
}

int last_of(int64_t size) { return static_cast<int>((size - 1) % kTile + 1); }

// Rows of `width` codes, in vectors of `bytes` where every row allows it; plain ones two a byte
// where `nibbles`, in vectors of half the bytes.
CodesOut codes_out(uint8_t* plain, const Packed& packed, int64_t width, int bytes, bool nibbles) {
  CodesOut out{};
  out.packed = packed.codes != nullptr;
  out.codes = out.packed ? packed.codes : plain;
  out.enabled = out.codes != nullptr;
  out.nibbles = nibbles && !out.packed;
  out.ld = out.packed ? packed_ld(width) : out.nibbles ? (width + 1) / 2 : width;
  out.last_width = last_of(out.ld);
  if (out.nibbles) bytes /= 2, out.last_width = static_cast<int>((out.ld - 1) % (kTile / 2) + 1);
  out.vectors = out.ld % bytes == 0 && reinterpret_cast<uintptr_t>(out.codes) % bytes == 0;
  return out;
}

}  // namespace

Status launch_quantize(const QuantizeParams& p, const RowTiles& where, dim3 grid, int64_t tiles,
                       cudaStream_t stream, Start start) {
  return wants_plain(p) ? launch_quantize<true>(p, where, grid, tiles, stream, start)
                        : launch_quantize<false>(p, where, grid, tiles, stream, start);
}

bool wants_plain(const QuantizeParams& p) {
  return (p.row.enabled && !p.row.packed) || (p.col.enabled && !p.col.packed);
}

dim3 tile_grid(const QuantizeParams& p, int col_tiles, int64_t matrices) {
  const int64_t groups = (p.row_tiles + (1ll << p.group_bits) - 1) >> p.group_bits;
  constexpr int64_t kMaxY = 32768;
  return dim3(static_cast<unsigned>(col_tiles) << p.group_bits,
              static_cast<unsigned>(groups < kMaxY ? groups : kMaxY),
              static_cast<unsigned>(matrices * ((groups + kMaxY - 1) / kMaxY)));
}

Status launch_sums(const float* partial, void* out, DType out_dtype, int64_t tiles, int64_t cols,
                   cudaStream_t stream) {
  void* const none = nullptr;
  return launch_adding(sum_tiles, cols, 1, stream, partial, out, none, out_dtype, tiles, cols,
                       cols);
}

Status launch_two_sums(const float* partial, void* first, void* second, DType out_dtype,
                       int64_t tiles, int64_t cols, cudaStream_t stream) {
  return launch_adding(sum_tiles, cols, 2, stream, partial, first, second, out_dtype, tiles, cols,
                       2 * cols);
}

Status quantize_params(const QuantizeTask& a, QuantizeParams& p) {
  return quantize_params(a, (a.rows + 127) / 128, a.rows, p);
}

Status quantize_params(const QuantizeTask& a, int64_t row_tiles, int64_t k, QuantizeParams& p) {
  if (a.rows < 0 || a.cols < 0 || a.spread < 0 || a.spread > kByRows ||
      (a.row_codes != nullptr && a.row_packed.codes != nullptr) ||
      (a.col_codes != nullptr && a.col_packed.codes != nullptr) ||
      (a.col_lies_as_x && a.col_packed.codes != nullptr) ||
      (a.col_sum != nullptr && a.col_sum_ws == nullptr)) {
    return Status::bad_argument;
  }
  const int64_t col_tiles = (a.cols + 127) / 128;
  // Eight row tiles at a time keep both the rows and the columns that are written together long.
  int group_bits = 0;
  while (group_bits < 3 && (1 << group_bits) < row_tiles) ++group_bits;
  if (row_tiles > INT32_MAX || col_tiles > INT32_MAX >> group_bits) return Status::unsupported;
  p = {};
  p.a = a;
  const bool fp4 = a.element == Element::e2m1;
  p.by_rows = a.spread == kByRows && a.row_packed.codes != nullptr;
  if (p.by_rows && a.element != Element::e4m3) return Status::unsupported;
  if (a.spread == kByRows) p.a.spread = kMaxSpread;  // of columns
  if (fp4) p.a.spread = tile::kFp4Spread;
  p.a.carry = scale_carry(a.element, a.rule) * 0x10001u;
  p.row = codes_out(a.row_codes, a.row_packed, a.cols, 8, fp4);
  p.col = a.col_lies_as_x ? codes_out(a.col_codes, {}, a.cols, 8, false)
                          : codes_out(a.col_codes, a.col_packed, k, 16, fp4);
  p.x_vectors = a.cols % 8 == 0 && a.x_stride * (a.x_dtype == DType::f32 ? 4 : 2) % 16 == 0 &&
                reinterpret_cast<uintptr_t>(a.x) % 16 == 0;
  p.row_tiles = static_cast<int>(row_tiles), p.col_tiles = static_cast<int>(col_tiles);
  p.last_rows = last_of(a.rows), p.last_cols = last_of(a.cols);
  p.group_bits = group_bits;
  if ((p.row.packed && !p.row.vectors) || (p.col.packed && !p.col.vectors))
    return Status::bad_argument;
  return Status::ok;
}

namespace {

// ok, or what is wrong with the scales that are asked for.
Status check_scales(const QuantizeOut& to) {
  if (!is_blockwise(to.scaling)) return check_mx(to.element, to.scaling, to.rule);
  if (!known(to.element) || !known(to.rule) || !(to.amax_epsilon >= 0.0f) ||
      to.amax_epsilon > FLT_MAX) {
    return Status::bad_argument;
  }
  return is_fp8(to.element) && is_f32_rule(to.rule) ? Status::ok : Status::unsupported;
}

Status launch(const QuantizeTask& a, Start start) {
  if (a.rows == 0 || a.cols == 0) return Status::ok;
  if (start == Start::early) {
    const Status few = quantize_few_rows(a);
    if (few != Status::unsupported) return few;
  }
  QuantizeParams p;
  Status status = quantize_params(a, p);
  if (status != Status::ok) return status;
  const auto stream = static_cast<cudaStream_t>(a.stream);
  const dim3 grid = tile_grid(p, p.col_tiles);
  const int64_t tiles = static_cast<int64_t>(p.row_tiles) * p.col_tiles;
  status = launch_quantize(p, row_tiles_of(a.x), grid, tiles, stream, start);
  if (status != Status::ok || a.col_sum == nullptr) return status;
  return launch_sums(a.col_sum_ws, a.col_sum, a.col_sum_dtype, p.row_tiles, a.cols, stream);
}

Status launch(const QuantizeTask& a, const QuantizeOut& to, Start start) {
  return is_blockwise(to.scaling) ? quantize_factors(a, to, start) : launch(a, start);
}

// Whether a call is to fill memory with zeros, for kernels after it, and how much.
int64_t words_of(const Execution& e) { return e.workspace == nullptr ? 0 : e.workspace_bytes / 4; }

Status fill_zeros(const Execution& e) {
  const int64_t words = words_of(e);
  if (words == 0) return Status::ok;
  return started(cudaMemsetAsync(e.workspace, 0, static_cast<size_t>(4 * words),
                                 static_cast<cudaStream_t>(e.stream)));
}

// The layout of aligned columns where packed ones have this layout.
Layout aligned_of(Layout packed) {
  return packed == Layout::group_k ? Layout::aligned_group_k : Layout::aligned_tiles;
}

}  // namespace

Status make_task(QuantizeTask& task, const Matrix& x, const QuantizeOut& to, void* stream,
                 Layout row_tiles, Layout col_tiles) {
  const Status status = check_scales(to);
  if (status != Status::ok) return status;
  if (!known(x.dtype) || !known(to.col_sum_dtype) || x.rows < 0 || x.cols < 0)
    return Status::bad_argument;
  if (x.col_stride != 1 || !rounds_plainly(to)) return Status::unsupported;
  task = {};
  task.x = x.data, task.rows = x.rows, task.cols = x.cols, task.x_stride = x.row_stride;
  task.x_dtype = x.dtype, task.element = to.element, task.rule = to.rule;
  task.spread = to.spread, task.stream = stream;
  if (to.row.layout == row_tiles) {
    task.row_packed = packed(to.row);
  } else if (to.row.layout == Layout::k_last) {
    task.row_codes = to.row.codes, task.row_scales = static_cast<uint8_t*>(to.row.scales);
  } else if (to.row.codes != nullptr) {
    return Status::unsupported;
  }
  // NOTE: who aligns columns does so for blocks of 1 x 128, and asks for it by the layout.
  const bool aligned = is_blockwise(to.scaling) && to.col.layout == aligned_of(col_tiles);
  if (to.col.layout == col_tiles || aligned) {
    task.col_packed = packed(to.col);
  } else if (to.col.layout == Layout::k_last || to.col.layout == Layout::k_first) {
    task.col_codes = to.col.codes, task.col_scales = static_cast<uint8_t*>(to.col.scales);
    task.col_lies_as_x = to.col.layout == Layout::k_first;
  } else if (to.col.codes != nullptr) {
    return Status::unsupported;
  }
  task.col_sum = to.col_sum, task.col_sum_dtype = to.col_sum_dtype;
  task.col_sum_ws = to.col_sum_ws;
  return Status::ok;
}

QuantizeOut plainly(const QuantizeOut& to) {
  QuantizeOut plain = to;
  plain.seed = nullptr, plain.row.hadamard = plain.col.hadamard = 0;
  return plain;
}

Status quantize(const QuantizeArgs& args) {
  QuantizeTask task;
  const Status status = make_task(task, args.x, plainly(args.to), args.execution.stream);
  if (status != Status::ok) return status;
  if (const int64_t words = words_of(args.execution); words != 0) {
    if (rounds_plainly(args.to) && !is_blockwise(args.to.scaling)) {
      const Status quantized =
          quantize_at_once(task, nullptr, static_cast<uint32_t*>(args.execution.workspace), words);
      if (quantized != Status::unsupported) return quantized;
    }
    const Status zeros = fill_zeros(args.execution);
    if (zeros != Status::ok) return zeros;
  }
  if (!rounds_plainly(args.to)) {
    return is_blockwise(args.to.scaling) ? Status::unsupported : quantize_randomly(task, args.to);
  }
  return launch(task, args.to, Start::early);
}

Status quantize_two(const QuantizeArgs& first, const QuantizeArgs& second) {
  if (first.to.col_sum != nullptr || first.execution.stream != second.execution.stream)
    return Status::bad_argument;
  if (first.x.rows == 0 || first.x.cols == 0) return quantize(second);
  QuantizeTask one, two;
  Status status = make_task(one, first.x, first.to, first.execution.stream);
  if (status == Status::ok) status = make_task(two, second.x, second.to, second.execution.stream);
  if (status != Status::ok) return status;
  const Execution& e = second.execution;
  if (!is_blockwise(first.to.scaling) && !is_blockwise(second.to.scaling)) {
    status = quantize_at_once(one, &two, static_cast<uint32_t*>(e.workspace), words_of(e));
    if (status != Status::unsupported) return status;
  }
  status = fill_zeros(e);
  // NOTE: what ran before is over when the first starts, so the second need not wait for it.
  if (status == Status::ok) status = launch(one, first.to, Start::after);
  return status == Status::ok ? launch(two, second.to, Start::beside) : status;
}

}  // namespace te_mx::sm90
