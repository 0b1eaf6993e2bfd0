"""The backward of te_mx.Linear: gradients, what is skipped, what is saved, graph rules."""

from __future__ import annotations

import oracles
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import SEEDS, SIZES
from torch import nn
from torch.utils.checkpoint import checkpoint

import te_mx
from te_mx.autograd import linear
from te_mx.dispatch import run as dispatch
from te_mx.recipe import Float8BlockScaling, Format, MXFP4BlockScaling, MXFP8BlockScaling

E4M3 = MXFP8BlockScaling()
HYBRID = MXFP8BlockScaling(fp8_format=Format.HYBRID)
BLOCKWISE = Float8BlockScaling()
FP32_SCALES = Float8BlockScaling(use_f32_scales=True, fp8_format=Format.HYBRID)
FORWARD_4 = MXFP4BlockScaling()
ALL_4 = MXFP4BlockScaling(g="mxfp4", stochastic_rounding=False)
FLOOR = MXFP8BlockScaling(fp8_format=Format.HYBRID, scale_rule="floor")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def run(layer, x, grad, recipe=None, **kwargs):
    """Forward and backward; gradients of x, weight and bias."""
    layer.zero_grad()
    x = x.detach().clone().requires_grad_()
    with te_mx.autocast(recipe=recipe):
        y = layer(x, **kwargs)
    y.backward(grad)
    return x.grad, layer.weight.grad, None if layer.bias is None else layer.bias.grad


@pytest.fixture
def calls(monkeypatch, by_steps):
    """Records what the layer quantizes and multiplies: (rows, cols, rowwise, columnwise, col_sum),
    (n, m, k)."""
    made = {"quantize": [], "gemm": []}
    quantize, gemm = dispatch.quantize, dispatch.gemm

    def record_quantize(what):
        fmt = (what.row or what.col).partition("@")[0]
        made["quantize"].append((fmt, *what.x.shape, bool(what.row), bool(what.col), what.col_sum))
        return quantize(what)

    def record_gemm(lhs, rhs, *args):
        made["gemm"].append((lhs.rows, rhs.rows, lhs.k))
        return gemm(lhs, rhs, *args)

    monkeypatch.setattr(dispatch, "quantize", record_quantize)
    monkeypatch.setattr(dispatch, "gemm", record_gemm)
    monkeypatch.setattr(linear, "infer_in_one_call", lambda *_: None)  # step by step
    return made


