"""gpt-oss's 4-bit experts: loaded from the tensors of a checkpoint into Transformers' model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import te_mx
from te_mx.formats import mxfp4_checkpoints

transformers = pytest.importorskip("transformers", minversion="5.0")
pytestmark = pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")
KEYS = ("gate_up_proj", "down_proj")


def model(layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        head_dim=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    made = transformers.GptOssForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "experts" in name:
                parameter.normal_(std=0.3)
    return made


def is_experts(module: nn.Module, name: str) -> bool:
    return name.endswith("experts")


def checkpoint(source: nn.Module) -> tuple[dict[str, torch.Tensor], nn.Module]:
    """Tensors as the published files name them, and the model with what they stand for, decoded by
    Transformers."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    plain, state = copy.deepcopy(source), dict(source.state_dict())
    for name, module in plain.named_modules():
        for key in KEYS if is_experts(module, name) else ():
            weight = state.pop(f"{name}.{key}").transpose(-2, -1)  # [E, out, in]
            q = te_mx.quantize(weight, fmt="mxfp4")
            blocks, scales = mxfp4_checkpoints.to_gpt_oss(
                q.rowwise_data.view(*weight.shape[:2], -1),
                q.rowwise_scale.view(*weight.shape[:2], -1), weight.shape[-1],
            )  # fmt: skip
            state |= {f"{name}.{key}_blocks": blocks, f"{name}.{key}_scales": scales}
            with torch.no_grad():
                values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
                getattr(module, key).copy_(values)
    return state, plain


def tokens() -> torch.Tensor:
    return torch.randint(3, 96, (2, 24), generator=torch.Generator().manual_seed(1))


def test_a_checkpoint_loads_and_runs():
    # One layer: its experts change no token's way to the experts behind them.
    state, plain = checkpoint(model(1))
    ours = model(1)
    te_mx.convert_model(ours, filter_fn=is_experts)
    ours.load_state_dict(state)
    ids = tokens()
    with torch.no_grad():
        exact = plain(ids).logits
        quantized = ours(ids).logits  # activations of the default recipe, mxfp8_e4m3
        te_mx.freeze_weights(ours, activations="bf16")
        values = ours(ids).logits
        with te_mx.autocast():
            assert torch.equal(ours(ids).logits, values)
    torch.testing.assert_close(values, exact, rtol=1e-4, atol=1e-4)
    error = (quantized - exact).norm() / exact.norm()
    assert 0 < error < 0.05
    rows = [row for row in te_mx.audit(ours) if "experts" in row.name]
    assert {row.fprop for row in rows} == {"weight only"} and len(rows) == 2
    assert {row.weight for row in rows} == {"frozen, no master, mxfp4"}
    # Codes are kept as they came, 17 bytes for 32 elements.
    for name, module in ours.named_modules():
        for key in KEYS if is_experts(module, name) else ():
            codes, scales = module._codes(key)
            blocks, own = mxfp4_checkpoints.to_gpt_oss(codes, scales, 2 * codes.shape[-1])
            assert torch.equal(blocks, state[f"{name}.{key}_blocks"])
            assert torch.equal(own, state[f"{name}.{key}_scales"])


@pytest.mark.parametrize("activations", ["mxfp8", "mxfp4", "bf16"])
def test_experts_frozen_to_four_bits(activations):
    """Quantized here: what the checkpoint's codes give, saved and loaded, beside MXFP8 layers."""
    source = model()
    state, _ = checkpoint(source)
    te_mx.convert_model(source, filter_fn=lambda module, name: name != "lm_head")
    how = {"drop_master": True, "activations": activations}
    count = te_mx.freeze_weights(source, fmt="mxfp4", filter_fn=is_experts, **how)
    assert count == 2
    loaded = model()
    te_mx.convert_model(loaded, filter_fn=is_experts)
    loaded.load_state_dict(state)
    te_mx.freeze_weights(loaded, activations=activations)
    ids = tokens()
    with torch.no_grad():
        y = source(ids).logits
        assert torch.equal(loaded(ids).logits, y)
        again = model()
        te_mx.convert_model(again, filter_fn=lambda module, name: name != "lm_head")
        again.load_state_dict(source.state_dict())
        assert torch.equal(again(ids).logits, y)
    te_mx.freeze_weights(source, drop_master=True)  # the rest
    weights = {row.weight for row in te_mx.audit(source) if row.name != "lm_head"}
    assert weights == {"frozen, no master, mxfp4", "frozen, no master"}
