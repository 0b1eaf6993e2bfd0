"""A decoder layer of Transformers' Llama as a TransformerLayer, as Transformer Engine's tutorial
replaces it: its weights by name, its outputs within the rounding of bf16."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch

import te_mx
import te_mx.pytorch as te

transformers = pytest.importorskip("transformers", minversion="5.0")

SEQUENCE = 24


class Decoder(te.TransformerLayer):
    """In the place of a LlamaDecoderLayer: its arguments are taken, its cache is not."""

    def __init__(self, config: Any) -> None:
        super().__init__(
            hidden_size=config.hidden_size,
            ffn_hidden_size=config.intermediate_size,
            num_attention_heads=config.num_attention_heads,
            bias=False,
            layernorm_epsilon=config.rms_norm_eps,
            hidden_dropout=0,
            attention_dropout=0,
            fuse_qkv_params=False,
            normalization="RMSNorm",
            activation="swiglu",
            attn_input_format="bshd",
            num_gqa_groups=config.num_key_value_heads,
        )
        width = config.hidden_size // config.num_attention_heads
        self.angles = te.RotaryPositionEmbedding(width)(config.max_position_embeddings)

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:  # type: ignore[override]
        return super().forward(hidden_states, rotary_pos_emb=self.angles)


def take_weights(layer: Decoder, theirs: Any) -> None:
    attention, mlp = theirs.self_attn, theirs.mlp
    pairs = {
        "self_attention.layernorm_qkv.layer_norm_weight": theirs.input_layernorm.weight,
        "self_attention.layernorm_qkv.query_weight": attention.q_proj.weight,
        "self_attention.layernorm_qkv.key_weight": attention.k_proj.weight,
        "self_attention.layernorm_qkv.value_weight": attention.v_proj.weight,
        "self_attention.proj.weight": attention.o_proj.weight,
        "layernorm_mlp.layer_norm_weight": theirs.post_attention_layernorm.weight,
        "layernorm_mlp.fc1_weight": torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)),
        "layernorm_mlp.fc2_weight": mlp.down_proj.weight,
    }
    layer.load_state_dict({name: value.detach() for name, value in pairs.items()}, strict=True)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def models(request):
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=160, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif "embed" not in name and "lm_head" not in name:
                parameter.mul_(5.0)  # so that the layers count beside the residual
    plain = plain.to(request.param)
    ours = transformers.LlamaForCausalLM(config).to(request.param)
    ours.load_state_dict(plain.state_dict())
    for i, theirs in enumerate(plain.model.layers):
        layer = Decoder(config).to(request.param)
        take_weights(layer, theirs)
        ours.model.layers[i] = layer
    return plain, ours, request.param


def test_a_decoder_layer_and_its_gradients(models):
    """In fp32 the same; in bf16, where each rounds a dozen times and how depends on the CPU, as
    near to fp32 as Transformers' layer."""
    plain, ours, dtype = models
    theirs, layer = plain.model.layers[0], ours.model.layers[0]
    x = torch.randn(2, SEQUENCE, 64, dtype=dtype)
    positions = torch.arange(SEQUENCE).unsqueeze(0)

    def their(model, inp):
        mask = torch.full((SEQUENCE, SEQUENCE), torch.finfo(dtype).min, dtype=inp.dtype).triu(1)
        rotary = plain.model.rotary_emb(inp, positions)
        return model(inp, attention_mask=mask[None, None], position_embeddings=rotary)

    results = []
    for run, of in (
        (functools.partial(their, theirs), dtype),
        (layer, dtype),
        (functools.partial(their, copy.deepcopy(theirs).float()), torch.float32),
    ):
        inp = x.to(of, copy=True).requires_grad_()
        out = run(inp)
        out = out[0] if isinstance(out, tuple) else out
        out.float().square().sum().backward()
        results.append((out.detach().float(), inp.grad.float()))
    for one, other, exact in zip(*results, strict=True):
        if dtype is torch.float32:
            assert (one - other).norm() < 1e-5 * one.norm()
        else:
            assert 0 < (other - exact).norm() < 1.2 * (one - exact).norm()
    moved = (results[0][0] - x).float().norm() / x.float().norm()
    assert moved > 0.3  # the layer did something


def test_the_whole_model_and_its_training(models):
    plain, ours, dtype = models
    words = torch.randint(0, 96, (2, SEQUENCE))
    bound = 1e-5 if dtype is torch.float32 else 2.0**-6
    with torch.no_grad():
        one, other = (model(words).logits.float() for model in (plain, ours))
        assert (one - other).norm() < bound * one.norm()
        with te_mx.autocast():
            quantized = ours(words).logits.float()
    gap = (quantized - one).norm() / one.norm()
    assert 1e-3 < gap < 0.15
    with te.fp8_autocast(enabled=True):
        loss = ours(words, labels=words).loss
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in ours.parameters())
