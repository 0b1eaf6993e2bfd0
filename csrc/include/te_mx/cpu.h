// The native CPU backend as plain functions: pointers, sizes and strides in, a status out.
//
// Nothing here throws, allocates tensors or knows torch. Sizes count elements unless a name says
// bytes. D[M, N] = epilogue(lhs[M, K] @ rhs[N, K]^T); in BLAS letters lhs is B and rhs is A.
#pragma once

#include <cstdint>

namespace te_mx {

enum class Status : int32_t {
  ok = 0,
  bad_argument = 1,
  unsupported = 2,
  small_workspace = 3,
  launch_failed = 4,  // of a GPU: the runtime refused, as it would refuse anybody now
};
enum class DType : int32_t { f32 = 0, bf16 = 1, f16 = 2 };
enum class Format : int32_t { e4m3 = 0, e5m2 = 1 };
enum class ScaleRule : int32_t { rceil = 0, floor = 1 };
enum class Gelu : int32_t { none = 0, tanh = 1, erf = 2 };
enum class Role : int32_t { lhs = 0, rhs = 1 };

// What the bias gradient sums: lhs over K (one value a row of lhs), or D over M (one value a column
// of D).
enum class BiasGrad : int32_t { none = 0, operand = 1, result = 2 };

// Instruction-set levels, each including the ones before it. amx_emulated runs the AMX kernels on
// software tiles, for tests.
enum class Isa : int32_t {
  portable = 0,
  avx2 = 1,
  avx512 = 2,
  avx512_bf16 = 3,
  amx = 4,
  amx_emulated = 5,
};

// One GEMM kernel. Panel kernels read packed operands; stream kernels read the codes of rhs as they
// lie.
enum class Kernel : int32_t {
  wide_f64 = 0,
  portable_f32 = 1,
  avx2_f32 = 2,
  avx512_f32 = 3,
  avx512_bf16 = 4,
  amx_bf16 = 5,
  portable_stream = 6,
  avx2_stream = 7,
  avx512_stream = 8,
  avx512_bf16_stream = 9,
  amx_stream = 10,
  count = 11,
};

inline constexpr int64_t kBlock = 32;            // elements that share a scale
inline constexpr int64_t kPastCaches = 8 << 20;  // bytes of a result that no cache would keep
inline constexpr int64_t kStreamMaxRows = 16;    // stream kernels take M up to this
inline constexpr int kWideSpread = 83;  // exponents a row may span before wide_f64 takes over

struct QuantizeArgs {
  const void* x;  // [rows, cols]
  int64_t rows, cols;
  int64_t row_stride, col_stride;
  DType x_dtype;
  Format fmt;
  ScaleRule rule;
  uint8_t* row_codes;   // [rows, cols], or null
  uint8_t* row_scales;  // [rows, ceil(cols/32)]
  uint8_t* col_codes;   // [rows, cols], or [cols, rows] when col_transposed, or null
  uint8_t* col_scales;  // [ceil(rows/32), cols], or [cols, ceil(rows/32)]
  bool col_transposed;
  float* col_sum;     // [cols] sum of x over rows, or null
  float* col_sum_ws;  // [ceil(rows/kColSumRows), cols] partial sums, needed with col_sum
  int threads;
  int64_t together;  // bytes of codes of the whole call of which this is a part, or 0
};
inline constexpr int64_t kColSumRows = 256;

struct DequantizeArgs {
  const uint8_t* codes;   // [rows, cols] compact
  const uint8_t* scales;  // [rows, ceil(cols/32)], or [ceil(rows/32), cols] when blocks_along_rows
  int64_t rows, cols;
  bool blocks_along_rows;
  Format fmt;
  DType out_dtype;
  void* out;  // [rows, cols] compact
  int threads;
};

// One side of a GEMM, logical [rows, k] with a scale for every 32 of k.
struct Operand {
  const uint8_t* codes;
  const uint8_t* scales;
  int64_t rows, k;
  int64_t code_row_stride, code_k_stride;  // one of the two is 1
  int64_t scale_row_stride, scale_block_stride;
  Format fmt;
  const void* packed;  // from pack() for the same kernel and role, or null
};

struct GemmArgs {
  Kernel kernel;
  Operand lhs, rhs;
  void* out;  // [M, N], rows ldo apart
  DType out_dtype;
  int64_t ldo;
  bool accumulate;
  const void* bias;  // [N] or null
  DType bias_dtype;
  Gelu gelu;  // forward GELU, or the form whose derivative multiplies when gelu_in is set
  void* aux;  // [M, N] compact, written before GELU, or null
  DType aux_dtype;
  const void* gelu_in;  // [M, N] compact, or null
  DType gelu_in_dtype;
  BiasGrad bias_grad_kind;
  float* bias_grad;  // [M] (operand) or [N] (result)
  void* workspace;   // 64-byte aligned
  int64_t workspace_bytes;
  int threads;
  int64_t together;  // bytes of results of the whole call of which this is a part, or 0
  // out: the kernel that ran; wide_f64 when the data asked for it everywhere. Panel kernels hand
  // only the 32-row blocks that hold a wide row to wide_f64.
  Kernel ran;
};

// isa.cpp
Isa isa_best();                 // what this CPU and this build can do
Isa isa_current();              // isa_best, lowered by TE_MX_CPU_ISA or set_isa
const char* isa_env_error();    // why TE_MX_CPU_ISA could not be followed, or null
bool isa_available(Isa level);  // amx_emulated is always available
Status set_isa(Isa level);
bool kernel_available(Kernel kernel);  // at isa_current

// parallel.cpp: the thread team of the last parallel call, "inline" when none was needed yet,
// "openmp" (that of torch) or "threads" (our own: no OpenMP runtime, or a child of fork())
const char* parallel_team();

// peak.cpp
// The fastest multiply instruction of isa_current() on operands in registers; takes about 0.3 s.
double peak_gflops(int threads);

// quantize.cpp, dequantize.cpp
Status quantize(const QuantizeArgs& args);
Status dequantize(const DequantizeArgs& args);

// gemm.cpp
int64_t packed_bytes(Kernel kernel, Role role, int64_t rows, int64_t k);  // 0: reads plain codes
Status pack(Kernel kernel, Role role, const Operand& operand, void* packed, int threads);
// Scratch bytes gemm() needs: the single formula. Depends on shapes, on which operands are packed
// and on bias_grad_kind, not on pointers' values or data (room for the wide_f64 fallback, if any,
// is included).
int64_t workspace_bytes(const GemmArgs& args);
Status gemm(GemmArgs& args);

}  // namespace te_mx
