// quantize() and dequantize() of NVFP4: checks and the loops over tiles. Quantizing reads a matrix
// twice: its largest magnitudes come first.
#include "quantize/nvfp4.hpp"

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

using nvfp4::kCols;
using nvfp4::kRows;
using nvfp4::Level;
using nvfp4::Tile;

constexpr int64_t kItemRows = 64, kItemCols = 4096;
constexpr int64_t kSerialElements = 64 * 1024;  // below, waking threads costs more than they save
static_assert(kColSumRows % kRows == 0 && kItemRows % kRows == 0 && kItemCols % kCols == 0);

const Level& level() {
  [[maybe_unused]] const Isa isa = isa_native();
#if defined(TE_MX_HAVE_AVX512)
  if (isa >= Isa::avx512) return nvfp4::avx512_level();
#endif
#if defined(TE_MX_HAVE_AVX2)
  if (isa >= Isa::avx2) return nvfp4::avx2_level();
#endif
  return nvfp4::portable_level();
}

Status check_out_nvfp4(const QuantizeOut& out) {
  if (!known(out.element) || !known(out.rule)) return Status::bad_argument;
  if (!is_fp4(out.element) || !is_writer(out.rule)) return Status::unsupported;
  for (const int32_t size : {out.row.hadamard, out.col.hadamard}) {
    if (size != 0 && size != 16 && size != 32) return Status::bad_argument;
    if (size != 0 && out.scaling.block_rows != 1) return Status::unsupported;
  }
  return check_places(out);
}

bool valid(const QuantizeArgs& a) {
  const auto& [x, to, execution] = a;
  if (x.rows < 0 || x.cols < 0 || !known(x.dtype)) return false;
  for (const OperandOut& out : {to.row, to.col}) {
    if (!out.codes != !out.scales || (out.codes && !out.tensor_scale)) return false;
    const bool rows = out.tensor_scales == TensorScale::rows;
    if (out.codes && rows && to.scaling.block_rows != 1) return false;
  }
  return x.rows == 0 || x.cols == 0 || (x.data && (!to.col_sum || to.col_sum_ws));
}

// A matrix, and the largest magnitudes by which it is quantized. These lie where the tensor scales
// will.
struct Problem {
  const QuantizeArgs& a;
  const Level& how;

  static bool each(const OperandOut& out) {
    return out.codes != nullptr && out.tensor_scales == TensorScale::rows;
  }
  static uint32_t* amax(const OperandOut& out) {
    return reinterpret_cast<uint32_t*>(out.tensor_scale);
  }

  Tile tile(int64_t r0, int64_t c0) const {
    const auto& [x, to, execution] = a;
    const bool square = to.scaling.block_rows != 1;
    const int64_t across = ceil_div(x.cols, kSmallBlock), down = ceil_div(x.rows, kSmallBlock);
    Tile t{};
    t.x = static_cast<const char*>(x.data) +
          (r0 * x.row_stride + c0 * x.col_stride) * element_bytes(x.dtype);
    t.row_stride = x.row_stride;
    t.col_stride = x.col_stride;
    t.dtype = x.dtype;
    t.rows = static_cast<int>(std::min<int64_t>(kRows, x.rows - r0));
    t.cols = static_cast<int>(std::min<int64_t>(kCols, x.cols - c0));
    t.square = square;
    t.row_transform = to.row.codes ? to.row.hadamard : 0;
    const int64_t of_rows = to.col.codes ? to.col.hadamard : 0,
                  chunk = std::max(of_rows, int64_t{1});
    const bool whole = r0 / chunk * chunk + of_rows <= x.rows;
    t.col_transform = whole ? static_cast<int>(of_rows) : 0;
    const int64_t there = r0 ^ kRows;
    t.upper = there < r0;
    if (t.col_transform == 2 * kRows) {
      t.other =
          static_cast<const char*>(t.x) + (there - r0) * x.row_stride * element_bytes(x.dtype);
      t.other_signs = static_cast<uint32_t>(to.col.signs) >> (there % 32);
    }
    t.row_signs = static_cast<uint32_t>(to.row.signs);
    t.col_signs = static_cast<uint32_t>(to.col.signs) >> (r0 % 32);
    t.stochastic = to.seed != nullptr;
    if (t.stochastic) t.seed = static_cast<uint64_t>(*to.seed);
    t.row0 = static_cast<uint32_t>(to.first + r0);
    t.col0 = c0;
    t.top = nvfp4::top_of(to.rule);
    t.squares = to.rule >= ScaleRule::te_4over6_mse;
    if (to.row.codes) {
      t.row_amax_stride = each(to.row) ? 1 : 0;
      t.row_amax = amax(to.row) + r0 * t.row_amax_stride;
      t.row_code_stride = ceil_div(x.cols, 2);
      t.row_codes = to.row.codes + r0 * t.row_code_stride + c0 / 2;
      t.row_scale_stride = across;
      t.row_scales = static_cast<uint8_t*>(to.row.scales) +
                     (square ? r0 / kSmallBlock : r0) * across + c0 / kSmallBlock;
    }
    if (to.col.codes) {
      const int64_t c = square ? c0 / kSmallBlock : c0, block = r0 / kSmallBlock;
      uint8_t* scales = static_cast<uint8_t*>(to.col.scales);
      t.col_amax_stride = each(to.col) ? 1 : 0;
      t.col_amax = amax(to.col) + c0 * t.col_amax_stride;
      t.transposed = to.col.layout == Layout::k_last;
      t.col_code_stride = t.transposed ? ceil_div(x.rows, 2) : x.cols;
      t.col_codes =
          to.col.codes + (t.transposed ? c0 * t.col_code_stride + r0 / 2 : r0 * x.cols + c0);
      t.col_scale_stride = t.transposed ? down : 1;
      t.col_scales =
          scales + (t.transposed ? c * down + block : block * (square ? across : x.cols) + c);
    }
    return t;
  }

