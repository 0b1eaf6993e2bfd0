"""te_mx.Linear on Hopper: forward and backward against fp64 products of the operands that it
multiplies, and in every setting that torch can put around it.
"""

from __future__ import annotations

import contextlib

import pytest
import sm90_bounds as bounds
import torch
import torch.utils.checkpoint
from torch import nn

import te_mx
from te_mx import _ops as ops
from te_mx.recipe import Format, MXFP8BlockScaling

DTYPES = [torch.bfloat16, torch.float32, torch.float16]
RECIPES = {
    "adaptive": MXFP8BlockScaling(),
    "exact": MXFP8BlockScaling(precision="exact"),
    "spread 3, hybrid": MXFP8BlockScaling(alignment_spread=3, fp8_format=Format.HYBRID),
    "spread 0, floor": MXFP8BlockScaling(alignment_spread=0, scale_rule="floor"),
    "exact, hybrid": MXFP8BlockScaling(precision="exact", fp8_format=Format.HYBRID),
}
# (tokens, in features, out features): tails, few tokens, whole tiles.
SHAPES = ((77, 96, 130), (1, 65, 33), (256, 384, 128))


def layer(k=96, n=130, dtype=torch.bfloat16, bias=True):
    torch.manual_seed(1)
    return te_mx.Linear(k, n, bias, device="cuda", dtype=dtype)


def step(fn, x, grad, *modules, context=te_mx.autocast):
    """Output, input gradient and parameter gradients of one forward and backward."""
    x = x.detach().requires_grad_()
    for module in modules:
        module.zero_grad()
    with context():
        y = fn(x)
    y.backward(grad)
    grads = [p.grad for module in modules for p in module.parameters() if p.grad is not None]
    return [y.detach(), x.grad, *grads]


def assert_same(got, want):
    assert len(got) == len(want)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def operands(x, fmt, recipe):
    """x as a GEMM operand along its rows and along its columns."""
    exact = recipe.precision == "exact"
    spec = f"{fmt}@{'rows' if exact else f'sm90:{recipe.alignment_spread}'}"
    return ops.quantize_2d(x, spec, spec, rule=recipe.scale_rule)[:2]


def product(a, b):
    """(D, bound) of b @ a^T on two operands."""
    if not a.layout.exact:
        va, vb = bounds.aligned_values(a, 0), bounds.aligned_values(b, 0)
        return vb @ va.t(), bounds.accumulation(va, vb)
    va, vb = bounds.mx_values(a), bounds.mx_values(b)
    return vb @ va.t(), bounds.fp32_sums(va, vb)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_every_gemm_of_a_step(name, shape, dtype, bias):
    recipe = RECIPES[name]
    m, k, n = shape
    linear = layer(k, n, dtype, bias)
    x, grad = bounds.pair("channels", m, m, max(k, n), dtype, seed=5)
    x, grad = x[:, :k], grad[:, :n]
    y, dx, dw, *db = step(linear, x, grad, linear, context=lambda: te_mx.autocast(recipe=recipe))
    assert (y.dtype, dx.dtype, dw.dtype) == (dtype, dtype, dtype)

    settings = recipe.settings
    w_row, w_col = operands(linear.weight.detach(), settings.w, recipe)
    x_row, x_col = operands(x, settings.x, recipe)
    g_row, g_col = operands(grad, settings.g, recipe)
    want, limit = product(w_row, x_row)
    if bias:
        want = want + linear.bias.double()
        limit = limit + 2.0**-23 * want.abs()
    bounds.assert_close(y, want, limit)
    bounds.assert_close(dx, *product(w_col, g_row))
    bounds.assert_close(dw, *product(x_col, g_col))
    if bias:
        exact, size = grad.double().sum(0), grad.double().abs().sum(0)
        bounds.assert_close(db[0], exact, m * 2.0**-24 * size)
    kernel = "sm90_exact" if recipe.precision == "exact" else "sm90_adaptive"
    assert te_mx.audit(linear)["(root)"][2:5] == (kernel, kernel, kernel)


