"""MXFP4BlockScaling: what each GEMM multiplies, against te_mx.quantize and te_mx.gemm; seeds; what
is kept and what is refused."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import te_mx
from te_mx.recipe import BlockScaling, MXFP4BlockScaling, MXFP8BlockScaling, Settings

pytestmark = pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")
M, K, N = 75, 70, 41
FOUR, EIGHT = "mxfp4", "mxfp8_e4m3"
ALL = MXFP4BlockScaling(g=FOUR)
RECIPES = [
    MXFP4BlockScaling(),
    ALL,
    MXFP4BlockScaling(x="e4m3", scale_rule="even", keep_weight_columns=True),
    MXFP4BlockScaling(w=EIGHT, g=FOUR, hadamard=16, hadamard_signs=7, scale_rule="floor"),
    MXFP4BlockScaling(g="mxfp8_e5m2", x_wgrad=FOUR, hadamard=32, stochastic_rounding=True),
    MXFP4BlockScaling(g=FOUR, stochastic_rounding=False, hadamard=0, w_dgrad=EIGHT),
]


def drawn() -> int:
    """The seed that a backward pass draws next."""
    return torch.randint(1 << 62, (1,)).item()


def columns(x: torch.Tensor, fmt: str, rule: str, **rounding) -> te_mx.MXTensor:
    return te_mx.quantize(x, fmt=fmt, scale_rule=rule, rowwise=False, columnwise=True, **rounding)


@pytest.mark.parametrize("recipe", RECIPES, ids=range(len(RECIPES)))
def test_a_linear_layer_multiplies_what_the_recipe_says(recipe):
    settings, rule = recipe.settings, recipe.scale_rule
    layer = te_mx.Linear(K, N, dtype=torch.float32)
    x, g = torch.randn(M, K, requires_grad=True), torch.randn(M, N)
    with te_mx.autocast(recipe=recipe):
        y = layer(x)
    torch.manual_seed(6)
    y.backward(g)
    torch.manual_seed(6)
    random = {"rounding": "stochastic", "seed": drawn()} if "+sr" in settings.g_rule else {}

    out = {"out_dtype": torch.float32}
    w, b, x0 = layer.weight.detach(), layer.bias.detach(), x.detach()
    xq = te_mx.quantize(x0, fmt=recipe.x, scale_rule=rule)
    wq = te_mx.quantize(w, fmt=recipe.w, scale_rule=rule)
    assert torch.equal(y.detach(), te_mx.gemm(wq, xq, bias=b, **out).out)
    gq = te_mx.quantize(g, fmt=recipe.g, scale_rule=rule, **random)
    dx = te_mx.gemm(columns(w, settings.w_columns, rule), gq, "NN", **out).out
    assert torch.equal(x.grad, dx)
    g_col = columns(g, settings.g_columns, rule, **random)
    dw = te_mx.gemm(columns(x0, settings.x_columns, rule), g_col, "NT", **out).out
    assert torch.equal(layer.weight.grad, dw)
    torch.testing.assert_close(layer.bias.grad, g.sum(0))


def test_what_settings_say():
    plain = Settings(FOUR, FOUR, EIGHT, "rceil", "adaptive", 8, None)
    assert MXFP4BlockScaling().settings == plain._replace(x_col=EIGHT, w_col=EIGHT)
    turned = "mxfp4+rht32:0x5b39a1c6"
    settings = plain._replace(g=FOUR, x_col=turned, g_col=turned, g_rule="rceil+sr")
    assert ALL.settings == settings and settings.w_columns == FOUR
    mixed = MXFP4BlockScaling(x="e4m3", w="mxfp4", g="mxfp8_e5m2", w_dgrad="mxfp4")
    assert mixed.settings == plain._replace(x=EIGHT, g="mxfp8_e5m2")
    assert mixed.settings.is_uniform and not ALL.settings.is_uniform
    assert (plain.x_columns, plain.g_columns, plain.gradient_rule) == (FOUR, EIGHT, "rceil")


def test_it_is_a_value():
    recipe = MXFP4BlockScaling(g=te_mx.formats.get("mxfp4"), hadamard=16)
    assert repr(recipe) == "MXFP4BlockScaling(x='mxfp4', w='mxfp4', g='mxfp4', hadamard=16)"
    assert eval(repr(recipe)) == copy.deepcopy(recipe) == pickle.loads(pickle.dumps(recipe))
    assert hash(recipe) == hash(MXFP4BlockScaling(g="mxfp4", hadamard=16))
    assert te_mx.recipe.resolve_recipe(recipe) is recipe


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({"x": "mxfp6_e2m3"}, ValueError, "MXFP4BlockScaling.x must be one of 'mxfp4'"),
        ({"g": "fp8_e4m3_1x128"}, ValueError, "MXFP4BlockScaling.g must be one of"),
        ({"w": "mxfp4+rht32:0x1"}, ValueError, "MXFP4BlockScaling.w must be one of"),
        ({"w_dgrad": "mxfp8_e5m2"}, ValueError, "MXFP4BlockScaling.w_dgrad must be one of"),
        ({"scale_rule": "rceil+sr"}, ValueError, "scale_rule must be one of 'rceil', 'floor'"),
        ({"stochastic_rounding": 1}, TypeError, "stochastic_rounding must be a bool"),
        ({"hadamard": 64}, ValueError, "hadamard must be 16, 32, 0 for none, or None, got 64"),
        ({"hadamard_signs": -1}, ValueError, "hadamard_signs must be 32 bits"),
        ({"hadamard_signs": 1.0}, TypeError, "hadamard_signs must be an int"),
        ({"precision": "fast"}, ValueError, "MXFP4BlockScaling.precision must be one of"),
    ],
)
def test_what_is_refused(fields, error, says):
    with pytest.raises(error, match=says):
        MXFP4BlockScaling(**fields)


def test_no_other_recipe_rounds_stochastically():
    with pytest.raises(ValueError, match=r"scale_rule must be one of 'rceil', 'floor', 'even'"):
        BlockScaling(g=FOUR, scale_rule="rceil+sr")
    with pytest.raises(ValueError, match="scale_rule must be one of"):
        MXFP8BlockScaling(scale_rule="rceil+sr")


def gradients(layer, x: torch.Tensor, through=None, recipe=ALL) -> list[torch.Tensor]:
    layer.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    with te_mx.autocast(recipe=recipe):
        y = layer(x) if through is None else through(layer, x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


def test_backward_passes_draw_and_seeds_repeat_them():
    layer, x = te_mx.LayerNormMLP(64, 96, activation="swiglu"), torch.randn(40, 64)
    made = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        made.append(gradients(layer, x))
    first, again, other = made
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert torch.equal(first[0], other[0])  # forward draws nothing
    assert not any(torch.equal(a, b) for a, b in zip(first[1:3], other[1:3], strict=True))


def test_recomputation_changes_nothing():
    layer, x = te_mx.LayerNormLinear(64, 48), torch.randn(33, 64)
    torch.manual_seed(3)
    plain = gradients(layer, x)
    torch.manual_seed(3)
    again = gradients(layer, x, lambda module, t: checkpoint(module, t, use_reentrant=False))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_a_backward_pass_that_quantizes_nothing_draws_nothing(activation, override):
    layer, x = te_mx.LayerNormMLP(64, 96, activation=activation), torch.randn(40, 64)
    made, state = [], torch.get_rng_state()
    for stochastic in (True, False):
        recipe = MXFP4BlockScaling(
            g=FOUR, backward_override=override, stochastic_rounding=stochastic
        )
        made.append(gradients(layer, x, recipe=recipe))
        assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


@pytest.mark.parametrize(
    "fields, factor",
    [({"x_wgrad": FOUR}, 1), ({"x_wgrad": EIGHT}, 1), ({"backward_override": "dequantized"}, 0.5)],
)
def test_bytes_that_are_kept_of_an_input(fields, factor):
    """Columnwise codes lie one a byte, rowwise ones two; of the weight nothing, or as rowwise."""
    model = torch.nn.Sequential(te_mx.Linear(96, 64, bias=False))
    with te_mx.record_saved(model), te_mx.autocast(recipe=MXFP4BlockScaling(**fields)):
        model(torch.randn(128, 96, requires_grad=True))
    rows = 128 if factor == 1 else 128 + 64
    kept = te_mx.audit(model, memory=True)["0"].saved.bytes
    assert kept == rows * 96 * factor + rows * 96 // 32


def test_a_bias_that_trains_alone():
    layer = te_mx.LayerNormMLP(64, 96, activation="swiglu")
    for name, value in layer.named_parameters():
        value.requires_grad_(name == "fc1_bias")
    x, g = torch.randn(40, 64), torch.randn(40, 64)
    with te_mx.autocast(recipe=ALL):
        layer(x).backward(g)
    got, layer.fc1_bias.grad = layer.fc1_bias.grad, None
    layer(x).backward(g)
    assert (got - layer.fc1_bias.grad).norm() < 0.5 * layer.fc1_bias.grad.norm()


def test_all_tokens_of_groups_share_one_draw():
    """Whether the groups run together, or one by one because wgrad is in high precision."""
    made = []
    for high_precision in (False, True):
        torch.manual_seed(0)
        layer = te_mx.GroupedLinear(3, 64, 96)
        x, grad = torch.randn(45, 64, requires_grad=True), torch.randn(45, 96)
        recipe = MXFP4BlockScaling(g=FOUR, wgrad_with_hp=high_precision)
        with te_mx.autocast(recipe=recipe):
            y = layer(x, [7, 0, 31])
        y.backward(grad)
        made.append(x.grad)
    assert torch.equal(*made)


def test_the_mean_of_stochastic_gradients_is_nearly_the_gradient():
    """Of 24 passes; those of rounding to nearest keep their error."""
    layer, x = te_mx.Linear(64, 64, bias=False), torch.randn(64, 64)
    g = torch.randn(64, 64)
    exact = g.t() @ x
    errors = {}
    for name, recipe in (
        ("stochastic", MXFP4BlockScaling(x=EIGHT, g=FOUR, x_wgrad=EIGHT)),
        ("nearest", MXFP4BlockScaling(x=EIGHT, g=FOUR, x_wgrad=EIGHT, stochastic_rounding=False)),
    ):
        total = torch.zeros(64, 64)
        for _ in range(24):
            layer.weight.grad = None
            with te_mx.autocast(recipe=recipe):
                layer(x).backward(g)
            total += layer.weight.grad
        errors[name] = ((total / 24 - exact).norm() / exact.norm()).item()
    assert errors["stochastic"] < 0.05 < 0.08 < errors["nearest"]


def test_groups_draw_once_for_all_and_keep_inside_their_rows():
    layer = te_mx.GroupedLinear(3, 64, 48, dtype=torch.float32)
    x, splits = torch.randn(70, 64, requires_grad=True), [33, 0, 37]
    g = torch.randn(70, 48)
    torch.manual_seed(2)
    with te_mx.autocast(recipe=ALL):
        y = layer(x, splits)
    y.backward(g)
    torch.manual_seed(2)
    random = {"rounding": "stochastic", "seed": drawn()}
    gq = te_mx.quantize(g, fmt=FOUR, **random)
    for i, (start, end) in enumerate(((0, 33), (33, 33), (33, 70))):
        weight = getattr(layer, f"weight{i}")
        if start == end:
            assert weight.grad.eq(0).all()
            continue
        rows = te_mx.MXTensor(
            (end - start, 48), FOUR, rowwise_data=gq.rowwise_data[start:end],
            rowwise_scale=gq.rowwise_scale[start:end],
        )  # fmt: skip
        wq = columns(weight.detach(), FOUR, "rceil")
        dx = te_mx.gemm(wq, rows, "NN", out_dtype=torch.float32).out
        assert torch.equal(x.grad[start:end], dx)
        exact = g[start:end].t() @ x.detach()[start:end]
        assert (weight.grad - exact).norm() < 0.3 * exact.norm()


@pytest.mark.parametrize("recipe", [RECIPES[0], ALL], ids=["forward", "all"])
def test_frozen_weights_come_back_with_their_recipe(recipe, tmp_path):
    layer, x = te_mx.Linear(64, 48), torch.randn(9, 64)
    te_mx.freeze_weights(layer, recipe=recipe, drop_master=True)
    with te_mx.autocast(recipe=recipe), torch.no_grad():
        expected = layer(x)
    torch.save(layer.state_dict(), tmp_path / "codes.pt")
    other = te_mx.Linear(64, 48)
    other.load_state_dict(torch.load(tmp_path / "codes.pt", weights_only=True))
    assert other._source.settings == recipe.settings._replace(keep_columns=False)
    with te_mx.autocast(recipe=recipe), torch.no_grad():
        assert torch.equal(other(x), expected)


def test_compiled_layers_draw_too():
    layer, x = te_mx.Linear(64, 48), torch.randn(33, 64)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    made = []
    for seed, module in ((4, layer), (4, compiled), (5, compiled)):
        torch.manual_seed(seed)
        made.append(gradients(layer, x, lambda _, t, module=module: module(t)))
    plain, same, other = made
    assert all(torch.equal(a, b) for a, b in zip(plain, same, strict=True))
    assert torch.equal(plain[0], other[0]) and not torch.equal(plain[2], other[2])
