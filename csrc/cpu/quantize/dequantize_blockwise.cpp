// dequantize() of fp32 scales: checks and the loop over runs.
#include "quantize/dequantize_blockwise.hpp"

#include <algorithm>
#include <utility>

#include "common/check.h"
#include "common/groups.h"
#include "common/isa.h"
#include "common/parallel.h"
#include "common/sizes.h"
#include "mxtile/mx/float_mode.hpp"

namespace te_mx::cpu {
namespace {

using dequantize_wide::Run;
using dequantize_wide::RunKernel;

constexpr int64_t kItemElements = 16 * 1024;
constexpr int64_t kItemCols = 2048;
constexpr int64_t kSerialElements = 64 * 1024;  // below, waking threads costs more than they save
static_assert(kItemCols % kWideBlock == 0);

RunKernel find_kernel(DType dtype, Element element) {
  const Isa isa = isa_native();
#if defined(TE_MX_HAVE_AVX512)
  if (isa >= Isa::avx512) return dequantize_wide::find_avx512(dtype, element);
#endif
#if defined(TE_MX_HAVE_AVX2)
  if (isa >= Isa::avx2) return dequantize_wide::find_avx2(dtype, element);
#endif
  (void)isa;
  return dequantize_wide::find_portable(dtype, element);
}

// The codes as a matrix of adjacent columns, from whichever order they have.
struct Lying {
  int64_t rows, cols, block_rows, block_cols;

  explicit Lying(const Operand& o)
      : rows(o.rows), cols(o.k), block_rows(o.scaling.block_rows), block_cols(o.scaling.block_k) {
    if (o.layout == Layout::k_first) {
      std::swap(rows, cols);
      std::swap(block_rows, block_cols);
    }
  }
};

void run_item(const DequantizeArgs& args, RunKernel kernel, const Lying& m, int64_t r_begin,
              int64_t r_end, int64_t c) {
  const mxtile::mx::KeepDenormals keep_denormals;
  const Operand& o = args.operand;
  const int64_t n = std::min(kItemCols, m.cols - c);
  const int64_t scale_cols = ceil_div(m.cols, m.block_cols);
  for (int64_t r = r_begin; r < r_end; ++r) {
    const int64_t at = r * m.cols + c;
    const float* scales = static_cast<const float*>(o.scales) + r / m.block_rows * scale_cols;
    kernel(Run{o.codes + at, scales + c / m.block_cols, m.block_cols == 1, n,
               static_cast<uint8_t*>(args.out) + at * element_bytes(args.out_dtype)});
  }
}

}  // namespace

Status dequantize_blockwise(const DequantizeArgs& args) {
  const Operand& o = args.operand;
  const Status status = check_wide(o);
  if (status != Status::ok) return status;
  if (o.rows < 0 || o.k < 0 || !known(args.out_dtype)) return Status::bad_argument;
  if (o.rows == 0 || o.k == 0) return Status::ok;
  if (!o.codes || !o.scales || !args.out) return Status::bad_argument;
  const RunKernel kernel = find_kernel(args.out_dtype, o.element);
  const Lying m(o);
  const int threads = m.rows * m.cols < kSerialElements ? 1 : args.execution.threads;
  const int64_t chunks = ceil_div(m.cols, kItemCols);
  const int64_t item_rows = std::max<int64_t>(1, kItemElements / std::min(m.cols, kItemCols));
  parallel_for(threads, ceil_div(m.rows, item_rows) * chunks, [&](int64_t item) {
    const int64_t r = item / chunks * item_rows;
    run_item(args, kernel, m, r, std::min(m.rows, r + item_rows), item % chunks * kItemCols);
  });
  return Status::ok;
}

}  // namespace te_mx::cpu