# ------------------------------------------------------------------------------------- values
@given(
    st.lists(SIZES, max_size=2), SIZES, SIZES,
    st.sampled_from([E4M3, HYBRID, FLOOR, BLOCKWISE, FP32_SCALES, FORWARD_4, ALL_4]),
    st.booleans(), SEEDS,
)  # fmt: skip
def test_gradients_equal_the_public_functions(leading, k, n, recipe, bias, seed):
    torch.manual_seed(seed)
    x_dtype, w_dtype = DTYPES[seed % 3], DTYPES[seed // 3 % 3]
    layer = te_mx.Linear(k, n, bias, dtype=w_dtype)
    x, grad = torch.randn(*leading, k).to(x_dtype), torch.randn(*leading, n).to(x_dtype)
    dx, dw, db = run(layer, x, grad, recipe)
    assert (dx.dtype, dw.dtype) == (x_dtype, w_dtype)
    assert dx.shape == x.shape and dw.shape == layer.weight.shape

    rule, fmts = recipe.scale_rule, recipe.settings
    columns = {"rowwise": False, "columnwise": True, "scale_rule": rule}
    xq = te_mx.quantize(x, fmt=fmts.x_columns, **columns)
    wq = te_mx.quantize(layer.weight, fmt=fmts.w_columns, **columns)
    gq = te_mx.quantize(grad, fmt=fmts.g, scale_rule=rule)
    g_col = te_mx.quantize(grad, fmt=fmts.g_columns, **columns)
    assert torch.equal(dx.reshape(-1, k) if k else dx, _flat(wq, gq, "NN", x_dtype, dx, k))
    assert torch.equal(dw, te_mx.gemm(xq, g_col, "NT", out_dtype=w_dtype).out)
    if bias:
        assert db.dtype == w_dtype
        exact = grad.double().reshape(-1, n).sum(0) if grad.numel() else torch.zeros(n)
        magnitude = grad.double().reshape(-1, n).abs().sum(0) if grad.numel() else exact
        rows = grad.numel() // max(n, 1)
        bound = magnitude * rows * 2.0**-24 + torch.from_numpy(
            oracles.half_ulp(exact.numpy(), w_dtype)
        )
        assert ((db.double() - exact).abs() <= bound * 1.001).all()


def _flat(wq, gq, layout, dtype, dx, k):
    out = te_mx.gemm(wq, gq, layout, out_dtype=dtype).out
    return out if k else out.view(dx.shape)


@pytest.mark.parametrize("recipe", [E4M3, HYBRID])
def test_gradients_within_the_bound_of_fp64(recipe):
    layer = te_mx.Linear(96, 80)
    x, grad = torch.randn(70, 96), torch.randn(70, 80)
    dx, dw, _ = run(layer, x, grad, recipe)
    wq = te_mx.quantize(layer.weight, columnwise=True).dequantize(torch.float64, "columnwise")
    xq = te_mx.quantize(x, columnwise=True).dequantize(torch.float64, "columnwise")
    gq = te_mx.quantize(grad, fmt=recipe.settings.g, columnwise=True)
    g_row = gq.dequantize(torch.float64, "rowwise").numpy()
    g_col = gq.dequantize(torch.float64, "columnwise").numpy()
    oracles.assert_gemm(dx, wq.numpy().T, g_row)
    oracles.assert_gemm(dw, xq.numpy().T, g_col.T)


def test_gradients_are_close_to_high_precision():
    layer, x, grad = te_mx.Linear(128, 64), torch.randn(96, 128), torch.randn(96, 64)
    ours = run(layer, x, grad)
    layer.zero_grad()
    x.requires_grad_()
    layer(x).backward(grad)
    for got, exact in zip(ours, (x.grad, layer.weight.grad, layer.bias.grad), strict=True):
        assert (got - exact).norm() <= 0.05 * exact.norm()


def test_backward_outside_the_region_and_expanded_gradient():
    layer, x = te_mx.Linear(40, 8), torch.randn(2, 5, 40, requires_grad=True)
    with te_mx.autocast(recipe=HYBRID):
        y = layer(x)
    with te_mx.autocast(enabled=False):
        y.sum().backward()  # its gradient has strides of 0
    _, dw, db = run(layer, x, torch.ones(2, 5, 8), HYBRID)
    torch.testing.assert_close(db, torch.full((8,), 10.0), rtol=0, atol=0)
    assert torch.equal(dw, layer.weight.grad)


def test_torch_autocast_gradients():
    layer, x = te_mx.Linear(40, 8), torch.randn(5, 40, requires_grad=True)
    with te_mx.autocast(), torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad.dtype == layer.weight.grad.dtype == layer.bias.grad.dtype == torch.float32


# ---------------------------------------------------------------- exactly the work that is needed
E, M, K, N = "mxfp8_e4m3", 6, 40, 24
X, W, G = (M, K), (N, K), (M, N)
FPROP, DGRAD, WGRAD = (M, N, K), (M, K, N), (N, K, M)
KEPT = MXFP8BlockScaling(keep_weight_columns=True)


@pytest.mark.parametrize("recipe", [E4M3, KEPT], ids=["default", "keep_weight_columns"])
@pytest.mark.parametrize(
    ("grad_x", "grad_w", "grad_b", "x_and_g", "gemms"),
    [
        (True, True, True, [(*X, True, True, False), (*G, True, True, True)],
         [FPROP, DGRAD, WGRAD]),
        (False, True, True, [(*X, True, True, False), (*G, False, True, True)], [FPROP, WGRAD]),
        (True, False, True, [(*X, True, False, False), (*G, True, False, True)], [FPROP, DGRAD]),
        (True, True, False, [(*X, True, True, False), (*G, True, True, False)],
         [FPROP, DGRAD, WGRAD]),
        (True, False, False, [(*X, True, False, False), (*G, True, False, False)], [FPROP, DGRAD]),
        (False, False, True, [(*X, True, False, False)], [FPROP]),
        (False, False, False, [(*X, True, False, False)], [FPROP]),
    ],
)  # fmt: skip
def test_only_what_is_needed_is_computed(calls, recipe, grad_x, grad_w, grad_b, x_and_g, gemms):
    layer = te_mx.Linear(K, N)
    layer.weight.requires_grad_(grad_w)
    layer.bias.requires_grad_(grad_b)
    x = torch.randn(M, K, requires_grad=grad_x)
    with te_mx.autocast(recipe=recipe):
        y = layer(x)
    forward = len(calls["quantize"])
    if y.requires_grad:
        y.backward(torch.randn(M, N))
    # The columns of w, where dgrad reads them: with its rows, or in backward.
    kept = recipe is KEPT
    w = [(*W, True, grad_x and kept, False), *[(*W, False, True, False)] * (grad_x and not kept)]
    assert sorted(calls["quantize"]) == sorted((E, *call) for call in (*x_and_g, *w))
    assert sorted(call[1:3] for call in calls["quantize"][:forward]) == sorted([X, W])
    assert calls["gemm"] == gemms
    assert (x.grad is not None) == grad_x
    assert (layer.weight.grad is not None) == grad_w
    assert (layer.bias.grad is not None) == grad_b
    if grad_b:
        assert layer.bias.grad.shape == (N,)


def test_no_grad_makes_rowwise_operands_only(calls):
    layer = te_mx.Linear(K, N)
    with torch.no_grad(), te_mx.autocast():
        layer(torch.randn(M, K, requires_grad=True))
    only = [(E, *X, True, False, False), (E, *W, True, False, False)]
    assert sorted(calls["quantize"]) == sorted(only)


def test_hybrid_quantizes_gradients_to_e5m2(calls):
    run(te_mx.Linear(K, N), torch.randn(M, K), torch.randn(M, N), HYBRID)
    formats = [(call[0], call[1:3]) for call in calls["quantize"]]
    assert sorted(formats) == sorted([(E, X), (E, W), (E, W), ("mxfp8_e5m2", G)])


def test_saved_tensors_hooks_may_move_what_is_saved():
    layer, x, grad = te_mx.Linear(40, 8), torch.randn(5, 40), torch.randn(5, 8)
    expected = run(layer, x, grad)
    with torch.autograd.graph.save_on_cpu():
        got = run(layer, x, grad)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


# --------------------------------------------------------------------------------- graph rules
def test_retain_graph_gives_the_same_gradients_twice():
    layer, x = te_mx.Linear(40, 8), torch.randn(5, 40, requires_grad=True)
    with te_mx.autocast():
        y = layer(x)
    grad = torch.randn(5, 8)
    inputs = [x, layer.weight, layer.bias]
    first = torch.autograd.grad(y, inputs, grad, retain_graph=True)
    second = torch.autograd.grad(y, inputs, grad)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, inputs, grad)