@pytest.mark.parametrize("precision", ["adaptive", "exact"])
def test_weights_that_stand_still_give_the_same_bits(precision):
    recipe = MXFP8BlockScaling(precision=precision)

    def region():
        return te_mx.autocast(recipe=recipe)

    x, grad = torch.randn(77, 96, device="cuda"), torch.randn(77, 130, device="cuda")
    linear = layer(dtype=torch.float32)
    want = step(linear, x, grad, linear, context=region)
    for first in (True, False, False):
        got = step(lambda x: linear(x, is_first_microbatch=first), x, grad, linear, context=region)  # noqa: B023
        assert_same(got, want)
    te_mx.freeze_weights(linear, recipe=recipe)
    for _ in range(2):
        assert_same(step(linear, x, grad, linear, context=region), want[:2])
    te_mx.unfreeze_weights(linear)
    te_mx.freeze_weights(linear, drop_master=True, recipe=recipe)
    with torch.no_grad(), region():
        assert torch.equal(linear(x), want[0])
    state = linear.state_dict()
    assert state["weight"].dtype == torch.float8_e4m3fn
    assert state["weight_scale"].shape == (130, 3)


def test_a_microbatch_weight_follows_the_recipe():
    linear, x = layer(), torch.randn(9, 96, device="cuda", dtype=torch.bfloat16)
    spreads = [MXFP8BlockScaling(alignment_spread=s) for s in (8, 0)]
    recipes = [*spreads, RECIPES["exact"], *spreads, MXFP8BlockScaling(scale_rule="floor")]
    with torch.no_grad(), te_mx.autocast():
        linear(x, is_first_microbatch=True)
    for recipe in recipes:
        with torch.no_grad(), te_mx.autocast(recipe=recipe):
            assert torch.equal(linear(x, is_first_microbatch=False), linear(x))


def mlp(dtype=torch.float32):
    torch.manual_seed(2)
    layers = nn.Sequential(nn.Linear(96, 160), nn.ReLU(), nn.Linear(160, 72, bias=False))
    return te_mx.convert_model(layers.to("cuda", dtype)).model


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_code_gives_the_bits_of_eager(backend):
    torch._dynamo.reset()
    model = mlp()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    x, grad = torch.randn(50, 96, device="cuda"), torch.randn(50, 72, device="cuda")
    recipes = ["adaptive"] if backend == "inductor" else RECIPES
    for name in recipes:

        def region(name=name):
            return te_mx.autocast(recipe=RECIPES[name])

        got = step(compiled, x, grad, model, context=region)
        assert_same(got, step(model, x, grad, model, context=region))
    torch._dynamo.reset()


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_activations(reentrant):
    model = mlp()
    x, grad = torch.randn(50, 96, device="cuda"), torch.randn(50, 72, device="cuda")

    def recomputed(x):
        return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant)

    assert_same(step(recomputed, x, grad, model), step(model, x, grad, model))


def test_torch_autocast_gives_the_dtype():
    linear = layer(dtype=torch.float32)
    x, grad = torch.randn(77, 96, device="cuda"), torch.randn(77, 130, device="cuda")

    @contextlib.contextmanager
    def both():
        with te_mx.autocast(), torch.autocast("cuda", torch.bfloat16):
            yield

    y, dx, dw, db = step(linear, x, grad.bfloat16(), linear, context=both)
    assert (y.dtype, dx.dtype, dw.dtype, db.dtype) == (torch.bfloat16, *[torch.float32] * 3)
    alone = step(linear, x, grad.bfloat16().float(), linear)
    assert_same([y, dx, dw, db], [alone[0].bfloat16(), *alone[1:]])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_autograd(mode):
    linear, x = layer(), torch.randn(4, 19, 96, device="cuda", dtype=torch.bfloat16)
    want = step(linear, x, torch.ones(4, 19, 130, device="cuda", dtype=torch.bfloat16), linear)
    with mode(), te_mx.autocast():
        assert torch.equal(linear(x), want[0])
        assert torch.equal(linear(x, is_first_microbatch=True), want[0])
    again = step(
        lambda x: linear(x, is_first_microbatch=False), x, torch.ones_like(want[0]), linear
    )
    assert_same(again, want)


