// Numbers to codes, codes to numbers, operands from layout to layout: the arguments of every
// device.
#pragma once

#include "te_mx/types.h"

namespace te_mx {

// An operand to write; not wanted without codes. With a Hadamard transform, chunks of so many
// elements of k (16 or 32) are transformed first, with bit k mod 32 of the signs.
struct OperandOut {
  uint8_t* codes = nullptr;
  void* scales = nullptr;
  Layout layout = Layout::k_last;
  int32_t hadamard = 0;           // 0: none
  int64_t signs = 0;              // 32 bits
  float* tensor_scale = nullptr;  // of NVFP4: [1], or one a row
  TensorScale tensor_scales = TensorScale::all;
};

// What to make of a matrix [rows, cols]: directions, and the sums of its columns.
struct QuantizeOut {
  Element element = Element::e4m3;
  Scaling scaling;
  ScaleRule rule = ScaleRule::rceil;
  float amax_epsilon = 0;   // of fp32 scales: what a smaller largest magnitude counts as
  int32_t spread = 0;       // of Layout::tiles
  OperandOut row;           // operand [rows, K = cols]
  OperandOut col;           // operand [cols, K = rows]; k_first lies as the matrix does
  void* col_sum = nullptr;  // [cols] sums over the rows, or null; CPUs sum to fp32 only
  DType col_sum_dtype = DType::f32;
  float* col_sum_ws =
      nullptr;  // partial sums, needed with col_sum: [parts, cols] as the device says
  // Stochastic rounding: int64 [1] in memory of the device, null to round to nearest even; x's
  // first row has number `first`.
  const int64_t* seed = nullptr;
  int64_t first = 0;
};

// Whether codes are those of x itself, rounded to nearest even.
constexpr bool rounds_plainly(const QuantizeOut& to) {
  return to.seed == nullptr && to.row.hadamard == 0 && to.col.hadamard == 0;
}

struct QuantizeArgs {
  Matrix x;
  QuantizeOut to;
  Execution execution;
};

// Groups of rows of x, each with blocks of its own. col_sum is [count, cols]. With `gather`, of a
// GPU and of MX, row r of the groups is row gather[r] of x, and x.rows counts those of the groups.
struct GroupedQuantizeArgs {
  QuantizeArgs all;
  Groups groups;
  const int32_t* gather = nullptr;
};

struct DequantizeArgs {
  Operand operand;      // k_last or k_first
  void* out = nullptr;  // lies as the codes do
  DType out_dtype = DType::f32;
  Execution execution;
};

// A plain operand to what kernels of a device read.
struct PackArgs {
  Operand operand;
  Role role = Role::lhs;  // of a CPU
  OperandOut out;         // a CPU writes codes and scales behind out.codes
  int32_t spread = 0;     // of Layout::tiles
  // Several operands behind each other, one a group: so many bytes from packed form to packed form
  // on a CPU, all of one size and compact elsewhere.
  Groups groups;
  int64_t out_stride = 0;
  ScaleRule rule = ScaleRule::rceil;  // where columns are quantized anew
  Execution execution;
};

// out[row] = sum over k of the values of a plain operand, in an order that only the sizes decide.
struct RowSumsArgs {
  Operand operand;
  float* out = nullptr;  // [rows]
  Execution execution;
};

}  // namespace te_mx
