// What the kernels that read plain operands are told, and how it follows from a call.
#pragma once

#include "quantize/quantize_task.h"

namespace te_mx::sm90 {

struct PackTask {
  // [rows, k], two a byte in FP4, or [k, rows] when k_first; compact
  const uint8_t* codes;
  const uint8_t* scales;  // [rows, ceil(k/32)], or [ceil(k/32), rows]; compact
  int64_t rows, k;
  bool k_first;
  Element element;
  int spread;
  Packed out;
  void* stream;
};

struct DequantizeTask {
  const uint8_t* codes;   // [rows, cols] compact; in FP4 two a byte without blocks_along_rows
  const uint8_t* scales;  // [rows, ceil(cols/32)], or [ceil(rows/32), cols] when blocks_along_rows
  int64_t rows, cols;
  bool blocks_along_rows;
  Element element;
  DType out_dtype;
  void* out;  // [rows, cols] compact
  void* stream;
};

struct RowSumsTask {
  const uint8_t* codes;   // [rows, k], or [k, rows] when k_first; compact
  const uint8_t* scales;  // [rows, ceil(k/32)], or [ceil(k/32), rows]; compact
  int64_t rows, k;
  bool k_first;
  Element element;
  float* out;        // [rows]
  float* workspace;  // row_sums_workspace_bytes(rows, k, k_first)
  void* stream;
};

// That of operands with fp32 scales.
Status dequantize_factors(const DequantizeArgs& args);

// ok, or what is wrong with a plain operand.
inline Status check_plain(const Operand& o) {
  if (o.layout != Layout::k_last && o.layout != Layout::k_first) return Status::unsupported;
  const Status status = check_mx(o.element, o.scaling);
  return status == Status::ok && (o.rows < 0 || o.k < 0) ? Status::bad_argument : status;
}

inline PackTask task_of(const PackArgs& a) {
  const Operand& o = a.operand;
  return {o.codes,
          static_cast<const uint8_t*>(o.scales),
          o.rows,
          o.k,
          o.layout == Layout::k_first,
          o.element,
          a.spread,
          packed(a.out),
          a.execution.stream};
}

inline DequantizeTask task_of(const DequantizeArgs& a) {
  const Operand& o = a.operand;
  const bool down = o.layout == Layout::k_first;
  return {o.codes,
          static_cast<const uint8_t*>(o.scales),
          down ? o.k : o.rows,
          down ? o.rows : o.k,
          down,
          o.element,
          a.out_dtype,
          a.out,
          a.execution.stream};
}

inline RowSumsTask task_of(const RowSumsArgs& a) {
  const Operand& o = a.operand;
  return {o.codes,
          static_cast<const uint8_t*>(o.scales),
          o.rows,
          o.k,
          o.layout == Layout::k_first,
          o.element,
          a.out,
          static_cast<float*>(a.execution.workspace),
          a.execution.stream};
}

}  // namespace te_mx::sm90
