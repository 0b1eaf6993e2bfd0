// What the quantizer's kernels are told of a matrix, and how it follows from a call.
#pragma once

#include "common/formats.h"
#include "te_mx/quantize.h"
#include "te_mx/sm90_layout.h"

namespace te_mx::sm90 {

// An operand in Layout::tiles.
struct Packed {
  uint8_t* codes;    // [rows, packed_ld(k)]
  uint32_t* scales;  // packed_scale_words(rows, k)
};

inline Packed packed(const Operand& o) {
  return {const_cast<uint8_t*>(o.codes),
          static_cast<uint32_t*>(const_cast<void*>(static_cast<const void*>(o.scales)))};
}
inline Packed packed(const OperandOut& o) { return {o.codes, static_cast<uint32_t*>(o.scales)}; }

struct QuantizeTask {
  const void* x;  // [rows, cols], rows x_stride elements apart
  int64_t rows, cols, x_stride;
  DType x_dtype;
  Element element;
  ScaleRule rule;
  uint32_t carry;  // scale_carry(), twice
  // Plain, either may be null: codes [rows, cols] and scales [rows, ceil(cols/32)];
  uint8_t* row_codes;
  uint8_t* row_scales;
  uint8_t* col_codes;  // transposed: codes [cols, rows], scales [cols, ceil(rows/32)]
  uint8_t* col_scales;
  bool col_lies_as_x;  // not transposed: codes [rows, cols], scales [ceil(rows/32), cols]
  // Packed, either may be null (then its plain twin must be null too: a direction has one form)
  Packed row_packed;  // operand [rows, K = cols]
  Packed col_packed;  // operand [cols, K = rows]
  int spread;
  void* col_sum;  // [cols] sum of x over rows, or null
  DType col_sum_dtype;
  float* col_sum_ws;  // [ceil(rows/128), cols], needed with col_sum
  void* stream;
};

// The task of `to` for a matrix x. Rows are k_last or what `row_tiles` says, columns k_last,
// k_first or what `col_tiles` says.
Status make_task(QuantizeTask& task, const Matrix& x, const QuantizeOut& to, void* stream,
                 Layout row_tiles = Layout::tiles, Layout col_tiles = Layout::tiles);

// `to` without what rounds_plainly() does not know, for tasks of quantize_randomly().
QuantizeOut plainly(const QuantizeOut& to);

}  // namespace te_mx::sm90
