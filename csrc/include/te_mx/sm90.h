// The Hopper backend (sm_90a). Device pointers; calls are asynchronous on execution.stream, of the
// current device, and allocate nothing.
#pragma once

#include "te_mx/fused.h"
#include "te_mx/gemm.h"
#include "te_mx/linear.h"
#include "te_mx/moe.h"
#include "te_mx/quantize.h"
#include "te_mx/sm90_layout.h"

namespace te_mx::sm90 {

// The current device is a Hopper GPU with a driver that encodes tensor maps.
bool available();

// Rows are k_last or tiles, columns k_last, k_first, tiles or, of blocks of 1 x 128 by the rule
// pow2, aligned_tiles. col_sum_ws [ceil(rows/128), cols]. With a Hadamard transform one direction,
// without sums. A seed goes with e2m1 alone. A workspace becomes zeros. Others know none of these.
Status quantize(const QuantizeArgs& args);
// Two matrices that do not depend on each other, at the same time where the GPU has room for both.
// On the same stream; the first without col_sum and workspace.
Status quantize_two(const QuantizeArgs& first, const QuantizeArgs& second);
// Matrices xs[i] of rows[i] rows as the one that args.x says, behind each other, to tiles of MX;
// at most kMostJoined. All but the last have whole tiles of 128 rows; unsupported otherwise. `xs`
// and `rows` lie in host memory; args.x.data is not read.
inline constexpr int kMostJoined = 4;
Status quantize_joined(const QuantizeArgs& args, const void* const* xs, const int64_t* rows,
                       int64_t count);
// k_last or k_first to tiles.
Status pack(const PackArgs& args);
// The same bytes of e2m1 that is k_last, for products: one operand, or in one launch the two of one
// k. The launch starts early.
Status unpack(const PackArgs& args);
Status unpack_two(const PackArgs& first, const PackArgs& second);
Status dequantize(const DequantizeArgs& args);
int64_t row_sums_workspace_bytes(int64_t rows, int64_t k, bool k_first);
Status row_sums(const RowSumsArgs& args);

// ---------------------------------------------------------------------------------------- GEMM
// Operands are tiles, both MX or both with fp32 scales: lhs in blocks of 1 x 128, rhs of 1 x 128 or
// 128 x 128, each with configurations of its own and K in one piece. Those below are of MX.
// E5M2 is for gradients: rhs of all products here is in another format.
// Aligned tiles (types.h) are operands of MX.
// aux and gelu_in do not go together. The bias gradient is that of the result: rounded to 16 bits
// first where gelu_in has the dtype of out and both have whole 16 bytes a row. The workspace is
// 16-byte aligned. Parts are at most one for every 128 of K.
int64_t workspace_bytes(const GemmArgs& args);
Status gemm(const GemmArgs& args);
int config_count();  // execution.kernel is an index below it, or -1: the cost model chooses
bool config_full(int config);  // else without GELU, aux and bias gradient
int chosen_config(const GemmArgs& args);
const char* config_name(int config);

// The same of a k_last rhs of MXFP4, whose codes become tiles inside the main loop, and an lhs in
// tiles of any format, or of MXFP4 that is k_last and is unpacked to the workspace before. One
// launch for the product, K in parts or not: at most kMostCodesParts, not 7. Rows of rhs are whole
// 16 bytes and start at 16 bytes, or it is unsupported. Products have the bits of pack(), gemm()
// with as many parts; those of the bias gradient are added up as in gemm() with K in parts.
int64_t codes_workspace_bytes(const GemmArgs& args);
Status gemm_codes(const GemmArgs& args);

// -------------------------------------------------------------------------------------- groups
// One launch for all groups; where they end stands in device memory, so nothing waits for it.
// Groups have no `starts`. NOTE: ends that are out of range or fall are cut off, so that no call
// leaves its memory.

// Ends that the host knows, to `to` on the device.
Status upload_ends(const int64_t* ends, int64_t count, int32_t* to, void* stream);

// The rows of all groups, both directions packed (group_rows, group_k or aligned_group_k) or one of
// them; of fp32 scales in blocks of 1 x 128. col_sum_ws is [group_tiles, cols].
Status quantize_grouped(const GroupedQuantizeArgs& args);

// Matrices xs[i], each like args.x, to what `to` asks for, that of all matrices behind each other.
// `xs` lies in host memory; args.x.data is not read. Not in E5M2.
Status quantize_stacked(const QuantizeArgs& args, const void* const* xs, int64_t count);

// Plain weights, one operand [rows, k] a group, to packed ones. Those of groups without rows are
// not written.
Status pack_stacked(const PackArgs& args);

// Plain matrices [rows, k], k last, one a group, to the packed operands [k, rows] of their columns:
// what the codes decode to (in bf16) quantized again. Not of E5M2.
Status columns_of_stacked(const PackArgs& args);

// Groups of rows: lhs group_rows, rhs tiles of all groups, plain epilogues. Groups of K: both sides
// group_k, without bias and without blocks of 128 x 128; lhs.k is not read. At most kMostPlaces
// groups with first_rows.
Status gemm_grouped(const GroupedGemmArgs& args);

inline constexpr int kMostPlaces = 256;
int grouped_config_count();
const char* grouped_config_name(int config);

// ------------------------------------------------------------------------------ routed to experts
// Only the device knows the routing. Plain operands of MX, tokens in FP8; k is a multiple of 32,
// and weights have 16 rows or more and start at 16 bytes; those in E4M3 may also be tiles, of a
// multiple of 16 rows. Unsupported otherwise. Blocks of more than 8 positions are cut; a launch
// takes 2048 of these pieces, others follow it.
Status moe_gemm(const MoeGemmArgs& args);
// One launch each. At most kMostExperts experts.
inline constexpr int kMostExperts = 4096;
Status moe_align(const MoeAlignArgs& args);
Status moe_combine(const MoeCombineArgs& args);

// ------------------------------------------------------------------------------------- fused steps
// z = norm(x); x has z's dtype or is fp32. counters: norm_counters(rows), or a workspace of zeros.
Status normalize(const NormArgs& args);
// Few rows, each by a CTA, in any dtypes; weight and bias have one.
Status normalize_rows(const NormRowsArgs& args);
// dz has x's dtype or one of 16 bits beside an fp32 x. counters as above, or zeros as these and one
// for every 128 columns; partial [norm_partial_sums(rows), 2, cols].
Status normalize_backward(const NormGradArgs& args);
// Everything has the dtype of the result.
Status activate(const ActArgs& args);

// Scratch words of a normalization; they need no value.
constexpr int64_t norm_counters(int64_t rows) { return 1 + (rows + 127) / 128; }

// Parts in which dweight and dbias are summed, at most: tiles, or what norm_backward_strips.cu
// makes of the rows.
inline constexpr int64_t kStripsAtOnce = 384;  // CTAs, two or more for a part
constexpr int64_t norm_partial_sums(int64_t rows) {
  const int64_t longest = (rows + 63) / 64, shortest = (rows + 7) / 8, most = kStripsAtOnce / 2;
  const int64_t at_once = shortest < most ? shortest : most;
  return longest < at_once ? at_once : longest;
}

// ------------------------------------------------------------------------------------ linear layer
// That of an operand of MX [rows, k] from `at` on.
OperandOffsets operand_offsets(int64_t at, int64_t rows, int64_t k);

// In buffers that are aligned to 256 bytes. Of sizes, wanted columns, scalings and the rule only.
LinearOffsets linear_offsets(const LinearArgs& args);
// With MX scales, or with fp32 scales in blocks of 1 x 128, of w in these or in 128 x 128. Columns
// of x and of the gradient whose scales are powers of two by the rule are aligned tiles.
Status linear_forward(const LinearArgs& args);
Status linear_backward(const LinearArgs& args);
// dw of columns of g that linear_backward left; no workspace.
Status linear_wgrad(const LinearArgs& args);

}  // namespace te_mx::sm90
