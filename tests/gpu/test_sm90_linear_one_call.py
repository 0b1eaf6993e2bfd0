"""te_mx.Linear as one native call each way on Hopper: what one step after the other makes."""

from __future__ import annotations

import fake_sm90
import pytest
import torch

import te_mx
from te_mx.autograd import linear
from te_mx.backends import linear_calls
from te_mx.backends.base import FORMATS, SCALE_RULES
from te_mx.backends.sm90 import binding

pytestmark = pytest.mark.usefixtures("poisoned")

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = ((200, 136, 328), (1, 1, 1), (128, 256, 384), (77, 1001, 515), (64, 4096, 1024))


def randn(*shape, dtype=BF16, seed=1):
    g = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=g, device="cuda").to(dtype)


of_each = pytest.mark.parametrize("of", ["mxfp8", "pow2", "fp32"])


def recipe(of, **fields):
    if of == "mxfp8":
        return te_mx.recipe.MXFP8BlockScaling(**fields)
    return te_mx.recipe.Float8BlockScaling(use_f32_scales=of == "fp32", **fields)


def step(layer, x, grad, of="mxfp8", **fields):
    layer.zero_grad()
    x = x.detach().requires_grad_()
    with te_mx.autocast(recipe=recipe(of, **fields)):
        y = layer(x)
    name = type(y.grad_fn).__name__
    y.backward(grad)
    return name, [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


def both(monkeypatch, layer, x, grad, **fields):
    name, got = step(layer, x, grad, **fields)
    assert name == "OneCallLinearBackward"
    with monkeypatch.context() as patch:
        patch.setattr(linear, "plan_of", lambda *args: None)
        name, expected = step(layer, x, grad, **fields)
    assert name == "LinearFunctionBackward"
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
    return got


@of_each
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [BF16, F32, F16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_of_one_step_after_the_other(monkeypatch, shape, dtype, bias, of):
    m, n, k = shape
    layer = te_mx.Linear(k, n, bias=bias, device="cuda", dtype=dtype)
    call = monkeypatch, layer, randn(m, k, dtype=dtype), randn(m, n, dtype=dtype, seed=2)
    again = both(*call, of=of, keep_weight_columns=False)
    kept = both(*call, of=of, keep_weight_columns=True)
    for mine, theirs in zip(again, kept, strict=True):
        assert torch.equal(mine, theirs)


@of_each
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("needs", [(1, 0, 0), (0, 1, 0), (0, 1, 1), (1, 0, 1)], ids=str)
def test_gradients_that_are_asked_for(monkeypatch, needs, keep, of):
    layer = te_mx.Linear(200, 136, device="cuda", dtype=BF16)
    layer.weight.requires_grad_(bool(needs[1])), layer.bias.requires_grad_(bool(needs[2]))
    x, grad = randn(72, 200), randn(72, 136, seed=2)
    made, how = [], recipe(of, keep_weight_columns=keep)
    for plan_of in (linear.plan_of, lambda *args: None):
        monkeypatch.setattr(linear, "plan_of", plan_of)
        layer.zero_grad()
        leaf = x.detach().requires_grad_(bool(needs[0]))
        with te_mx.autocast(recipe=how):
            layer(leaf).backward(grad)
        made.append([leaf.grad, layer.weight.grad, layer.bias.grad])
    for mine, theirs, needed in zip(*made, needs, strict=True):
        assert (mine is not None) == (theirs is not None) == bool(needed)
        assert theirs is None or torch.equal(mine, theirs)


def test_strides_formats_and_leading_dimensions(monkeypatch):
    layer = te_mx.Linear(200, 136, device="cuda", dtype=F32)
    x = randn(3, 200, 40).transpose(1, 2)
    for fields in (
        {},
        {"keep_weight_columns": True},
        {"scale_rule": "floor", "alignment_spread": 2},
        {"of": "pow2", "alignment_spread": 2, "amax_epsilon": 0.5},
        {"of": "pow2", "alignment_spread": 0, "keep_weight_columns": True},
        {"of": "fp32", "amax_epsilon": 0.5},
        {"of": "fp32", "w_block_scaling_dim": 1},
    ):
        for fmt in (te_mx.recipe.Format.E4M3, te_mx.recipe.Format.HYBRID):
            grad = randn(136, dtype=BF16, seed=2).expand(3, 40, 136)
            both(monkeypatch, layer, x, grad, fp8_format=fmt, **fields)


@of_each
def test_a_large_x_and_a_gradient_of_sum(monkeypatch, of):
    layer = te_mx.Linear(512, 256, device="cuda", dtype=BF16)
    ones = torch.ones((), device="cuda", dtype=BF16).expand(9000, 256)
    both(monkeypatch, layer, randn(9000, 512), ones, of=of)


def form_of(of):
    element, rule = FORMATS["e4m3"], {"mxfp8": "rceil"}.get(of, of)
    wide = {} if of == "mxfp8" else {
        "scale_type": 1, "block_rows": 1, "block_k": 128,
        "w_scale_type": 1, "w_block_rows": 128, "w_block_k": 128,
    }  # fmt: skip
    return linear_calls.LinearFormats(element, element, SCALE_RULES[rule], 8, **wide)


@of_each
def test_the_native_rooms_are_those_of_the_operands(of):
    """As the stand-in of tests on machines without a GPU has them."""
    for m, n, k in SHAPES:
        for needs in ((True, True), (True, False), (False, True)):
            for kept in (False, needs[1]):
                shape, form = linear_calls.Shape(m, n, k, *needs, kept), form_of(of)
                args = binding.native().LinearArgs(**shape._asdict(), **form._asdict())
                mine = binding.native().linear_offsets(args)
                theirs = fake_sm90.linear_offsets(args)
                assert mine.pop("backward_bytes") >= theirs.pop("backward_bytes")
                assert mine == theirs


@of_each
@pytest.mark.parametrize("keep", [False, True])
def test_layers_of_one_input_read_one_copy(keep, of):
    """The first quantizes it, in one call or step by step; the others take what it made."""
    layers = [te_mx.Linear(328, n, device="cuda", dtype=BF16) for n in (136, 64, 200)]
    fused = te_mx.LayerNormMLP(328, 96, normalization=None, device="cuda", dtype=BF16)
    x, grads = randn(200, 328), [randn(200, n, seed=2) for n in (136, 64, 200, 328)]
    how = recipe(of, keep_weight_columns=keep)
    for order in ((*layers, fused), (fused, *layers)):
        results = []
        for shared in (True, False):
            leaf, made = x.detach().requires_grad_(), []
            with te_mx.autocast(recipe=how):
                outputs = [each(leaf if shared else leaf.clone()) for each in order]
            for each, y in zip(order, outputs, strict=True):
                grad = grads[-1] if each is fused else grads[layers.index(each)]
                made += [y, *torch.autograd.grad(y, [leaf, *each.parameters()], grad)]
            results.append(made)
        for mine, theirs in zip(*results, strict=True):
            assert torch.equal(mine, theirs)


@of_each
@pytest.mark.parametrize("keep", [False, True])
def test_an_input_gradient_is_added_to_another(keep, of):
    m, n, k = 200, 136, 328
    layer, x = te_mx.Linear(k, n, bias=False, device="cuda", dtype=BF16), randn(m, k)
    with te_mx.autocast(recipe=recipe(of, keep_weight_columns=keep)):
        y = layer(x.requires_grad_())
    node, grad = y.grad_fn, randn(m, n, seed=3)
    (codes, scales, of_w, _), before = node.saved_tensors, randn(m, k, seed=4, dtype=F32)
    parts = (codes, scales), (of_w, None) if keep else of_w
    dx = node.how[1].backward(grad, *parts, None)[0]
    exact, got = torch.zeros_like(before), before.clone()  # in fp32, whatever dtype x has
    assert node.how[1].backward(grad, *parts, exact)[0] is exact and torch.equal(exact.to(BF16), dx)
    added = node.how[1].backward(grad, *parts, got)[0]
    assert added is got and torch.equal(got, before + exact)


@of_each
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("firsts", [(None, None), (True, False)], ids=str)
def test_main_grad_later_and_micro_batches(firsts, delay, of, monkeypatch):
    """The bits of one step after the other, with weights that are quantized once for both."""
    m, n, k = 200, 136, 328
    made = []
    for fused in (True, False):
        layer = te_mx.Linear(
            k, n, device="cuda", dtype=BF16, fuse_wgrad_accumulation=True, delay_wgrad_compute=delay
        )
        with torch.no_grad():
            layer.weight.copy_(randn(n, k, seed=7)), layer.bias.copy_(randn(n, seed=8))
        layer.weight.main_grad = randn(n, k, seed=9, dtype=F32)
        results = []
        with monkeypatch.context() as patch:
            if not fused:
                patch.setattr(linear, "plan_of", lambda *call: None)
            for i, first in enumerate(firsts):
                x = randn(m, k, seed=i).requires_grad_()
                with te_mx.autocast(recipe=recipe(of)):
                    y = layer(x, is_first_microbatch=first)
                assert type(y.grad_fn).__name__.startswith("OneCall" if fused else "LinearF")
                y.backward(randn(m, n, seed=10 + i))
                if delay:
                    layer.backward_dw()
                results += [y.detach(), x.grad]
        made.append([*results, layer.bias.grad, layer.weight.main_grad])
    assert all(map(torch.equal, *made))
