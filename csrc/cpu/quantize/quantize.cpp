// quantize(): checks, the loop over tiles and the column sums. Tiles that stick out of the tensor,
// or whose elements are not adjacent, pass through a copy padded with zeros, which change no
// maximum.
#include "quantize/quantize.hpp"

#include <algorithm>
#include <cstring>

#include "common/check.h"
#include "common/copy.h"
#include "common/isa.h"
#include "common/parallel.h"
#include "common/room.h"
#include "common/sizes.h"
#include "mxtile/mx/float_mode.hpp"
#include "quantize/blockwise.hpp"
#include "quantize/nvfp4.hpp"
#include "quantize/quantize_task.h"
#include "te_mx/cpu.h"

namespace te_mx::cpu {

quantize_tile::Kernel quantize_tile::find(DType dtype, Element element, bool rows,
                                          Columns columns) {
  const Isa isa = isa_native();
#if defined(TE_MX_HAVE_AVX512_BF16)
  if (isa >= Isa::avx512_bf16) return find_avx512_vbmi(dtype, element, rows, columns);
#endif
#if defined(TE_MX_HAVE_AVX512)
  if (isa >= Isa::avx512) return find_avx512(dtype, element, rows, columns);
#endif
#if defined(TE_MX_HAVE_AVX2)
  if (isa >= Isa::avx2) return find_avx2(dtype, element, rows, columns);
#endif
  (void)isa;
  return find_portable(dtype, element, rows, columns);
}

quantize_tile::NarrowKernel quantize_tile::find_narrow(DType dtype, Element element) {
  [[maybe_unused]] const Isa isa = isa_native();
#if defined(TE_MX_HAVE_AVX512_BF16)
  if (isa >= Isa::avx512_bf16) return find_narrow_avx512_vbmi(dtype, element);
#endif
#if defined(TE_MX_HAVE_AVX512)
  if (isa >= Isa::avx512) return find_narrow_avx512(dtype, element);
#endif
  (void)dtype, (void)element;
  return nullptr;
}

quantize_tile::Kernel quantize_tile::find_random(Element element) {
  const Isa isa = isa_native();
#if defined(TE_MX_HAVE_AVX512)
  if (isa >= Isa::avx512) return find_random_avx512(element);
#endif
#if defined(TE_MX_HAVE_AVX2)
  if (isa >= Isa::avx2) return find_random_avx2(element);
#endif
  (void)isa;
  return find_random_portable(element);
}

namespace {

using quantize_tile::code_bytes;
using quantize_tile::Columns;
using quantize_tile::Kernel;
using quantize_tile::kTile;
using quantize_tile::kTileCols;
using quantize_tile::Tile;

constexpr int64_t kItemRows = 128;
constexpr int64_t kItemCols = 1024;
constexpr int64_t kStreamItemCols = 4096;  // memory likes long runs, caches like short ones
constexpr int64_t kTransposedItem = 512;   // transposed columns make runs both ways
constexpr int64_t kFlatItem = 64 * 1024;
constexpr int64_t kSerialElements = 64 * 1024;  // below, waking threads costs more than they save

struct Problem {
  QuantizeTask a;
  Kernel kernel;
  int64_t element_bytes;
  bool stream;
  int64_t item_rows;
  int64_t item_cols;
  int64_t tile_rows;
  int64_t tile_cols;
  bool is_special;
  quantize_tile::Special special;

