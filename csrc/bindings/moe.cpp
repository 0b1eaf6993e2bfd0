#include "record.hpp"

namespace te_mx::bindings {

void bind_moe_records(py::module_& m) {
  Record<Routing>()
      .field("sorted_token_ids", &Routing::sorted_token_ids)
      .field("expert_ids", &Routing::expert_ids)
      .field("num_tokens_post_padded", &Routing::num_tokens_post_padded)
      .field("positions", &Routing::positions)
      .field("blocks", &Routing::blocks)
      .field("routed", &Routing::routed)
      .field("block_m", &Routing::block_m)
      .field("a_div", &Routing::a_div)
      .field("stands", &Routing::stands)
      .add_to(m, "Routing");
  Record<MoeGemmArgs>()
      .part("lhs", &MoeGemmArgs::lhs, "lhs_")
      .part("rhs", &MoeGemmArgs::rhs, "rhs_")
      .field("experts", &MoeGemmArgs::experts)
      .part("routing", &MoeGemmArgs::routing, "")
      .field("bias", &MoeGemmArgs::bias)
      .field("bias_dtype", &MoeGemmArgs::bias_dtype)
      .field("weights", &MoeGemmArgs::weights)
      .field("out", &MoeGemmArgs::out)
      .field("out_dtype", &MoeGemmArgs::out_dtype)
      .part("execution", &MoeGemmArgs::execution, "")
      .add_to(m, "MoeGemmArgs");
  Record<MoeAlignArgs>()
      .field("topk_ids", &MoeAlignArgs::topk_ids)
      .field("routed", &MoeAlignArgs::routed)
      .field("experts", &MoeAlignArgs::experts)
      .field("positions", &MoeAlignArgs::positions)
      .field("blocks", &MoeAlignArgs::blocks)
      .field("block_m", &MoeAlignArgs::block_m)
      .field("expert_map", &MoeAlignArgs::expert_map)
      .field("mapped", &MoeAlignArgs::mapped)
      .field("sorted_token_ids", &MoeAlignArgs::sorted_token_ids)
      .field("expert_ids", &MoeAlignArgs::expert_ids)
      .field("num_tokens_post_padded", &MoeAlignArgs::num_tokens_post_padded)
      .field("top_k", &MoeAlignArgs::top_k)
      .field("ends", &MoeAlignArgs::ends)
      .field("rows", &MoeAlignArgs::rows)
      .field("slot_positions", &MoeAlignArgs::slot_positions)
      .part("execution", &MoeAlignArgs::execution, "")
      .add_to(m, "MoeAlignArgs");
  Record<MoeCombineArgs>()
      .field("values", &MoeCombineArgs::values)
      .field("slot_positions", &MoeCombineArgs::slot_positions)
      .field("slot_experts", &MoeCombineArgs::slot_experts)
      .field("experts", &MoeCombineArgs::experts)
      .field("weights", &MoeCombineArgs::weights)
      .field("tokens", &MoeCombineArgs::tokens)
      .field("n", &MoeCombineArgs::n)
      .field("top_k", &MoeCombineArgs::top_k)
      .field("out", &MoeCombineArgs::out)
      .field("out_dtype", &MoeCombineArgs::out_dtype)
      .part("execution", &MoeCombineArgs::execution, "")
      .add_to(m, "MoeCombineArgs");
}

}  // namespace te_mx::bindings
