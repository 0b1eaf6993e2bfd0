"""What stands beside te_mx's products under precision "invariant": heads and routers, attention,
normalizations, activations; and te_mx.audit of what does not."""

from __future__ import annotations

import copy
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import te_mx
from te_mx.dispatch.fused import Activation
from te_mx.nn import activations, invariant
from te_mx.pytorch import DotProductAttention, LayerNorm, RMSNorm, TransformerLayer
from te_mx.recipe import (
    CustomRecipe,
    Float8BlockScaling,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

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
def test_a_query_depends_on_its_keys_alone(dtype, softcap, softmax_type, monkeypatch):
    if softcap:  # as on GPUs
        monkeypatch.setattr(invariant, "_in_order", invariant.in_blocks)
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


@pytest.mark.parametrize(
    "act", ["gelu", "silu", "qgelu", "glu", "swiglu", "clamped_swiglu", "srelu"]
)
def test_activations_between_two_recipes(act, monkeypatch):
    run, own = (lambda h: activations.beside(h, Activation(act), RECIPE.settings)), Activation(act)
    h = torch.randn(100, 2, 66, requires_grad=True)
    alike(run, h.detach())
    expected = activations.plain(h, own)
    torch.testing.assert_close(run(h), expected)
    for one in (run(h), expected):
        one.sum().backward()
    torch.testing.assert_close(h.grad, 2 * torch.autograd.grad(run(h).sum(), h)[0])
    assert torch.equal(activations.beside(h, own, MXFP8BlockScaling().settings), expected)
    # Where they stand: quantizers hide all but one in a million of such bits.
    monkeypatch.setattr(activations, "plain", None)
    recipe = CustomRecipe(
        lambda role: ("mxfp4", "mxfp8")["fc2" in role.name], precision="invariant"
    )
    block = nn.Sequential(te_mx.LayerNormMLP(96, 64, activation=act))
    te_mx.convert_model(block, recipe=recipe)
    with te_mx.autocast(recipe=recipe):
        alike(block, torch.randn(100, 96))
        assert "mxfp4" in (said := block[0]._seen.formats) and "mxfp8" in said


def test_audit_names_what_depends_on_neighbours():
    class Own(nn.Module):
        pass

    block = TransformerLayer(32, 64, 2, attention_dropout=0.0, attn_input_format="bshd")
    model = nn.Sequential(
        te_mx.Linear(32, 32), nn.Linear(32, 32), te_mx.InvariantLinear(32, 32), nn.SiLU(), Own(),
        DotProductAttention(2, 16, invariant=True), nn.RMSNorm(32), RMSNorm(32), nn.Dropout(0.1),
        block,
    )  # fmt: skip
    attends = block.self_attention.core_attention
    te_mx.convert_model(block, recipe=RECIPE)
    named = dict(te_mx.audit(model, invariant=True).dependent)
    assert list(named) == ["0", "1", "3", "4", "8", "9", "9.self_attention.core_attention"]
    assert named["9"] == "draws by place"
    attends.invariant = True
    assert len(te_mx.audit(model, invariant=True).dependent) == len(named) - 1
    model[5].attention_dropout = 0.1
    assert len(te_mx.audit(model, invariant=True).dependent) == len(named)
    assert "precision adaptive" in named["0"] and "product of torch" in named["1"]
    assert "may depend on its neighbours" in str(te_mx.audit(model, invariant=True))
    model[4].invariant = True
    del model[1], model[2]
    with te_mx.autocast(recipe=RECIPE):
        assert te_mx.audit(model.eval(), invariant=True).dependent == []
    assert te_mx.audit(model).dependent is None
    x = torch.randn(5, 9, 32)
    whole = block.eval()(x)
    assert torch.equal(block(x[1:3, :5].clone()), whole[1:3, :5])


RECIPES = (
    RECIPE,
    MXFP4BlockScaling(precision="invariant"),
    Float8BlockScaling(precision="invariant"),
    NVFP4BlockScaling(True, True, row_scaled_activation=True, precision="invariant"),
)


@pytest.mark.parametrize("mixture", [False, True])
@pytest.mark.parametrize("recipe", RECIPES, ids=["mxfp8", "mxfp4", "fp8", "nvfp4"])
def test_tokens_of_a_model_alone_in_a_batch_in_prefill_and_in_decode(recipe, mixture):
    sizes = {"width": 64, "heads": 2, "layers": 2, "vocabulary": 50, "dtype": "bfloat16"}
    trainer = rollout.Llama(Namespace(**sizes, length=80), mixture, True)
    tokens, at = torch.randint(50, (5, 70)), torch.arange(70)
    with te_mx.autocast(recipe=recipe):
        whole = trainer(tokens, at).detach()
        engine = copy.deepcopy(trainer)
        te_mx.freeze_weights(engine, drop_master=True, recipe=recipe)
        for model, run in ((trainer, torch.enable_grad), (engine, torch.no_grad)):
            with run():
                assert torch.equal(model(tokens, at), whole)
                assert torch.equal(model(tokens[3:4], at), whole[3:4])
                assert torch.equal(model(tokens[1:4, :7], at[:7]), whole[1:4, :7])
        for some in (slice(0, 5), slice(2, 3)):  # a cache with room behind the last token
            room = torch.full((4, len(tokens[some]), 80, 2, 32), 3.0, dtype=torch.bfloat16)
            caches = [(room[0], room[1]), (room[2], room[3])]
            with torch.no_grad():
                said = [engine(tokens[some, :64], at[:64], caches)]
                said += [
                    engine(tokens[some, i : i + 1], at[i : i + 1], caches) for i in (64, 65, 66)
                ]
                said.append(engine(tokens[some, 67:], at[67:], caches))
            assert torch.equal(torch.cat(said, 1), whole[some])


def test_the_example_agrees_to_the_bit(capsys):
    small = ["--layers", "1", "--width", "64", "--tokens", "4", "--batches", "1,5"]
    assert rollout.main([*small, "--ways", "invariant"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[2:8] for line in lines] == [
        [batch, "0", "0", same, "of", same] for batch, same in (("1", "4"), ("5", "20"))
    ] * 2
    with pytest.raises(SystemExit):
        rollout.main(["--ways", "fast"])
