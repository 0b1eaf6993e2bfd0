// wide_f64: for operands whose rows span more exponents than packed values can hold. Straight from
// the codes: every product is exact in double, sums are double, one rounding to fp32 before the
// epilogue.
#include <cstring>

#include "common/isa.h"
#include "common/parallel.h"
#include "common/room.h"
#include "gemm/gemm_internal.hpp"
#include "mxtile/mx/code.hpp"

namespace te_mx::cpu {
namespace {

constexpr int64_t kCols = 64;    // of one item; its rows are kRowBlock
constexpr int64_t kChunk = 128;  // of K, decoded at a time

struct Table {
  double value[256];
};

template <class F>
constexpr Table make_table() {
  Table table{};
  for (int code = 0; code < 256; ++code) {
    const uint32_t bits = mxtile::mx::decode<F>(static_cast<uint8_t>(code), 127);
    table.value[code] = static_cast<double>(__builtin_bit_cast(float, bits));
  }
  return table;
}

// By Element.
constexpr Table kTables[kElements] = {make_table<mxtile::mx::E4M3>(),
                                      make_table<mxtile::mx::E5M2>(),
                                      make_table<mxtile::mx::E4M3FNUZ>(),
                                      make_table<mxtile::mx::E5M2FNUZ>(),
                                      {},
                                      {},
                                      make_table<mxtile::mx::E2M1>()};

// 2^(byte - 127), NaN for 255.
double scale_value(uint8_t byte) {
  return byte == 255 ? __builtin_nan("")
                     : __builtin_bit_cast(double, static_cast<int64_t>(byte - 127 + 1023) << 52);
}

// out[r * row_step + k * k_step] = the dequantized element (row0 + r, k0 + k), k0 a multiple of 32.
void decode(const StridedOperand& o, int64_t row0, int64_t rows, int64_t k0, int64_t n, double* out,
            int64_t row_step, int64_t k_step) {
  const double* table = kTables[static_cast<int>(o.element)].value;
  const int64_t block = o.e4m3 ? kSmallBlock : kBlock;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t row = row0 + r;
    double scale = 0;
    for (int64_t k = 0; k < n; ++k) {
      if (k % block == 0 && o.e4m3) {
        const uint8_t byte = *o.small_scale(row, (k0 + k) / kSmallBlock);
        scale = kTables[static_cast<int>(Element::e4m3)].value[byte] *
                static_cast<double>(o.whole[row * o.whole_row_stride]);
      } else if (k % block == 0) {
        scale = scale_value(
            o.scales[row * o.scale_row_stride + (k0 + k) / kBlock * o.scale_block_stride]);
        if (o.factors != nullptr) {
          scale *= static_cast<double>(o.factors[(k0 + k) / kWideBlock * o.factor_stride + row]);
        }
      }
      out[r * row_step + k * k_step] = table[o.code(row, k0 + k)] * scale;
    }
  }
}

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

int64_t panel_bytes(Role, int64_t, int64_t) { return 0; }

struct alignas(64) Buffers {
  double a[kRowBlock][kChunk], b[kChunk][kCols], sum[kRowBlock][kCols];
  float acc[kRowBlock][kCols];
};

Status run(const Range& range, const void*, const void*, const EpilogueContext& given, void*) {
  EpilogueContext context = given;
  context.exact_scale = true;
  const GemmTask& args = *context.args;
  const EpilogueFn epilogue = epilogue_for(isa_native());
  const int64_t row_blocks = ceil_div(range.m1 - range.m0, kRowBlock);
  const int64_t col_blocks = ceil_div(range.n1 - range.n0, kCols);
  parallel_for(args.threads, row_blocks * col_blocks, [&](int64_t item) {
    const int64_t m0 = range.m0 + item % row_blocks * kRowBlock;
    const int64_t n0 = range.n0 + item / row_blocks * kCols;
    const int64_t rows = smaller(range.m1 - m0, kRowBlock), cols = smaller(range.n1 - n0, kCols);
    const InRoom<Buffers> buffers;
    auto& [a, b, sum, acc] = *buffers;
    std::memset(b, 0, sizeof b);
    std::memset(sum, 0, sizeof sum);
    for (int64_t k0 = 0; k0 < args.lhs.k; k0 += kChunk) {
      const int64_t n = smaller(args.lhs.k - k0, kChunk);
      decode(args.lhs, m0, rows, k0, n, a[0], kChunk, 1);
      decode(args.rhs, n0, cols, k0, n, b[0], 1, kCols);
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t k = 0; k < n; ++k) {
          for (int64_t j = 0; j < kCols; ++j) sum[i][j] += a[i][k] * b[k][j];
        }
      }
    }
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < kCols; ++j) acc[i][j] = static_cast<float>(sum[i][j]);
    }
    epilogue(context, acc[0], kCols, m0, n0, static_cast<int>(rows), static_cast<int>(cols));
  });
  return Status::ok;
}

void row_sums(const StridedOperand& lhs, const void*, const float*, float* out, int threads) {
  parallel_for(threads, lhs.rows, [&](int64_t row) {
    double chunk[kChunk], sum = 0;
    for (int64_t k0 = 0; k0 < lhs.k; k0 += kChunk) {
      const int64_t n = smaller(lhs.k - k0, kChunk);
      decode(lhs, row, 1, k0, n, chunk, kChunk, 1);
      for (int64_t k = 0; k < n; ++k) sum += chunk[k];
    }
    out[row] = static_cast<float>(sum);
  });
}

}  // namespace

const KernelImpl* wide_f64_impl() {
  static constexpr KernelImpl kImpl = {panel_bytes, nullptr, nullptr, run, row_sums};
  return &kImpl;
}

}  // namespace te_mx::cpu
