// The native CPU backend. Synchronous; runs on the threads of torch.
#pragma once

#include "te_mx/fused.h"
#include "te_mx/gemm.h"
#include "te_mx/linear.h"
#include "te_mx/moe.h"
#include "te_mx/quantize.h"

namespace te_mx::cpu {

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

inline constexpr int64_t kPastCaches = 8 << 20;  // bytes of a result that no cache would keep
inline constexpr int64_t kStreamMaxRows = 16;    // stream kernels take M up to this
inline constexpr int64_t kValuesMaxRows = 64;    // of GemmArgs::values
inline constexpr int kWideSpread = 83;  // exponents a row may span before wide_f64 takes over
inline constexpr int64_t kColSumRows =
    256;  // of one partial sum: col_sum_ws, NormGradArgs::partial

// isa.cpp
Isa isa_best();                 // what this CPU and this build can do
Isa isa_current();              // isa_best, lowered by TE_MX_CPU_ISA or set_isa
const char* isa_env_error();    // why TE_MX_CPU_ISA could not be followed, or null
bool isa_available(Isa level);  // amx_emulated is always available
Status set_isa(Isa level);
bool kernel_available(Kernel kernel);  // at isa_current

// gemm_plan.cpp: whether a stream kernel, and not the panel kernel of its level, is to run D[m, n]
// = lhs[m, k] @ rhs[n, k]^T. Depends on sizes alone, and up to kStreamMaxRows rows on n and k
// alone.
bool stream_pays(Kernel stream, int64_t m, int64_t n, int64_t k);

// parallel.cpp: the thread team of the last parallel call, "inline" when none was needed yet,
// "openmp" (that of torch) or "threads" (our own: no OpenMP runtime, or a child of fork())
const char* parallel_team();
// How often a team was called together so far. Every time is a wait for its slowest thread.
int64_t parallel_regions();
// task_team.cpp: how many steps had items for a team that had been sent away; there should be none
int64_t late_steps();

// peak.cpp
// The fastest multiply instruction of isa_current() on operands in registers; takes about 0.3 s.
double peak_gflops(int threads);

// quantize.cpp, dequantize.cpp. Layouts k_last and k_first.
Status quantize(const QuantizeArgs& args);
Status dequantize(const DequantizeArgs& args);

// gemm.cpp
// Of an operand with E8M0 scales, or with fp32 ones when blockwise; 0: reads plain codes.
int64_t packed_bytes(Kernel kernel, Role role, int64_t rows, int64_t k, bool blockwise = false);
Status pack(const PackArgs& args);
// Scratch bytes gemm() needs: the single formula. Depends on shapes, on which operands are packed
// and on bias_grad_kind, not on pointers' values or data (room for the wide_f64 fallback, if any,
// is included).
int64_t workspace_bytes(const GemmArgs& args);
// `ran`: the kernel that ran; wide_f64 when the data asked for it everywhere. Panel kernels hand
// only the 32-row blocks that hold a wide row to wide_f64.
Status gemm(const GemmArgs& args, Kernel& ran);

// linear.cpp: bits are those of quantize() and gemm(), one after the other. execution.kernel is the
// panel kernel; its stream runs where that pays. Rowwise operands lie as k_last, columnwise ones as
// k_first, scales behind codes, in buffers that are aligned to 64 bytes.
LinearOffsets linear_offsets(const LinearArgs& args);
Status linear_forward(const LinearArgs& args, Kernel& ran);  // `ran`: as of gemm()
// `ran`: the kernel of dx, and 8 bits above it that of dw.
Status linear_backward(const LinearArgs& args, uint32_t& ran);
// dw of columns of g that linear_backward left, in a workspace of backward.
Status linear_wgrad(const LinearArgs& args, Kernel& ran);

// norm.cpp, activation.cpp. Columnwise codes lie as the matrix does (k_first).
Status normalize(const NormArgs& args);
Status normalize_backward(const NormGradArgs& args);
Status activate(const ActArgs& args);

// quantize_grouped.cpp, gemm_grouped.cpp: several groups in one call, one parallel region for all
// of them. Every group gives the bits of a call of its own. Groups have `starts`, and `ends` of
// int64.
//
// Blocks of 32 rows start anew with every group, so a group's last block is its own. Scale rows of
// group i start at starts[i] / 32 + i, which leaves room for every tail; a matrix of `rows` rows
// has rows / 32 + count scale rows, and those that no block uses are 0.

// As quantize() of the whole matrix, except: col.scales [rows/32 + count, cols], col_sum_ws
// [rows/kColSumRows + count, cols]; columns lie as the matrix does. Codes and scales of rows
// outside of groups are 0.
Status quantize_grouped(const GroupedQuantizeArgs& args);
// Independent problems, e.g. the weights of all groups. `threads` counts, not that of the args.
Status quantize_many(const QuantizeArgs* args, int64_t count, int threads);
// groups.count operands [rows, k] one after another, as packed forms out_stride bytes apart.
Status pack_many(const PackArgs& args);
int64_t workspace_bytes_grouped(const GroupedGemmArgs& args);
// Groups of at most kStreamMaxRows rows of lhs run on few_rows_kernel, if that pays where it is a
// stream. `ran`: bit i: Kernel i ran a group.
Status gemm_grouped(const GroupedGemmArgs& args, uint32_t& ran);

// moe_gemm.cpp: rows that are routed to experts, as groups of the kernels of gemm_grouped(); bits
// and `ran` are its. unsupported: a routed row stands at two positions.
int64_t workspace_bytes(const MoeGemmArgs& args);
Status moe_gemm(const MoeGemmArgs& args, uint32_t& ran);

}  // namespace te_mx::cpu
