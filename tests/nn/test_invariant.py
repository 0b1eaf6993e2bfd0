"""What stands beside te_mx's products under precision "invariant": heads and routers, attention,
normalizations, activations; and te_mx.audit of what does not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import te_mx
from te_mx.pytorch import DotProductAttention, LayerNorm, RMSNorm
from te_mx.recipe import MXFP8BlockScaling

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import rollout

RECIPE = MXFP8BlockScaling(precision="invariant")
PARTS = slice(0, 1), slice(5, 6), slice(3, 50), slice(15, 100), slice(99, 100), slice(7, 23)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def alike(run, x: Tensor) -> None:
    whole = run(x)
    for part in PARTS:
        torch.testing.assert_close(run(x[part].clone()), whole[part], rtol=0, atol=0)


@dtypes
@pytest.mark.parametrize(("n", "k"), [(7, 100), (300, 640), (1000, 33)])
def test_rows_of_products_and_normalizations(dtype, n, k):
    layer = te_mx.InvariantLinear(k, n, dtype=dtype)
    x = torch.randn(100, k, dtype=dtype)
    alike(layer, x)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    assert layer(x[:0]).shape == (0, n)
    layer(x.requires_grad_()).square().sum().backward()
    assert layer.weight.grad is not None
    for norm in (LayerNorm(k, params_dtype=dtype), RMSNorm(k, params_dtype=dtype)):
        alike(norm, x.detach())


@dtypes
@pytest.mark.parametrize("activation", ["gelu", "swiglu", "silu", "geglu", "srelu"])
def test_rows_of_whole_blocks(dtype, activation):
    block = te_mx.LayerNormMLP(160, 256, activation=activation, params_dtype=dtype)
    with te_mx.autocast(recipe=RECIPE):
        x = torch.randn(100, 160, dtype=dtype)
        alike(block, x)
        whole = block(x)
        te_mx.freeze_weights(block, drop_master=True, recipe=RECIPE)
        alike(block, x)
        assert torch.equal(block(x), whole)


@dtypes
@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("softmax_type", ["vanilla", "learnable"])
def test_a_query_depends_on_its_keys_alone(dtype, softcap, softmax_type):
    made = {"qkv_format": "bshd", "softcap": softcap, "softmax_type": softmax_type}
    train, step = (
        DotProductAttention(4, 16, 2, attn_mask_type=kind, invariant=True, **made)
        for kind in ("causal", "arbitrary")
    )
    q, k, v = (torch.randn(3, 70, heads, 16, dtype=dtype) for heads in (4, 2, 2))
    whole = train(q, k, v)
    usual = DotProductAttention(4, 16, 2, attn_mask_type="causal", **made)(q, k, v)
    torch.testing.assert_close(
        whole, usual, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-2
    )
    for i in (0, 1, 33, 63, 64, 69):  # the query of one sequence, before a cache with other things
        keys, values = (torch.randn(1, 200, 2, 16, dtype=dtype) for _ in range(2))
        keys[:, : i + 1], values[:, : i + 1] = k[1:2, : i + 1], v[1:2, : i + 1]
        hidden = (torch.arange(200) > i).view(1, 1, 1, 200)
        assert torch.equal(step(q[1:2, i : i + 1], keys, values, hidden)[0, 0], whole[1, i])


def test_audit_names_what_depends_on_neighbours():
    class Own(nn.Module):
        pass

    model = nn.Sequential(
        te_mx.Linear(32, 32), nn.Linear(32, 32), te_mx.InvariantLinear(32, 32), nn.SiLU(), Own(),
        DotProductAttention(2, 16), nn.RMSNorm(32), RMSNorm(32), nn.Dropout(0.1),
    )  # fmt: skip
    named = dict(te_mx.audit(model, invariant=True).dependent)
    assert list(named) == ["0", "1", "3", "4", "5", "8"]
    assert "precision adaptive" in named["0"] and "product of torch" in named["1"]
    assert "may depend on its neighbours" in str(te_mx.audit(model, invariant=True))
    model[5].invariant, model[4].invariant = True, True
    del model[1], model[2]
    with te_mx.autocast(recipe=RECIPE):
        assert te_mx.audit(model.eval(), invariant=True).dependent == []
    assert te_mx.audit(model).dependent is None


def test_the_example_agrees_to_the_bit(capsys):
    small = ["--layers", "1", "--width", "64", "--tokens", "4", "--batches", "1,5"]
    assert rollout.main([*small, "--ways", "invariant"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[2:8] for line in lines] == [
        [batch, "0", "0", same, "of", same] for batch, same in (("1", "4"), ("5", "20"))
    ] * 2
    with pytest.raises(SystemExit):
        rollout.main(["--ways", "fast"])