@pytest.mark.parametrize("grad_of_grad", [True, False])
def test_double_backward_is_refused_with_a_remedy(grad_of_grad):
    layer, x = te_mx.Linear(40, 8), torch.randn(5, 40, requires_grad=True)
    with te_mx.autocast():
        y = layer(x)
    grad = torch.randn(5, 8, requires_grad=grad_of_grad)
    (dx,) = torch.autograd.grad(y, x, grad, create_graph=True)
    assert torch.equal(dx, run(layer, x, grad.detach())[0])
    with pytest.raises(RuntimeError, match=r"no second derivative.*enabled=False"):
        dx.square().sum().backward()


def test_create_graph_alone_is_no_error():
    layer, x = te_mx.Linear(40, 8, bias=False), torch.randn(5, 40, requires_grad=True)
    layer.weight.requires_grad_(False)
    with te_mx.autocast():
        y = layer(x)
    (y.square() + x.sum() ** 2).sum().backward(create_graph=True)
    assert x.grad is not None


def test_gradients_accumulate():
    layer, x, grad = te_mx.Linear(40, 8), torch.randn(5, 40), torch.randn(5, 8)
    _, once, _ = run(layer, x, grad)
    once = once.clone()
    with te_mx.autocast():
        layer(x).backward(grad)
    assert torch.equal(layer.weight.grad, 2 * once)


