"""Tiny models of Transformers from configs, for the tests of convert_model(fuse=True)."""

from __future__ import annotations

import copy

import torch

import te_mx

BF16 = torch.bfloat16
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_MORE = {
    "Gemma": {"head_dim": 16}, "Gemma2": {"head_dim": 16}, "Gemma3Text": {"head_dim": 16},
    "Qwen3": {"head_dim": 16}, "OPT": {"ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.0},
    "GPT2": {"n_embd": 64, "n_head": 4, "n_layer": 1},
}  # fmt: skip


def model_of(name: str, dtype: torch.dtype = BF16, **more):
    """A model with the LM head left in high precision by `keep_head`, from `<name>Config`."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**{**SIZES, **_MORE.get(name, {}), **more})
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def keep_head(_, name):
    return name != "lm_head"


def pair(name: str, dtype: torch.dtype = BF16, **more):
    """(fused, only converted, what the fused one reported) of the same weights."""
    fused = model_of(name, dtype, **more)
    plain = copy.deepcopy(fused)
    te_mx.convert_model(plain, filter_fn=keep_head)
    return fused, plain, te_mx.convert_model(fused, fuse=True, filter_fn=keep_head)


def tokens(rows: int = 2, length: int = 16):
    return torch.randint(0, 64, (rows, length), generator=torch.Generator().manual_seed(1))


def step(model, recipe=None):
    """(logits, gradients by name) of one step in MXFP8."""
    ids = tokens()
    model.zero_grad(set_to_none=True)
    with te_mx.autocast(recipe=recipe):
        out = model(ids, labels=ids, use_cache=False)
    out.loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return out.logits.detach(), grads