  // Whether a kernel reads and writes so many rows where they lie, fewer than a tile has.
  bool few_in_place(int64_t rows) const {
    return rows % 2 == 0 && a.col_stride == 1 && !is_special && tile_rows < kTile;
  }
};

struct alignas(64) Staging {
  uint8_t x[kTile * kTile * 4];
  uint8_t row_codes[kTile * kTile];
  uint8_t row_scales[kTile * 2];
  uint8_t col_codes[kTile * kTile];
  uint8_t col_scales[kTile * 2];
};

// rows x cols elements into a tile of `of` rows, which are kTile apart.
template <class T>
void gather(const Problem& p, int64_t r0, int64_t c0, int rows, int cols, int of, T* out) {
  const int zeros = cols < kTile ? 0 : rows;  // from this row on
  std::memset(out + zeros * kTile, 0, sizeof(T) * static_cast<size_t>((of - zeros) * kTile));
  const T* x = static_cast<const T*>(p.a.x) + r0 * p.a.row_stride + c0 * p.a.col_stride;
  if (p.a.col_stride == 1) {
    for (int r = 0; r < rows; ++r) {
      const T* from = x + r * p.a.row_stride;
      copy_few(reinterpret_cast<uint8_t*>(out + r * kTile), reinterpret_cast<const uint8_t*>(from),
               static_cast<int64_t>(sizeof(T)) * cols);
    }
  } else if (p.a.row_stride == 1) {
    for (int c = 0; c < cols; ++c) {
      for (int r = 0; r < rows; ++r) out[r * kTile + c] = x[c * p.a.col_stride + r];
    }
  } else {
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < cols; ++c) {
        out[r * kTile + c] = x[r * p.a.row_stride + c * p.a.col_stride];
      }
    }
  }
}

void copy_2d(uint8_t* to, int64_t to_stride, const uint8_t* from, int64_t from_stride, int64_t rows,
             int64_t bytes) {
  for (int64_t r = 0; r < rows; ++r) {
    copy_few(to + r * to_stride, from + r * from_stride, bytes);
  }
}

// Where the tile at (r0, c0) goes.
Tile tile_in_place(const Problem& p, int64_t r0, int64_t c0) {
  const QuantizeTask& a = p.a;
  const int64_t row_blocks = ceil_div(a.cols, kBlock);
  const int64_t col_blocks = ceil_div(a.rows, kBlock);
  Tile t{};
  t.rule = static_cast<mxtile::mx::Rule>(a.rule);
  t.stream = p.stream;
  t.special = p.is_special ? &p.special : nullptr;
  t.row0 = r0;
  t.col0 = c0;
  if (a.row_codes) {
    t.row_code_stride = code_bytes(a.element, a.cols);
    t.row_codes = a.row_codes + r0 * t.row_code_stride + code_bytes(a.element, c0);
    t.row_scales = a.row_scales + r0 * row_blocks + c0 / kBlock;
    t.row_scale_stride = row_blocks;
  }
  if (a.col_codes && a.col_transposed) {
    t.col_code_stride = code_bytes(a.element, a.rows);
    t.col_codes = a.col_codes + c0 * t.col_code_stride + code_bytes(a.element, r0);
    t.col_scales = a.col_scales + c0 * col_blocks + r0 / kBlock;
    t.col_scale_stride = col_blocks;
  } else if (a.col_codes) {
    t.col_codes = a.col_codes + r0 * a.cols + c0;
    t.col_code_stride = a.cols;
    t.col_scales = a.col_scales + r0 / kBlock * a.cols + c0;
    t.col_scale_stride = a.cols;
  }
  return t;
}

const uint8_t* address(const Problem& p, int64_t r, int64_t c) {
  return static_cast<const uint8_t*>(p.a.x) +
         (r * p.a.row_stride + c * p.a.col_stride) * p.element_bytes;
}

// rows x cols elements at (r0, c0): no more than a tile has, and unless whole at most kTile
// columns.
struct Area {
  int64_t r0, c0;
  int rows, cols;
};

