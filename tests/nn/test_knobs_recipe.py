"""Recipe fields of the backward pass: backward_override, wgrad_with_hp, one_copy_weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import FINITE_KINDS, RULES, SEEDS, SIZES, tensor
from torch.utils.checkpoint import checkpoint

import te_mx
from te_mx import _ops as ops
from te_mx.autograd import linear_recipe
from te_mx.dispatch import run as dispatch
from te_mx.recipe import Format, MXFP8BlockScaling

PLAIN = MXFP8BlockScaling()
HIGH = MXFP8BlockScaling(backward_override="high_precision")
DEQUANTIZED = MXFP8BlockScaling(backward_override="dequantized")
HP_WGRAD = MXFP8BlockScaling(wgrad_with_hp=True)
KEPT_HP_WGRAD = MXFP8BlockScaling(wgrad_with_hp=True, keep_weight_columns=True)
HYBRID_HP_WGRAD = MXFP8BlockScaling(fp8_format=Format.HYBRID, wgrad_with_hp=True)
ONE_COPY = MXFP8BlockScaling(one_copy_weights=True)
FLOOR_ONE_COPY = MXFP8BlockScaling(scale_rule="floor", one_copy_weights=True)
KEPT_ONE_COPY = MXFP8BlockScaling(one_copy_weights=True, keep_weight_columns=True)
ALL = [HIGH, DEQUANTIZED, HP_WGRAD, HYBRID_HP_WGRAD, ONE_COPY, FLOOR_ONE_COPY]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def run(layer, x, grad, recipe=None, forward=None, **kwargs):
    """Output, and gradients of x, weight and bias."""
    layer.zero_grad()
    x = x.detach().clone().requires_grad_()
    with te_mx.autocast(recipe=recipe):
        y = (layer if forward is None else forward)(x, **kwargs)
    y.backward(grad)
    bias = None if layer.bias is None else layer.bias.grad
    return [y.detach(), x.grad, layer.weight.grad, bias]


def assert_same(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def by_hand(layer, x, grad, recipe):
    """dx and dw out of the public functions and plain torch."""
    rule, fmt = recipe.scale_rule, recipe.settings.g
    g2, x2 = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
    w = layer.weight.detach()
    row = {"scale_rule": rule}
    col = {"rowwise": False, "columnwise": True, "scale_rule": rule}
    gq = te_mx.quantize(g2, fmt=fmt, columnwise=True, scale_rule=rule)
    if recipe.backward_override == "high_precision":
        return g2 @ w.to(g2.dtype), g2.t() @ x2
    if recipe.backward_override == "dequantized":
        x2, w = (te_mx.quantize(t, **row).dequantize(g2.dtype) for t in (x2, w))
        return g2 @ w, g2.t() @ x2
    if recipe.one_copy_weights:
        w = te_mx.quantize(w, **row).dequantize(torch.bfloat16)
    dx = te_mx.gemm(te_mx.quantize(w, **col), gq, "NN", out_dtype=x.dtype).out
    if recipe.wgrad_with_hp:
        return dx, g2.t() @ x2
    return dx, te_mx.gemm(te_mx.quantize(x2, **col), gq, "NT", out_dtype=layer.weight.dtype).out


@given(
    st.lists(SIZES.filter(bool), max_size=2), SIZES.filter(bool), SIZES.filter(bool),
    st.sampled_from(ALL), st.booleans(), SEEDS,
)  # fmt: skip
def test_gradients_are_what_the_recipe_says(leading, k, n, recipe, bias, seed):
    torch.manual_seed(seed)
    x_dtype, w_dtype = DTYPES[seed % 3], DTYPES[seed // 3 % 3]
    layer = te_mx.Linear(k, n, bias, dtype=w_dtype)
    x, grad = torch.randn(*leading, k).to(x_dtype), torch.randn(*leading, n).to(x_dtype)
    y, dx, dw, db = run(layer, x, grad, recipe)
    dx2, dw2 = by_hand(layer, x, grad, recipe)
    assert (dx.dtype, dw.dtype, dx.shape) == (x_dtype, w_dtype, x.shape)
    assert torch.equal(dx.reshape(-1, k), dx2)
    assert torch.equal(dw, dw2.to(w_dtype))
    # The forward does not depend on how the backward runs.
    plain = MXFP8BlockScaling(scale_rule=recipe.scale_rule)
    expected = run(layer, x, grad, plain)
    assert torch.equal(y, expected[0])
    if bias:  # two fp32 sums in different orders, rounded to the dtype of the bias
        rows = grad.reshape(-1, n).double()
        bound = 2 * len(rows) * 2.0**-24 * rows.abs().sum(0)
        bound += torch.finfo(w_dtype).eps * (db.double().abs() + bound)
        assert ((db.double() - expected[3].double()).abs() <= bound).all()


def test_high_precision_gradients_are_those_of_a_plain_layer():
    layer, x, grad = te_mx.Linear(70, 33), torch.randn(3, 5, 70), torch.randn(3, 5, 33)
    _, dx, dw, db = run(layer, x, grad, HIGH)
    layer.zero_grad()
    x.requires_grad_()
    layer(x).backward(grad)
    assert_same([dx, dw], [x.grad, layer.weight.grad])
    torch.testing.assert_close(db, layer.bias.grad)


def test_torch_autocast_decides_the_dtype_of_the_override():
    layer, x = te_mx.Linear(70, 33), torch.randn(5, 70, requires_grad=True)
    with te_mx.autocast(recipe=HIGH), torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    grad = torch.randn(5, 33).bfloat16()
    y.backward(grad)
    assert torch.equal(x.grad, (grad @ layer.weight.bfloat16()).float())
    assert torch.equal(layer.weight.grad, (grad.t() @ x.bfloat16()).float())


@pytest.mark.parametrize("recipe", ALL)
@pytest.mark.parametrize("bias", [True, False])
def test_zero_sizes(recipe, bias):
    for rows, k, n in [(0, 40, 8), (5, 0, 8), (5, 40, 0)]:
        layer = te_mx.Linear(k, n, bias)
        _, dx, dw, _ = run(layer, torch.randn(rows, k), torch.randn(rows, n), recipe)
        assert dx.shape == (rows, k) and torch.equal(dw, torch.zeros(n, k))


# ------------------------------------------------------------------- what is quantized and saved
@pytest.fixture
def quantized(monkeypatch):
    """(shape, rowwise, columnwise) of every quantize call."""
    made = []
    quantize = dispatch.quantize

    def record(what):
        made.append((tuple(what.x.shape), bool(what.row), bool(what.col)))
        return quantize(what)

    monkeypatch.setattr(dispatch, "quantize", record)
    return made


M, K, N = 6, 40, 24
X, W, G = (M, K), (N, K), (M, N)


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (HIGH, [(X, True, False), (W, True, False)]),
        (DEQUANTIZED, [(X, True, False), (W, True, False)]),
        (HP_WGRAD, [(X, True, False), (W, True, False), (G, True, False), (W, False, True)]),
        (KEPT_HP_WGRAD, [(X, True, False), (W, True, True), (G, True, False)]),
        (ONE_COPY, [(X, True, True), (W, True, False), (G, True, True), (W, False, True)]),
        (KEPT_ONE_COPY, [(X, True, True), (W, True, False), (G, True, True), (W, False, True)]),
    ],
)
def test_only_what_is_needed_is_quantized(by_steps, quantized, recipe, expected):
    run(te_mx.Linear(K, N), torch.randn(M, K), torch.randn(M, N), recipe)
    assert sorted(quantized) == sorted(expected)


@pytest.mark.parametrize(
    ("recipe", "codes", "tensors"),
    [
        (PLAIN, 1, 1), (HIGH, 0, 2), (DEQUANTIZED, 2, 0), (HP_WGRAD, 0, 2), (KEPT_HP_WGRAD, 1, 1),
        (ONE_COPY, 2, 0),
    ],
)  # fmt: skip
def test_what_is_saved(recipe, codes, tensors):
    layer = te_mx.Linear(1024, 1024, dtype=torch.bfloat16)
    x = torch.randn(1024, 1024, dtype=torch.bfloat16, requires_grad=True)
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with te_mx.autocast(recipe=recipe), hooks:
        layer(x)
    size = x.numel()
    got = sum(t.numel() for t in saved if t.dtype == torch.uint8)
    assert got == codes * (size + size // 32)
    assert sum(t.numel() for t in saved if t.dtype != torch.uint8) == tensors * size
    held = {t.data_ptr() for t in saved if t.dtype != torch.uint8 and t.numel()}
    assert held <= {x.data_ptr(), layer.weight.data_ptr()}  # no copies


def test_a_weight_that_changed_is_refused_where_it_was_saved():
    layer, x = te_mx.Linear(40, 8), torch.randn(5, 40, requires_grad=True)
    with te_mx.autocast(recipe=HIGH):
        y = layer(x)
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_audit_says_high_precision():
    layer = te_mx.Linear(40, 8)
    for recipe, expected in [
        (HIGH, (True, True)), (DEQUANTIZED, (True, True)), (HP_WGRAD, (False, True)),
        (ONE_COPY, (False, False)), (PLAIN, (False, False)),
    ]:  # fmt: skip
        run(layer, torch.randn(5, 40), torch.randn(5, 8), recipe)
        row = te_mx.audit(layer)["(root)"]
        assert row.fprop != "high precision"
        assert (row.dgrad == "high precision", row.wgrad == "high precision") == expected


# -------------------------------------------------------------------------- one-copy weights
def test_one_copy_keeps_one_copy():
    layer, x = te_mx.Linear(1024, 512), torch.randn(3, 1024, requires_grad=True)
    with te_mx.autocast(recipe=ONE_COPY):
        layer(x, is_first_microbatch=True)
    kept = layer._source.kept["weight"]
    assert kept.col is None and kept.row.packed is None
    nbytes = kept.row.codes.numel() + kept.row.scales.numel()
    assert nbytes == layer.weight.numel() * 33 // 32  # 1.03 bytes a parameter
    with te_mx.autocast():
        layer(x, is_first_microbatch=True)
    kept = layer._source.kept["weight"]
    assert kept.col is not None
    assert kept.row.codes.numel() + kept.row.scales.numel() == nbytes
    assert kept.col.codes.numel() + kept.col.scales.numel() == nbytes


@given(SIZES.filter(bool), SIZES.filter(bool), st.sampled_from(FINITE_KINDS), RULES, SEEDS)
def test_one_copy_moves_only_what_its_column_block_cannot_hold(n, k, kind, rule, seed):
    w = tensor(kind, n, k, seed, torch.float32).clamp(-(2.0**127), 2.0**127)  # decodes to finite
    settings = MXFP8BlockScaling(scale_rule=rule, one_copy_weights=True).settings
    row, nothing = linear_recipe.weight_operands(None, w, settings, True)
    assert nothing is None
    col = linear_recipe.columns_of(row, settings)
    values = te_mx.quantize(w, scale_rule=rule).dequantize(torch.float64)
    derived = ops.dequantize_2d(col, torch.float64).t()
    scale = torch.exp2(col.scales.double() - 127).repeat_interleave(32, 0)[:n]
    values = values.clamp(-448 * scale, 448 * scale)  # the floor rule saturates
    # Half a step of E4M3's subnormals at the scale of the column block, and of bf16's.
    assert ((derived - values).abs() <= scale * 2.0**-10 + 2.0**-134).all()
    normal = (values.abs() >= scale * 2.0**-6) & (values.abs() >= 2.0**-126)
    assert torch.equal(derived[normal], values[normal])


def test_one_copy_changes_dgrad_only_and_by_little():
    layer, x, grad = te_mx.Linear(512, 384), torch.randn(128, 512), torch.randn(128, 384)
    with torch.no_grad():
        layer.weight.mul_(torch.exp2(torch.randint(-12, 12, (384, 1)).float()))  # outlier channels
    one, two = run(layer, x, grad, ONE_COPY), run(layer, x, grad, PLAIN)
    assert_same([one[0], *one[2:]], [two[0], *two[2:]])
    assert not torch.equal(one[1], two[1])
    exact = grad @ layer.weight.detach()
    errors = [((t[1] - exact).norm() / exact.norm()).item() for t in (one, two)]
    assert abs(errors[0] / errors[1] - 1) < 0.02


@pytest.mark.parametrize("recipe", ALL)
def test_microbatch_caching_changes_nothing(recipe):
    layer, x, grad = te_mx.Linear(70, 33), torch.randn(20, 70), torch.randn(20, 33)
    expected = run(layer, x, grad, recipe)
    for first in (True, False, False):
        assert_same(run(layer, x, grad, recipe, is_first_microbatch=first), expected)


@pytest.mark.parametrize("after", ALL)
@pytest.mark.parametrize("before", [PLAIN, *ALL])
def test_a_kept_weight_serves_only_recipes_of_the_same_result(before, after):
    layer, x, grad = te_mx.Linear(70, 33), torch.randn(20, 70), torch.randn(20, 33)
    run(layer, x, grad, before, is_first_microbatch=True)
    expected = run(layer, x, grad, after)
    assert_same(run(layer, x, grad, after, is_first_microbatch=False), expected)


@pytest.mark.parametrize("recipe", ALL)
def test_frozen_weights(recipe):
    layer, x, grad = te_mx.Linear(70, 33), torch.randn(20, 70), torch.randn(20, 33)
    expected = run(layer, x, grad, recipe)
    te_mx.freeze_weights(layer, recipe=recipe)
    y, dx, dw, db = run(layer, x, grad, recipe)
    assert dw is None and db is None
    assert_same([y, dx], expected[:2])


# ------------------------------------------------------------- recomputation, compile, hopper
@pytest.mark.parametrize("recipe", ALL)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(recipe, reentrant):
    layer, x, grad = te_mx.Linear(70, 33), torch.randn(20, 70), torch.randn(20, 33)

    def forward(x):
        return checkpoint(layer, x, use_reentrant=reentrant)

    assert_same(run(layer, x, grad, recipe, forward), run(layer, x, grad, recipe))


@pytest.mark.parametrize("recipe", ALL)
def test_compiled(recipe):
    torch._dynamo.reset()
    layer, x, grad = te_mx.Linear(70, 33), torch.randn(20, 70), torch.randn(20, 33)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_same(run(layer, x, grad, recipe, compiled), run(layer, x, grad, recipe))


@pytest.mark.parametrize("recipe", ALL)
def test_double_backward_is_refused(recipe):
    layer, x = te_mx.Linear(40, 8), torch.randn(5, 40, requires_grad=True)
    with te_mx.autocast(recipe=recipe):
        y = layer(x)
    (dx,) = torch.autograd.grad(y, x, torch.randn(5, 8), create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dx.square().sum().backward()


@pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")
def test_packed_operands_do_not_replace_the_rowwise_codes(monkeypatch):
    """As on Hopper, where the quantizer packs; what backward decodes must be plain codes."""
    layer, x, grad = te_mx.Linear(70, 33), torch.randn(20, 70), torch.randn(20, 33)
    expected = run(layer, x, grad, DEQUANTIZED)
    derived = by_hand(layer, x, grad, ONE_COPY)[0]
    form = ops.OperandLayouts("mxfp8_e4m3@sm90:8", "mxfp8_e4m3@sm90:8")
    monkeypatch.setattr(linear_recipe, "roles", lambda *_: linear_recipe.Roles(form, form, form))
    for first in (None, True, False):
        got = run(layer, x, grad, DEQUANTIZED, is_first_microbatch=first)
        assert_same(got[1:3], expected[1:3])
        got = run(layer, x, grad, ONE_COPY, is_first_microbatch=first)
        torch.testing.assert_close(got[1], derived, rtol=2e-3, atol=2e-3)


# ---------------------------------------------------------------------------------- the recipe
def test_recipe_fields_are_checked():
    with pytest.raises(ValueError, match="backward_override='dequantized' already says"):
        MXFP8BlockScaling(backward_override="dequantized", wgrad_with_hp=True)
    for name in ("wgrad_with_hp", "one_copy_weights", "keep_weight_columns"):
        with pytest.raises(TypeError, match=f"{name} must be a bool, got 1"):
            MXFP8BlockScaling(**{name: 1})
    assert "one_copy_weights=True" in repr(ONE_COPY)
    assert len({recipe.settings for recipe in (PLAIN, *ALL)}) == len(ALL) + 1