@pytest.mark.parametrize("recipe", [None, E4M3, KEPT], ids=["off", "default", "kept"])
def test_changing_the_weight_between_forward_and_backward(recipe):
    """Backward reads the weight, and autograd refuses one that changed, as it does for a layer in
    high precision. Columns that forward made are those of the weight then."""
    layer, x, grad = te_mx.Linear(40, 8), torch.randn(5, 40, requires_grad=True), torch.randn(5, 8)
    with te_mx.autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(x)
    expected = run(layer, x, grad)[0]
    with torch.no_grad():
        layer.weight.add_(1)
    if recipe is KEPT:
        assert torch.equal(torch.autograd.grad(y, x, grad)[0], expected)
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(y, x, grad)


def test_changing_a_weight_that_dgrad_does_not_read_is_allowed():
    layer, x, grad = te_mx.Linear(40, 8), torch.randn(5, 40), torch.randn(5, 8)
    expected = run(layer, x, grad)[1]
    with te_mx.autocast():
        y = layer(x)
    with torch.no_grad():
        layer.weight.add_(1)
    assert torch.equal(torch.autograd.grad(y, layer.weight, grad)[0], expected)


# -------------------------------------------------------------------- activation checkpointing
class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = te_mx.Linear(40, 64), te_mx.Linear(64, 40)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def grads_of(block, x, forward, backward_inside=False):
    block.zero_grad()
    x = x.detach().clone().requires_grad_()
    with te_mx.autocast(recipe=HYBRID):
        y = forward(x)
        if backward_inside:
            y.square().sum().backward()
    if not backward_inside:
        y.square().sum().backward()
    return [x.grad, *(p.grad for p in block.parameters())]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_checkpointing_recomputes_with_the_recipe_of_the_forward(reentrant, inside):
    block, x = Block(), torch.randn(5, 40)
    expected = grads_of(block, x, block)
    got = grads_of(
        block, x, lambda x: checkpoint(block, x, use_reentrant=reentrant), backward_inside=inside
    )
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_of_what_enters_a_region_itself(reentrant):
    block, x = Block(), torch.randn(5, 40)

    @te_mx.autocast(recipe=E4M3)
    def inner(x):
        with te_mx.autocast(enabled=False):
            x = block.up(x)
        return block.down(x.relu())

    def outer(x):
        return checkpoint(inner, x, use_reentrant=reentrant)

    expected = grads_of(block, x, inner)
    got = grads_of(block, x, outer)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_of_a_disabled_region_inside_an_enabled_one(reentrant):
    block, x = Block(), torch.randn(5, 40)

    def forward(x, wrap):
        with te_mx.autocast(enabled=False):
            return wrap(x)

    expected = grads_of(block, x, lambda x: forward(x, block))
    got = grads_of(
        block,
        x,
        lambda x: forward(x, lambda x: checkpoint(block, x, use_reentrant=reentrant)),
        backward_inside=True,
    )
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_nested_checkpointing():
    block, x = Block(), torch.randn(5, 40)

    def inner(x):
        return checkpoint(block, x, use_reentrant=False)

    expected = grads_of(block, x, block)
    got = grads_of(block, x, lambda x: checkpoint(inner, x, use_reentrant=False))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