def test_inputs_and_gradients_of_any_strides():
    linear = layer(dtype=torch.float32)
    base = torch.randn(96, 2, 40, device="cuda")
    x = base.permute(2, 1, 0)  # [40, 2, 96]
    grad = torch.randn(130, 40, 2, device="cuda").permute(1, 2, 0)
    want = step(linear, x.contiguous(), grad.contiguous(), linear)
    assert_same(step(linear, x, grad, linear), want)
    one = torch.ones((), device="cuda").expand(40, 2, 130)
    want = step(linear, x.contiguous(), one.contiguous(), linear)
    assert_same(step(linear, x, one, linear), want)
    linear.zero_grad()
    leaf = x.detach().requires_grad_()
    with te_mx.autocast():
        linear(leaf).sum().backward()  # an expanded gradient, as autograd makes it
    assert_same([leaf.grad, *(p.grad for p in linear.parameters())], want[1:])


def test_only_what_is_asked_for():
    x, grad = torch.randn(40, 96, device="cuda"), torch.randn(40, 130, device="cuda")
    linear = layer(dtype=torch.float32)
    y, dx, dw, db = step(linear, x, grad, linear)
    for needs in ((True, False, False), (False, True, False), (False, False, True)):
        leaf = x.clone().requires_grad_(needs[0])
        linear.zero_grad()
        linear.weight.requires_grad_(needs[1])
        linear.bias.requires_grad_(needs[2])
        with te_mx.autocast():
            out = linear(leaf)
        out.backward(grad)
        assert torch.equal(out, y)
        for need, got, want in zip(
            needs, (leaf.grad, linear.weight.grad, linear.bias.grad), (dx, dw, db), strict=True
        ):
            assert (got is not None) == need
            if need and want is not db:  # on its own the bias gradient is a sum by torch
                assert torch.equal(got, want)


@pytest.mark.parametrize("shape", [(0, 96), (3, 0, 96)], ids=str)
def test_no_tokens(shape):
    linear = layer(dtype=torch.float32)
    x = torch.empty(shape, device="cuda")
    y, dx, dw, db = step(linear, x, torch.empty(*shape[:-1], 130, device="cuda"), linear)
    assert y.shape == (*shape[:-1], 130)
    assert dx.shape == shape
    assert not dw.any()
    assert not db.any()


@pytest.mark.parametrize("precision", ["adaptive", "exact"])
@pytest.mark.parametrize("keep", [False, True])
def test_what_is_saved_for_backward_is_one_byte_an_element(keep, precision):
    linear = layer(1024, 2048)
    x = torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    sizes = {}

    def pack(t):
        sizes[t.data_ptr()] = t.untyped_storage().nbytes()
        return t

    recipe = MXFP8BlockScaling(keep_weight_columns=keep, precision=precision)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), te_mx.autocast(recipe=recipe):
        linear(x)
    parameter = sizes.pop(linear.weight.data_ptr(), None)
    assert (parameter is None) == keep
    elements = x.numel() + linear.weight.numel() * keep
    assert elements <= sum(sizes.values()) <= 1.04 * elements


def test_training_steps_are_the_same_in_every_run():
    def train():
        model = mlp(torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
        g = torch.Generator("cuda").manual_seed(3)
        for _ in range(5):
            x = torch.randn(300, 96, generator=g, device="cuda", dtype=torch.bfloat16)
            with te_mx.autocast():
                loss = model(x).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [loss.detach(), *(p.detach() for p in model.parameters())]

    assert_same(train(), train())