  // body(r0, c0) for the tiles of each item.
  template <class Body>
  void for_tiles(int64_t item_rows, const Body& body) const {
    const int64_t rows = a.x.rows, cols = a.x.cols, chunks = ceil_div(cols, kItemCols);
    const int threads = rows * cols < kSerialElements ? 1 : a.execution.threads;
    parallel_for(threads, ceil_div(rows, item_rows) * chunks, [&](int64_t item) {
      const mxtile::mx::KeepDenormals keep_denormals;
      const int64_t r = item / chunks * item_rows, c = item % chunks * kItemCols;
      body(r, std::min(rows, r + item_rows), c, std::min(cols, c + kItemCols));
    });
  }

  // What the codes of a direction are of.
  static nvfp4::Of of(const OperandOut& out, nvfp4::Of chunks) {
    return out.hadamard != 0 ? chunks : nvfp4::Of::elements;
  }

  // The largest magnitude of all, to `to`.
  void raise_all(uint32_t* to, nvfp4::Of of) const {
    *to = 0;
    for_tiles(kItemRows, [&](int64_t r_begin, int64_t r_end, int64_t c_begin, int64_t c_end) {
      uint32_t most = 0;
      const bool long_rows = a.x.col_stride == 1 && a.x.dtype != DType::f16;
      const int64_t step = long_rows && of == nvfp4::Of::elements ? kItemCols : kCols;
      for (int64_t r = r_begin; r < r_end; r += kRows) {
        for (int64_t c = c_begin; c < c_end; c += step) {
          Tile t = tile(r, c);
          t.cols = static_cast<int>(std::min(step, c_end - c));
          how.raise(t, of, &most, 0, 0);
        }
      }
      uint32_t seen = __atomic_load_n(to, __ATOMIC_RELAXED);
      while (most > seen && !__atomic_compare_exchange_n(to, &seen, most, true, __ATOMIC_RELAXED,
                                                         __ATOMIC_RELAXED)) {
      }
    });
  }

  // Of every row, or of every column.
  void raise_each(uint32_t* to, bool columns, nvfp4::Of of) const {
    const int64_t n = columns ? a.x.cols : a.x.rows, step = columns ? kCols : kRows;
    const int64_t m = columns ? a.x.rows : a.x.cols, across = columns ? kRows : kCols;
    const int threads = n * m < kSerialElements ? 1 : a.execution.threads;
    parallel_for(threads, ceil_div(n, step), [&](int64_t item) {
      const mxtile::mx::KeepDenormals keep_denormals;
      const int64_t i = item * step;
      std::fill(to + i, to + std::min(n, i + step), 0u);
      for (int64_t j = 0; j < m; j += across) {
        const Tile t = columns ? tile(j, i) : tile(i, j);
        how.raise(t, of, to + i, columns ? 0 : 1, columns ? 1 : 0);
      }
    });
  }

  void raise() const {
    const OperandOut& row = a.to.row;
    const OperandOut& col = a.to.col;
    const nvfp4::Of row_of = of(row, nvfp4::Of::row_chunks);
    const nvfp4::Of col_of = of(col, nvfp4::Of::col_chunks);
    if (each(row)) raise_each(amax(row), false, row_of);
    if (each(col)) raise_each(amax(col), true, col_of);
    const bool row_all = row.codes && !each(row), col_all = col.codes && !each(col);
    if (row_all) raise_all(amax(row), row_of);
    if (col_all && row_all && row_of == col_of) {  // of the elements
      *amax(col) = *amax(row);
    } else if (col_all) {
      raise_all(amax(col), col_of);
    }
  }

