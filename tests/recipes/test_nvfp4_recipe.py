"""NVFP4BlockScaling: what each GEMM multiplies, against te_mx.quantize and te_mx.gemm; what is kept
and what is refused."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import te_mx
from te_mx.backends.cpu.binding import native
from te_mx.recipe import Format, NVFP4BlockScaling, Settings, resolve_recipe

pytestmark = pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")
M, K, N = 75, 70, 41
TURNED = "nvfp4+rht16:0xd7e8d7e8"
RECIPES = [
    NVFP4BlockScaling(),
    NVFP4BlockScaling(disable_rht=True, disable_2d_quantization=True, keep_weight_columns=True),
    NVFP4BlockScaling(row_scaled_activation=True, disable_stochastic_rounding=True),
    NVFP4BlockScaling(nvfp4_4over6="weights", nvfp4_4over6_err_mode="MSE"),
    NVFP4BlockScaling(nvfp4_4over6="all", nvfp4_4over6_e4m3_use_256="weights"),
]


def columns(x, fmt, rule, **rounding):
    return te_mx.quantize(x, fmt=fmt, scale_rule=rule, rowwise=False, columnwise=True, **rounding)


@pytest.mark.parametrize("recipe", RECIPES, ids=range(len(RECIPES)))
@pytest.mark.parametrize("kind", ["Linear", "GroupedLinear"])
def test_a_layer_multiplies_what_the_recipe_says(recipe, kind):
    """A group has tensor scales of its own, and the seed of all."""
    s = recipe.settings
    rule, w_rule, g_rule = s.scale_rule, s.w_rule or s.scale_rule, s.gradient_rule
    layer = te_mx.Linear(K, N) if kind == "Linear" else te_mx.GroupedLinear(1, K, N)
    x, g = torch.randn(M, K, requires_grad=True), torch.randn(M, N)
    with te_mx.autocast(recipe=recipe):
        y = layer(x, *([[M]] if kind != "Linear" else []))
    torch.manual_seed(6)
    y.backward(g)
    torch.manual_seed(6)
    g_rule, random = g_rule.removesuffix("+sr"), {}
    if s.gradient_rule.endswith("+sr"):
        random = {"rounding": "stochastic", "seed": torch.randint(1 << 62, (1,)).item()}
    out = {"out_dtype": torch.float32}
    weight, bias = layer.parameters()
    w, x0 = weight.detach(), x.detach()
    wq = te_mx.quantize(w, fmt=s.w, scale_rule=w_rule)
    xq = te_mx.quantize(x0, fmt=s.x, scale_rule=rule)
    assert torch.equal(y.detach(), te_mx.gemm(wq, xq, bias=bias.detach(), **out).out)
    gq = te_mx.quantize(g, fmt=s.g, scale_rule=g_rule, **random)
    assert torch.equal(x.grad, te_mx.gemm(columns(w, s.w, w_rule), gq, "NN", **out).out)
    g_col = columns(g, s.g_columns, g_rule, **random)
    dw = te_mx.gemm(columns(x0, s.x_columns, rule), g_col, "NT", **out).out
    assert torch.equal(weight.grad, dw)
    torch.testing.assert_close(bias.grad, g.sum(0))


def test_what_settings_say():
    plain = Settings("nvfp4", "nvfp4_16x16", "nvfp4", "te", "adaptive", 8, None)
    turned = plain._replace(x_col=TURNED, g_col=TURNED, g_rule="te+sr")
    assert NVFP4BlockScaling().settings == resolve_recipe("nvfp4").settings == turned
    assert RECIPES[1].settings == plain._replace(w="nvfp4", g_rule="te+sr", keep_columns=True)
    assert RECIPES[2].settings == turned._replace(x="nvfp4_rows", g_rule="")
    assert RECIPES[3].settings == turned._replace(w_rule="te_4over6_mse")
    assert RECIPES[4].settings == turned._replace(
        scale_rule="te_4over6_448", w_rule="te_4over6", g_rule="te+sr"
    )
    rows = NVFP4BlockScaling(row_scaled_activation=True, disable_rht=True).settings
    assert (rows.x, rows.x_columns, rows.g_columns) == ("nvfp4_rows", "nvfp4", "nvfp4")


def test_it_is_a_value():
    recipe = NVFP4BlockScaling(disable_rht=True, nvfp4_4over6="all")
    assert repr(recipe) == "NVFP4BlockScaling(disable_rht=True, nvfp4_4over6='all')"
    assert eval(repr(recipe)) == copy.deepcopy(recipe) == pickle.loads(pickle.dumps(recipe))
    assert (
        recipe.nvfp4()
        and not recipe.mxfp8()
        and te_mx.common.recipe.NVFP4BlockScaling is (NVFP4BlockScaling)
    )
    assert not recipe.fp4_quant_bwd_grad.random_hadamard_transform
    assert recipe.fp4_quant_bwd_grad.stochastic_rounding
    assert recipe.fp4_quant_fwd_weight.fp4_2d_quantization
    assert not recipe.fp4_quant_fwd_inp.fp4_2d_quantization


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({"disable_rht": 1}, TypeError, "NVFP4BlockScaling.disable_rht must be a bool"),
        ({"row_scaled_activation": None}, TypeError, "row_scaled_activation must be a bool"),
        ({"nvfp4_4over6": "some"}, ValueError, "nvfp4_4over6 must be one of 'none', 'weights'"),
        ({"nvfp4_4over6_err_mode": "mae"}, ValueError, "err_mode must be one of 'MAE', 'MSE'"),
        ({"fp4_format": Format.E4M3}, ValueError, "fp4_format must be Format.E2M1"),
        ({"fp8_format": Format.HYBRID}, ValueError, "fp8_format must be Format.E4M3"),
        ({"fp8_mha": True}, NotImplementedError, "attention runs in the dtype of its inputs"),
        ({"precision": "invariant"}, ValueError, "inputs in nvfp4 have one tensor scale"),
        ({"precision": "fast"}, ValueError, "NVFP4BlockScaling.precision must be one of"),
    ],
)
def test_what_is_refused(fields, error, says):
    with pytest.raises(error, match=says):
        NVFP4BlockScaling(**fields)


def run(layer, x, recipe=None, through=None):
    layer.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    torch.manual_seed(3)
    with te_mx.autocast(recipe=recipe or NVFP4BlockScaling()):
        y = layer(x) if through is None else through(layer, x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


def test_recomputation_and_compiling_change_nothing():
    layer, x = te_mx.LayerNormLinear(64, 48), torch.randn(33, 64)
    plain = run(layer, x)
    again = run(layer, x, through=lambda m, t: checkpoint(m, t, use_reentrant=False))
    compiled = run(layer, x, through=torch.compile(lambda m, t: m(t), backend="aot_eager"))
    for other in (again, compiled):
        assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))


def test_a_converted_model_and_a_bound_recipe():
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 64))
    te_mx.convert_model(model, recipe="nvfp4", filter_fn=lambda _, name: name != "2")
    x = torch.randn(8, 64)
    y = model(x)
    assert (te_mx.audit(model)["0"].fprop == "reference") == (native() is None)
    te_mx.revert_model(model)
    plain = model(x)
    assert 0 < (y - plain).norm() < 0.3 * plain.norm()