void run_tile(const Problem& p, Area area, bool last, const uint8_t* next, float* sums) {
  const QuantizeTask& a = p.a;
  const auto [r0, c0, rows, cols] = area;
  const bool whole = rows == p.tile_rows && cols % kTile == 0;
  const Tile place = tile_in_place(p, r0, c0);
  Tile t = place;
  t.rows = static_cast<int>(p.tile_rows);
  t.cols = whole ? cols : kTile;
  t.last = last;
  t.col_sum = sums;
  const bool few = rows < p.tile_rows && cols % kTile == 0 && p.few_in_place(rows);
  if (few) t.cols = cols, t.filled = rows;
  if (few || (whole && a.col_stride == 1)) {
    t.x = address(p, r0, c0);
    t.row_stride = a.row_stride;
    t.next = next;
    t.next_row_bytes = a.row_stride * p.element_bytes;
    return p.kernel(t);
  }
  const InRoom<Staging> in_room;
  Staging& staging = *in_room;
  const int of = rows <= kBlock ? kBlock : kTile;
  if (p.element_bytes == 4) {
    gather(p, r0, c0, rows, cols, of, reinterpret_cast<uint32_t*>(staging.x));
  } else {
    gather(p, r0, c0, rows, cols, of, reinterpret_cast<uint16_t*>(staging.x));
  }
  t.x = t.next = staging.x;
  t.row_stride = kTile;
  if (whole) return p.kernel(t);

  if (rows <= kBlock) t.rows = kBlock;
  t.filled = rows;
  t.stream = false;
  t.row_codes = staging.row_codes;
  t.row_scales = staging.row_scales;
  t.col_codes = staging.col_codes;
  t.col_scales = staging.col_scales;
  t.row_code_stride = t.col_code_stride = kTile;
  t.row_scale_stride = 2;
  t.col_scale_stride = a.col_transposed ? 2 : kTile;
  p.kernel(t);
  const int64_t row_blocks = ceil_div(cols, kBlock);
  const int64_t col_blocks = ceil_div(rows, kBlock);
  if (a.row_codes) {
    copy_2d(place.row_codes, place.row_code_stride, t.row_codes, kTile, rows,
            code_bytes(a.element, cols));
    copy_2d(place.row_scales, place.row_scale_stride, t.row_scales, 2, rows, row_blocks);
  }
  if (a.col_codes && a.col_transposed) {
    copy_2d(place.col_codes, place.col_code_stride, t.col_codes, kTile, cols,
            code_bytes(a.element, rows));
    copy_2d(place.col_scales, place.col_scale_stride, t.col_scales, 2, cols, col_blocks);
  } else if (a.col_codes) {
    copy_2d(place.col_codes, place.col_code_stride, t.col_codes, kTile, rows, cols);
    copy_2d(place.col_scales, place.col_scale_stride, t.col_scales, kTile, col_blocks, cols);
  }
}

void run_item(const Problem& p, int64_t item) {
  const mxtile::mx::KeepDenormals keep_denormals;
  const QuantizeTask& a = p.a;
  const int64_t chunks = ceil_div(a.cols, p.item_cols);
  const int64_t group = item / chunks;
  const int64_t c_begin = item % chunks * p.item_cols;
  const int64_t c_end = std::min(a.cols, c_begin + p.item_cols);
  const int64_t r_begin = group * p.item_rows;
  const int64_t r_end = std::min(a.rows, r_begin + p.item_rows);
  float sums[kStreamItemCols];
  if (a.col_sum) std::fill(sums, sums + (c_end - c_begin), 0.0f);
  for (int64_t r = r_begin; r < r_end; r += p.tile_rows) {
    const int64_t rows = std::min(p.tile_rows, r_end - r);
    for (int64_t c = c_begin, cols; c < c_end; c += cols) {
      cols = std::min(p.tile_cols, c_end - c);
      if (rows < p.tile_rows && !p.few_in_place(rows)) cols = std::min<int64_t>(cols, kTile);
      if (cols > kTile) cols -= cols % kTile;
      const bool row_ends = c + cols >= c_end;
      const int64_t next_r = row_ends ? r + p.tile_rows : r;
      const int64_t next_c = row_ends ? c_begin : c + cols;
      const bool last = next_r >= r_end;
      const bool readable = next_r + p.tile_rows <= r_end && next_c + cols <= c_end;
      const uint8_t* next = readable ? address(p, next_r, next_c) : address(p, r, c);
      run_tile(p, {r, c, static_cast<int>(rows), static_cast<int>(cols)}, last, next,
               a.col_sum ? sums + (c - c_begin) : nullptr);
    }
  }
  if (a.col_sum) {
    std::memcpy(a.col_sum_ws + group * a.cols + c_begin, sums,
                sizeof(float) * static_cast<size_t>(c_end - c_begin));
  }
}

void add_partial_sums(const QuantizeTask& a) {
  const mxtile::mx::KeepDenormals keep_denormals;
  const int64_t groups = ceil_div(a.rows, kColSumRows);
  std::fill(a.col_sum, a.col_sum + a.cols, 0.0f);
  for (int64_t g = 0; g < groups; ++g) {
    const float* partial = a.col_sum_ws + g * a.cols;
    for (int64_t c = 0; c < a.cols; ++c) a.col_sum[c] += partial[c];
  }
}

