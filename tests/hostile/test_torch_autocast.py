"""fp16 parameters under a torch.autocast that makes bf16, and the reverse: nn.Linear works, and so
do layers whose parameters are joined first.
"""

from __future__ import annotations

import pytest
import torch

import te_mx

F16, BF16 = torch.float16, torch.bfloat16
FAMILIES = {
    "parts": lambda **k: te_mx.Linear(64, 48, parameters_split=["q", "k"], **k),
    "normalized parts": lambda **k: te_mx.LayerNormLinear(
        64, 48, parameters_split={"q": 16, "k": 32}, **k
    ),
    "GroupedLinear": lambda **k: te_mx.GroupedLinear(2, 64, 48, **k),
    "GroupedLinear mixed": lambda **k: te_mx.GroupedLinear(
        2, 64, 48, single_grouped_weight=True, single_grouped_bias=False, **k
    ),
}


@pytest.mark.parametrize("inside", [True, False], ids=["mxfp8", "plain"])
@pytest.mark.parametrize(("held", "made"), [(F16, BF16), (BF16, F16), (F16, F16)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_joined_parameters(family: str, held: torch.dtype, made: torch.dtype, inside: bool):
    """The bits of fp32 parameters of the same values, and gradients in their own dtype."""
    layer, wide = FAMILIES[family](dtype=held), FAMILIES[family]()
    wide.load_state_dict(layer.state_dict())
    splits = ([4, 6],) if isinstance(layer, te_mx.GroupedLinear) else ()
    x, results = torch.randn(10, 64).to(held), []
    for one in (layer, wide):
        with torch.autocast("cpu", made), te_mx.autocast(enabled=inside):
            y = one(x, *splits)
        y.float().square().sum().backward()
        results.append(y)
    assert results[0].dtype == made
    if inside:  # outside, torch rounds fp32 parameters to the dtype that it computes in
        assert torch.equal(*results)
    for p, q in zip(layer.parameters(), wide.parameters(), strict=True):
        assert p.grad.dtype == held and q.grad is not None
        torch.testing.assert_close(p.grad.float(), q.grad, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("family", ["GroupedLinear", "GroupedLinear mixed"])
def test_weights_without_masters(family: str):
    """Biases of groups are stacked at every call, and weights when masters come back."""
    layer, x = FAMILIES[family](dtype=F16), torch.randn(10, 64)
    te_mx.freeze_weights(layer, drop_master=True)
    expected = layer(x.bfloat16(), [4, 6])
    with torch.autocast("cpu", BF16):
        assert torch.equal(layer(x.bfloat16(), [4, 6]), expected)
        te_mx.unfreeze_weights(layer, dequantize=True)
    assert all(p.dtype == F16 for p in layer.parameters())


def test_grouped_linear_of_a_list_of_biases():
    x, weight = torch.randn(10, 64), torch.randn(2, 48, 64).half()
    biases = [torch.randn(48).half() for _ in range(2)]
    offs = torch.tensor([4, 10])
    with torch.autocast("cpu", BF16):
        got = te_mx.grouped_linear(x, weight, offs=offs, bias=biases)
        stacked = torch.stack([bias.float() for bias in biases])
        assert torch.equal(got, te_mx.grouped_linear(x, weight, offs=offs, bias=stacked))
