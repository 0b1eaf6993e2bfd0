// Rows that are routed to experts, by lists as serving engines make them: te_mx/dispatch/moe.py has
// the words. All addresses are those of the device that runs the call.
#pragma once

#include "te_mx/types.h"

namespace te_mx {

// Position p of sorted_token_ids, below num_tokens_post_padded[0], holds a routed row, or what is
// none (anything outside of 0 .. routed); its block p / block_m belongs to expert_ids[p / block_m],
// to nobody if that is outside of 0 .. experts. Null sorted_token_ids: routed row r is a block of
// its own, of expert_ids[r]. Null num_tokens_post_padded: all positions count. Routed row r reads
// row r / a_div of lhs.
struct Routing {
  const int32_t* sorted_token_ids = nullptr;  // [positions] or null
  const int32_t* expert_ids = nullptr;        // [blocks]
  const int32_t* num_tokens_post_padded = nullptr;
  int64_t positions = 0, blocks = 0, routed = 0;
  int32_t block_m = 1, a_div = 1;
  // The lists were there before the kernel before this product was let in, as those of a product of
  // the same rows two kernels before: they are read while that kernel runs.
  bool stands = false;
};

// out[r] = (lhs[r / a_div] @ rhs_e^T + bias_e) * weights[r] for the routed rows r; others stay.
struct MoeGemmArgs {
  Operand lhs;  // tokens
  Operand rhs;  // weights of expert 0, those of the others behind them
  int64_t experts = 0;
  Routing routing;
  const void* bias = nullptr;  // [experts, n] or null
  DType bias_dtype = DType::f32;
  const float* weights = nullptr;  // [routed] or null
  void* out = nullptr;             // [routed, n] compact
  DType out_dtype = DType::f32;
  Execution execution;
};

// The lists of slots topk_ids [routed]: every expert's in their order, filled up to whole blocks
// with `routed`; behind them padding too, and experts -1. Or those of grouped products, with blocks
// of one slot: where the slots of each expert end. Lists that nobody asks for are null.
struct MoeAlignArgs {
  const int32_t* topk_ids = nullptr;
  int64_t routed = 0, experts = 0, positions = 0, blocks = 0;
  int32_t block_m = 1;
  const int32_t* expert_map = nullptr;  // [experts] or null: names in expert_ids
  int64_t mapped = 0;  // not 0: experts of topk_ids, and of expert_map, which says whom to sort by
  int32_t* sorted_token_ids = nullptr;  // [positions]
  int32_t* expert_ids = nullptr;        // [blocks]
  int32_t* num_tokens_post_padded = nullptr;
  int32_t top_k = 1;
  int32_t* ends = nullptr;            // [experts]: behind the last slot of each, in positions
  int32_t* rows = nullptr;            // [positions]: slot / top_k
  int32_t* slot_positions = nullptr;  // [routed]: the position of each slot, -1 without an expert
  Execution execution;
};

// out[t] = sum over j in order of weights[t, j] * values[slot_positions[t, j]], in fp32, rounded
// once; slots without a position add nothing, nor do those of no expert, where slot_experts says.
struct MoeCombineArgs {
  const float* values = nullptr;            // [positions, n] compact
  const int32_t* slot_positions = nullptr;  // [tokens, top_k]
  const int32_t* slot_experts = nullptr;    // [tokens, top_k] or null
  int64_t experts = 0;                      // those that there are
  const float* weights = nullptr;           // [tokens, top_k]
  int64_t tokens = 0, n = 0;
  int32_t top_k = 1;
  void* out = nullptr;  // [tokens, n] compact
  DType out_dtype = DType::f32;
  Execution execution;
};

}  // namespace te_mx