void run_problem(const Problem& p) {
  const int64_t items = ceil_div(p.a.rows, p.item_rows) * ceil_div(p.a.cols, p.item_cols);
  const int threads = p.a.rows * p.a.cols < kSerialElements ? 1 : p.a.threads;
  parallel_for(threads, items, [&p](int64_t item) { run_item(p, item); });
}

// Rows of one block that follow each other, 32 at a time.
void run_narrow(const Problem& p, quantize_tile::NarrowKernel kernel) {
  constexpr int64_t kItemGroups = 64;
  const QuantizeTask& a = p.a;
  const quantize_tile::NarrowOrder order(a.cols);
  const int64_t groups = ceil_div(a.rows, kBlock);
  const int threads = a.rows * a.cols < kSerialElements ? 1 : a.threads;
  parallel_for(threads, ceil_div(groups, kItemGroups), [&](int64_t item) {
    const mxtile::mx::KeepDenormals keep_denormals;
    const int64_t end = std::min(groups, (item + 1) * kItemGroups);
    for (int64_t g = item * kItemGroups; g < end; ++g) {
      const int64_t r = g * kBlock, rows = std::min<int64_t>(kBlock, a.rows - r);
      if (rows == kBlock) {
        const Tile t = tile_in_place(p, r, 0);
        if (kernel({address(p, r, 0), static_cast<int>(a.cols), t.rule, &order, t.row_codes,
                    t.row_scales, t.col_codes, t.col_scales}))
          continue;
      }
      const Area area{r, 0, static_cast<int>(rows), static_cast<int>(a.cols)};
      run_tile(p, area, true, address(p, r, 0), nullptr);
    }
  });
}

// The kernel that takes the whole of a matrix of few columns, or null.
quantize_tile::NarrowKernel narrow_kernel(const Problem& p) {
  const QuantizeTask& a = p.a;
  const bool compact = a.col_stride == 1 && a.row_stride == a.cols;
  const bool whole_bytes = !is_fp4(a.element) || !a.row_codes || a.cols % 2 == 0;
  constexpr int64_t kLeastRows = 256;  // fewer are not worth an order
  if (a.cols > kBlock || a.rows < kLeastRows || !compact || !whole_bytes || a.col_sum ||
      p.is_special || (a.col_codes && a.col_transposed))
    return nullptr;
  return quantize_tile::find_narrow(a.x_dtype, a.element);
}

Columns columns_of(const QuantizeTask& a) {
  if (!a.col_codes) return Columns::none;
  return a.col_transposed ? Columns::transposed : Columns::plain;
}

bool aligned(const void* pointer, int64_t stride) {
  return reinterpret_cast<uintptr_t>(pointer) % 64 == 0 && stride % 64 == 0;
}

bool wants_stream(const QuantizeTask& a) {
  const int64_t directions = (a.row_codes != nullptr) + (a.col_codes != nullptr);
  // Stores that bypass the caches save reading what they overwrite, but only pay when the result
  // would not stay in a cache anyway.
  if (std::max(a.rows * a.cols * directions, a.together) < kPastCaches) return false;
  // Codes two a byte are half lines, which pass through the caches.
  const bool packs = is_fp4(a.element);
  return (!a.row_codes || packs || aligned(a.row_codes, a.cols)) &&
         (!a.col_codes || (packs && a.col_transposed) ||
          aligned(a.col_codes, a.col_transposed ? a.rows : a.cols));
}

bool valid(const QuantizeTask& a) {
  if (a.rows < 0 || a.cols < 0 || !known(a.x_dtype)) return false;
  if (a.rows == 0 || a.cols == 0) return true;
  return a.x && !a.row_codes == !a.row_scales && !a.col_codes == !a.col_scales &&
         (!a.col_sum || a.col_sum_ws);
}

}  // namespace

