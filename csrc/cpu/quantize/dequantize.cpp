// dequantize(): checks and the loop over runs of MX blocks.
#include "quantize/dequantize.hpp"

#include <algorithm>
#include <utility>

#include "common/check.h"
#include "common/isa.h"
#include "common/parallel.h"
#include "common/sizes.h"
#include "quantize/dequantize_blockwise.hpp"
#include "quantize/nvfp4.hpp"
#include "te_mx/cpu.h"

namespace te_mx::cpu {
namespace {

using dequantize_run::Kernel;
using dequantize_run::Run;

constexpr int64_t kItemElements = 16 * 1024;
constexpr int64_t kItemCols = 2048;
constexpr int64_t kSerialElements = 64 * 1024;  // below, waking threads costs more than they save

// The codes as a matrix, from whichever order they have.
struct Codes {
  const uint8_t* codes;   // [rows, cols] compact
  const uint8_t* scales;  // [rows, ceil(cols/32)], or [ceil(rows/32), cols] when blocks_along_rows
  int64_t rows, cols;
  bool blocks_along_rows;
  bool packs;  // codes lie two a byte, rows of them in whole bytes
  Element element;
  DType out_dtype;
  void* out;  // [rows, cols] compact
  int threads;

  explicit Codes(const DequantizeArgs& args)
      : codes(args.operand.codes),
        scales(static_cast<const uint8_t*>(args.operand.scales)),
        rows(args.operand.rows),
        cols(args.operand.k),
        blocks_along_rows(args.operand.layout == Layout::k_first),
        packs(is_fp4(args.operand.element) && !blocks_along_rows),
        element(args.operand.element),
        out_dtype(args.out_dtype),
        out(args.out),
        threads(args.execution.threads) {
    if (blocks_along_rows) std::swap(rows, cols);
  }
};

struct Problem {
  Codes a;
  Kernel kernel;
  int64_t element_bytes;
  int64_t item_rows, item_cols;
};

void run_item(const Problem& p, int64_t item) {
  const Codes& a = p.a;
  const int64_t chunks = ceil_div(a.cols, p.item_cols);
  const int64_t c = item % chunks * p.item_cols;
  const int64_t n = std::min(p.item_cols, a.cols - c);
  const int64_t r_begin = item / chunks * p.item_rows;
  const int64_t r_end = std::min(a.rows, r_begin + p.item_rows);
  for (int64_t r = r_begin; r < r_end; ++r) {
    const uint8_t* scales = a.blocks_along_rows
                                ? a.scales + r / kBlock * a.cols + c
                                : a.scales + r * ceil_div(a.cols, kBlock) + c / kBlock;
    const uint8_t* codes =
        a.packs ? a.codes + r * ceil_div(a.cols, 2) + c / 2 : a.codes + r * a.cols + c;
    p.kernel(Run{codes, scales, a.blocks_along_rows, n,
                 static_cast<uint8_t*>(a.out) + (r * a.cols + c) * p.element_bytes});
  }
}

Kernel find_kernel(const Codes& a) {
#if defined(TE_MX_HAVE_AVX512)
  if (isa_native() >= Isa::avx512) return dequantize_run::find_avx512(a.out_dtype, a.element);
#endif
  return dequantize_run::find_portable(a.out_dtype, a.element);
}

bool valid(const Codes& a) {
  if (a.rows < 0 || a.cols < 0 || !known(a.out_dtype)) return false;
  return a.rows == 0 || a.cols == 0 || (a.codes && a.scales && a.out);
}

}  // namespace

Status dequantize(const DequantizeArgs& args) {
  if (args.operand.scaling.type == ScaleType::f32) return dequantize_blockwise(args);
  if (is_nvfp4(args.operand.scaling)) return dequantize_nvfp4(args);
  const Status status = check_operand(args.operand);
  if (status != Status::ok) return status;
  const Codes all(args);
  if (!valid(all)) return Status::bad_argument;
  if (all.rows == 0 || all.cols == 0) return Status::ok;
  Problem p{all, find_kernel(all), all.out_dtype == DType::f32 ? 4 : 2, 1, kItemCols};
  Codes& a = p.a;
  const int threads = a.rows * a.cols < kSerialElements ? 1 : a.threads;
  if (!a.blocks_along_rows && a.cols % kBlock == 0) {
    // Blocks follow each other, so rows need not end anywhere.
    a.cols *= a.rows;
    a.rows = 1;
    p.item_cols = kItemElements;
  }
  p.item_rows = std::max<int64_t>(1, kItemElements / std::min(a.cols, p.item_cols));
  const int64_t items = ceil_div(a.rows, p.item_rows) * ceil_div(a.cols, p.item_cols);
  parallel_for(threads, items, [&p](int64_t item) { run_item(p, item); });
  return Status::ok;
}

}  // namespace te_mx::cpu
