"""precision="invariant" on Hopper: which kernels run, on which operands, and who declines."""

from __future__ import annotations

import pytest
import torch
from emulated_hopper import CALLS

import te_mx
from te_mx.autograd.linear_recipe import roles
from te_mx.recipe import Float8BlockScaling, MXFP4BlockScaling, MXFP8BlockScaling

pytestmark = pytest.mark.usefixtures("on_hopper")

RECIPES = {
    "sm90_invariant": [MXFP8BlockScaling, MXFP4BlockScaling],
    "sm90_blockwise": [Float8BlockScaling],
}
CASES = [(name, kind(precision="invariant")) for name, kinds in RECIPES.items() for kind in kinds]


@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_forward_alone_runs_so(name, recipe):
    layer, x = te_mx.Linear(160, 96, bias=False), torch.randn(40, 160)
    with te_mx.autocast(recipe=recipe):
        y = layer(x)
        y.square().sum().backward()
        row = te_mx.audit(layer)["(root)"]
        usual = "sm90_adaptive" if name == "sm90_invariant" else name
        assert (row.fprop, row.wgrad) == (name, usual)
        torch.testing.assert_close(y, x @ layer.weight.t(), rtol=0.5, atol=0.5)
        te_mx.freeze_weights(layer, drop_master=True, recipe=recipe)
        torch.testing.assert_close(layer(x[3:5]), y[3:5].detach(), rtol=1e-5, atol=1e-5)
        few = name if recipe.settings.w == "mxfp4" else "sm90_rows"
        assert te_mx.audit(layer)["(root)"].fprop == few


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_both_products_of_a_block_run_so(name, recipe, activation):
    block = te_mx.LayerNormMLP(128, 256, activation=activation, params_dtype=torch.bfloat16)
    x = torch.randn(40, 128, dtype=torch.bfloat16)
    with te_mx.autocast(recipe=recipe):
        block(x)
        assert [row.fprop for row in te_mx.audit(block)] == [name, name]


def test_weights_lie_as_ever_and_x_is_aligned_by_itself():
    said = te_mx.explain(m=96, n=40, k=160, precision="invariant")  # the CPU stands for it
    assert said.kernel == "sm90_invariant"
    assert "'invariant'" in dict(said.declined)["sm90_adaptive"]
    recipe = MXFP8BlockScaling(precision="invariant")
    layer = te_mx.Linear(160, 96)
    te_mx.freeze_weights(layer, recipe=recipe)
    with te_mx.autocast(recipe=recipe), torch.no_grad():
        layer(torch.randn(40, 160))
    assert "mxfp8_e4m3@sm90_frozen" in te_mx.audit(layer)["(root)"].lies


def test_inputs_are_aligned_by_the_quantizer():
    """Beside columns for wgrad, whose tiles are as ever; those of MXFP4 lie plain before."""
    cpu = torch.device("cpu")
    for kind, row in ((MXFP8BlockScaling, "sm90:9"), (MXFP4BlockScaling, "rows")):
        x = roles(cpu, kind(precision="invariant").settings).x
        assert x.row.endswith(f"@{row}") and x.col.endswith("@sm90:8")


@pytest.mark.parametrize("recipe", [MXFP8BlockScaling, MXFP4BlockScaling])
def test_groups_run_in_one_launch_or_where_the_host_knows_them(recipe):
    layer = te_mx.GroupedLinear(2, 160, 96, bias=False)
    x, fp4 = torch.randn(40, 160, requires_grad=True), recipe is MXFP4BlockScaling
    recipe = recipe(precision="invariant")
    with te_mx.autocast(recipe=recipe):
        y = layer(x, [7, 33])
        y.square().sum().backward()
    along_k = [call.args.along_k for call in CALLS if call.name == "gemm_grouped"]
    assert along_k.count(False) == 2 - fp4 and along_k.count(True) == 1
    expected = torch.cat([x[:7] @ layer.weight0.t(), x[7:] @ layer.weight1.t()])
    torch.testing.assert_close(y, expected, rtol=0.5, atol=1.5 if fp4 else 0.5)
    for drop in (False, True):
        te_mx.freeze_weights(layer, drop_master=drop, recipe=recipe)
        with te_mx.autocast(recipe=recipe), torch.no_grad():
            torch.testing.assert_close(layer(x, [7, 33]), y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("grow", [False, True])
def test_a_snapshot_lies_in_tiles_whatever_lies_aside_of_them(grow, monkeypatch):
    recipe = MXFP8BlockScaling(precision="invariant")
    trainer, engine = (te_mx.Linear(160, 96, bias=False) for _ in range(2))
    for one in (trainer, engine)[: 1 if grow else 2][-1:]:
        one.weight.data[:, ::32] *= 100  # what is aligned to it loses bits, which lie aside
    te_mx.freeze_weights(engine, drop_master=True, recipe=recipe)
    assert engine._lies["weight"] == "sm90_frozen"
    places = engine.weight_codes.data_ptr(), engine.weight_scale.data_ptr()
    with monkeypatch.context() as nothing:  # tiles are not undone
        nothing.setattr(engine, "_codes", None)
        te_mx.rollout.load_(engine, te_mx.rollout.snapshot(trainer, recipe=recipe))
    assert places == (engine.weight_codes.data_ptr(), engine.weight_scale.data_ptr())
    assert te_mx.rollout.digest(engine) == te_mx.rollout.digest(trainer, recipe=recipe)
    x = torch.randn(7, 160)
    with te_mx.autocast(recipe=recipe), torch.no_grad():
        assert torch.equal(engine(x), trainer(x))