QuantizeTask task_of(const QuantizeArgs& args) {
  const auto& [x, to, execution] = args;
  return {x.data,
          x.rows,
          x.cols,
          x.row_stride,
          x.col_stride,
          x.dtype,
          to.element,
          to.rule,
          to.row.codes,
          static_cast<uint8_t*>(to.row.scales),
          to.col.codes,
          static_cast<uint8_t*>(to.col.scales),
          to.col.layout == Layout::k_last,
          static_cast<float*>(to.col_sum),
          to.col_sum_ws,
          execution.threads,
          0,
          {to.row.hadamard, static_cast<uint32_t>(to.row.signs)},
          {to.col.hadamard, static_cast<uint32_t>(to.col.signs)},
          to.seed,
          to.first};
}

Status quantize(const QuantizeArgs& args) {
  if (is_blockwise(args.to.scaling)) return quantize_blockwise(args);
  if (is_nvfp4(args.to.scaling)) return quantize_nvfp4(args);
  const Status status = check_out(args.to);
  return status == Status::ok ? quantize_task(task_of(args)) : status;
}

Status quantize_task(const QuantizeTask& args) {
  if (!valid(args)) return Status::bad_argument;
  if (args.rows == 0 && args.col_sum) std::fill(args.col_sum, args.col_sum + args.cols, 0.0f);
  if (args.rows == 0 || args.cols == 0) return Status::ok;
  if (!args.row_codes && !args.col_codes && !args.col_sum) return Status::ok;

  Problem p{};
  p.a = args;
  p.is_special = args.seed != nullptr || (args.row_codes && args.row_hadamard.size != 0) ||
                 (args.col_codes && args.col_hadamard.size != 0);
  const Columns columns = columns_of(args);
  if (p.is_special) {
    const bool seeded = args.seed != nullptr;
    p.special = {args.x_dtype,     columns == Columns::transposed,
                 seeded,           seeded ? static_cast<uint64_t>(*args.seed) : 0,
                 args.first,       args.rows,
                 args.cols,        args.row_hadamard,
                 args.col_hadamard};
    p.kernel = quantize_tile::find_random(args.element);
  } else {
    p.kernel = quantize_tile::find(args.x_dtype, args.element, args.row_codes != nullptr, columns);
  }
  p.element_bytes = args.x_dtype == DType::f32 ? 4 : 2;
  p.stream = !p.is_special && wants_stream(args);
  p.item_rows = args.col_sum ? kColSumRows : kItemRows;
  p.item_cols = p.stream ? kStreamItemCols : kItemCols;
  if (p.stream && args.col_transposed && args.col_codes) {
    if (!args.col_sum) p.item_rows = kTransposedItem;
    p.item_cols = kTransposedItem;
  }
  p.tile_rows = quantize_tile::tile_rows(columns);
  QuantizeTask& a = p.a;
  if (a.cols == 1) a.col_stride = 1;
  if (a.rows == 1) a.row_stride = a.cols;
  p.tile_cols = a.col_stride == 1 && p.tile_rows < kTile ? kTileCols : kTile;
  if (const auto narrow = narrow_kernel(p)) {
    run_narrow(p, narrow);
    return Status::ok;
  }
  const bool compact = a.col_stride == 1 && a.row_stride == a.cols;
  if (compact && !p.is_special && !a.col_codes && !a.col_sum && a.cols % kBlock == 0) {
    // Blocks of a compact tensor follow each other: any number of rows fills whole tiles, and
    // memory is read in order.
    const int64_t total = a.rows * a.cols;
    const int64_t width = total % kTileCols == 0 ? kTileCols : kTile;
    const int64_t whole = total / width * width;
    p.item_rows = kFlatItem / width;
    a.rows = total / width;
    a.cols = a.row_stride = width;
    if (a.rows > 0) run_problem(p);
    if (total > whole) {
      a.x = static_cast<const uint8_t*>(args.x) + whole * p.element_bytes;
      a.row_codes += code_bytes(a.element, whole);
      a.row_scales += whole / kBlock;
      a.rows = 1;
      a.cols = a.row_stride = kBlock;
      run_problem(p);
    }
    return Status::ok;
  }
  // Sums of one group of rows are whole: they begin with 0, as add_partial_sums() does.
  const bool partial = a.col_sum && a.rows > kColSumRows;
  if (!partial) a.col_sum_ws = a.col_sum;
  run_problem(p);
  if (partial) add_partial_sums(a);
  return Status::ok;
}

}  // namespace te_mx::cpu