  void quantize() const {
    const QuantizeOut& to = a.to;
    const int64_t item_rows = to.col_sum ? kColSumRows : kItemRows;
    for_tiles(item_rows, [&](int64_t r_begin, int64_t r_end, int64_t c_begin, int64_t c_end) {
      float sums[kItemCols] = {};
      for (int64_t r = r_begin; r < r_end; r += kRows) {
        for (int64_t c = c_begin; c < c_end; c += kCols) {
          Tile t = tile(r, c);
          if (to.col_sum) t.col_sum = sums + (c - c_begin);
          how.quantize(t, to.rule);
        }
      }
      if (to.col_sum) {
        std::memcpy(to.col_sum_ws + r_begin / kColSumRows * a.x.cols + c_begin, sums,
                    sizeof(float) * static_cast<size_t>(c_end - c_begin));
      }
    });
  }

  // Magnitudes to tensor scales.
  void finish(const OperandOut& out, int64_t rows) const {
    const mxtile::mx::KeepDenormals keep_denormals;
    for (int64_t r = 0; out.codes != nullptr && r < (each(out) ? rows : 1); ++r) {
      out.tensor_scale[r] = nvfp4::tensor_scale(amax(out)[r], a.to.rule, a.x.dtype);
    }
  }
};

}  // namespace

Status quantize_nvfp4(const QuantizeArgs& args) {
  const Status status = check_out_nvfp4(args.to);
  if (status != Status::ok) return status;
  if (!valid(args)) return Status::bad_argument;
  const auto& [x, to, execution] = args;
  // Its e overflows there.
  if (to.rule == ScaleRule::compressed_tensors && x.dtype == DType::f16) return Status::unsupported;
  const Problem p{args, level()};
  if (x.rows > 0 && x.cols > 0) {
    p.raise();
    p.quantize();
  } else {
    for (const auto& [out, rows] : {std::pair(to.row, x.rows), std::pair(to.col, x.cols)}) {
      if (out.codes) std::fill_n(Problem::amax(out), Problem::each(out) ? rows : 1, 0u);
    }
  }
  p.finish(to.row, x.rows);
  p.finish(to.col, x.cols);
  if (to.col_sum) {
    const mxtile::mx::KeepDenormals keep_denormals;
    float* sum = static_cast<float*>(to.col_sum);
    std::fill(sum, sum + x.cols, 0.0f);
    for (int64_t g = 0; g < ceil_div(x.rows, kColSumRows); ++g) {
      for (int64_t c = 0; c < x.cols; ++c) sum[c] += to.col_sum_ws[g * x.cols + c];
    }
  }
  return Status::ok;
}

Status dequantize_nvfp4(const DequantizeArgs& args) {
  const Operand& o = args.operand;
  const Status status = check_nvfp4(o);
  if (status != Status::ok) return status;
  if (o.rows < 0 || o.k < 0 || !known(args.out_dtype)) return Status::bad_argument;
  if (o.tensor_scales == TensorScale::groups) return Status::unsupported;
  if (o.rows == 0 || o.k == 0) return Status::ok;
  if (!o.codes || !o.scales || !args.out) return Status::bad_argument;
  const bool k_first = o.layout == Layout::k_first, square = o.scaling.block_rows != 1;
  const bool each = o.tensor_scales == TensorScale::rows;
  const int64_t rows = k_first ? o.k : o.rows, cols = k_first ? o.rows : o.k;
  const int64_t down = k_first || square ? kSmallBlock : 1;
  const int64_t across = !k_first || square ? kSmallBlock : 1;
  const int64_t code_stride = k_first ? cols : ceil_div(cols, 2), step = 2048;
  const Level& how = level();
  const int threads = rows * cols < kSerialElements ? 1 : args.execution.threads;
  const int64_t chunks = ceil_div(cols, step);
  const int64_t item_rows = std::max<int64_t>(1, 8 * step / std::min(cols, step));
  parallel_for(threads, ceil_div(rows, item_rows) * chunks, [&](int64_t item) {
    const mxtile::mx::KeepDenormals keep_denormals;
    const int64_t begin = item / chunks * item_rows, c = item % chunks * step;
    for (int64_t r = begin; r < std::min(rows, begin + item_rows); ++r) {
      nvfp4::Run run{};
      run.codes = o.codes + r * code_stride + (k_first ? c : c / 2);
      run.packs = !k_first;
      run.scales =
          static_cast<const uint8_t*>(o.scales) + r / down * ceil_div(cols, across) + c / across;
      run.scale_span = across;
      run.whole = o.tensor_scale + (each ? (k_first ? c : r) : 0);
      run.whole_stride = each && k_first ? 1 : 0;
      run.n = std::min(step, cols - c);
      run.dtype = args.out_dtype;
      run.out = static_cast<char*>(args.out) + (r * cols + c) * element_bytes(args.out_dtype);
      how.decode(run);
    }
  });
  return Status::ok;
}

}  // namespace te_mx::cpu
