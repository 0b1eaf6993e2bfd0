// Grouped problems of the Hopper backend: the experts of a mixture in one launch. Group i owns rows
// [start_i, end_i) of a matrix of tokens; a group starts where the one before ends, or with a
// capacity at i * capacity. Where groups end stands in device memory, so nothing waits for it.
//
// Packed tokens. Every group has tiles of its own (te_mx/sm90.h), with the bytes of packing the
// group alone, from tile start_i / 128 + i on: a closed form, no two groups meet, and
// group_tiles(rows, groups) are enough for all splits. Tiles of no group hold anything.
//
//   rows  codes uint8 [rows, packed_ld(cols)], row r of the matrix in row r: the codes of a tile
//         may end in those of the next group, which nobody stores products of
//         scales uint32 [ceil(cols/128)][group_tiles rounded up to even][132]
//   K     (the columns, whose K are the rows) codes uint8 [cols, group_tiles * 128], zero from the
//         end of a group to the end of its last tile
//         scales uint32 [group_tiles][packed_tiles(cols)][132]
//
// Weights, one matrix a group, all of one size: the packed operands of all groups behind each
// other.
#pragma once

#include "te_mx/sm90.h"

namespace te_mx::sm90 {

// NOTE: ends that are out of range or fall are cut off, so that no call leaves its memory.
struct Groups {
  const void* offs;  // ends of the groups on the device, int32 or int64 [count]
  bool offs64;
  int64_t count, rows;
  int64_t capacity;  // 0: groups follow each other
};

constexpr int64_t group_tiles(int64_t rows, int64_t groups) { return rows / kTile + groups; }

// Ends that the host knows, to `to` on the device.
Status upload_ends(const int64_t* ends, int64_t count, int32_t* to, void* stream);

// The rows of all groups, both directions packed or one of them; a.rows is groups.rows. a.col_sum
// is [count, cols] and a.col_sum_ws [group_tiles, cols].
Status quantize_grouped(const QuantizeArgs& a, const Groups& groups);

// Matrices xs[i], each [rows, cols], to what `a` asks for, packed or plain, that of all matrices
// behind each other. `xs` lies in host memory; a.x is not read.
Status quantize_stacked(const QuantizeArgs& a, const void* const* xs, int64_t count);

// Plain weights, one operand [rows, k] a group, to packed ones. Those of groups without rows are
// not written.
Status pack_stacked(const PackArgs& a, const Groups& groups);

// Plain matrices [rows, k], k last, to the packed operands [k, rows] of their columns: what the
// codes decode to (in bf16) quantized again.
Status columns_of_stacked(const PackArgs& a, ScaleRule rule, int64_t count);

// out[rows of group i] = lhs[rows of group i] @ rhs_i[n, k]^T + bias[i]; rows of no group become 0.
// lhs: tokens by rows, m = groups.rows; rhs: weights; bias [count, n]. Plain epilogues only.
Status gemm_rows(const GemmArgs& a, const Groups& groups);

// out[i] (+)= lhs[m, K of group i] @ rhs[n, K of group i]^T, out [count, m, n] with rows ldo apart;
// zeros for a group without rows. Both sides: tokens by K. a.k is not read; no bias.
// first_rows, in host memory: out[i] begins that many rows of ldo behind a.out instead of i * m.
Status gemm_k(const GemmArgs& a, const Groups& groups, const int32_t* first_rows = nullptr);

inline constexpr int kMostPlaces = 256;  // groups of a call with first_rows

int grouped_config_count();
const char* grouped_config_name(int config);

}  // namespace te_mx::sm90
