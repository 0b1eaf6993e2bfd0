"""Linear layers on kept rowwise codes, whose calls share what their sizes say, against the steps
one by one: on a stand-in for Hopper, to the bit."""

from __future__ import annotations

import pytest
import torch
from as_on_hopper import hopper

import te_mx
from te_mx import _ops as ops
from te_mx.autograd import linear_kept
from te_mx.recipe import MXFP8BlockScaling
from te_mx.runtime.ran import LAST_RUN

ONE_COPY = MXFP8BlockScaling(one_copy_weights=True)
K = 160


@pytest.fixture(autouse=True)
def on_hopper():
    with hopper():
        yield


def layers(sizes=(96, 64, 64), dtype=torch.bfloat16):
    torch.manual_seed(0)
    return [te_mx.Linear(K, n, bias=False, params_dtype=dtype) for n in sizes]


def passes(found, x, recipe=ONE_COPY, hooked=False):
    """Results and gradients of layers that read one tensor, on weights that are kept: two calls."""
    made = []
    for first in (True, False):
        x = x.detach().requires_grad_()
        with te_mx.autocast(recipe=recipe):
            outs = [layer(x * 1, is_first_microbatch=first) for layer in found[:1]]
            shared = x * 2
            outs += [layer(shared, is_first_microbatch=first) for layer in found]
        if hooked:
            outs[-1].grad_fn.register_hook(lambda given, _: tuple(given))
        sum(out.square().sum() for out in outs).backward()
        made += [*outs, x.grad, *(layer.weight.grad for layer in found)]
        for layer in found:
            layer.weight.grad = None
    return [t.detach().clone() for t in made]


def by_steps(monkeypatch, call):
    with monkeypatch.context() as patch:
        patch.setattr(linear_kept, "same_of", lambda *args: None)
        return call()


def equal(mine, theirs):
    assert len(mine) == len(theirs)
    for one, other in zip(mine, theirs, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


@pytest.fixture
def counted(monkeypatch):
    calls, forward = [], linear_kept.forward
    monkeypatch.setattr(linear_kept, "forward", lambda *args: calls.append(1) or forward(*args))
    return calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(40, K), (2, 20, K)])
@pytest.mark.parametrize("hooked", [False, True])
def test_the_bits_of_the_steps(dtype, shape, hooked, monkeypatch, counted):
    x = torch.randn(shape, dtype=dtype)
    found = layers(dtype=dtype)
    mine = passes(found, x, hooked=hooked)
    assert len(counted) == 8
    equal(mine, by_steps(monkeypatch, lambda: passes(found, x, hooked=hooked)))
    assert len(counted) == 8
    assert "sm90" in LAST_RUN[found[0]._tag]


def test_frozen_parameters_and_inputs(monkeypatch, counted):
    found = layers()
    found[0].weight.requires_grad_(False)
    for needs in (True, False):

        def call(needs=needs):
            x = torch.ones(32, K, dtype=torch.bfloat16).requires_grad_(needs)
            with te_mx.autocast(recipe=ONE_COPY):
                out = sum(layer(x, is_first_microbatch=True).sum() for layer in found)
            grads = [x] * needs + [layer.weight for layer in found[1:]]
            return torch.autograd.grad(out, grads)

        mine = call()
        equal(mine, by_steps(monkeypatch, call))
    assert len(counted) == 5  # one of an input and a weight without gradients is no function


def test_an_input_that_backward_has_anyway(monkeypatch, counted):
    """The result of attention is kept in the place of codes."""
    (found,) = layers((64,))
    qkv = torch.randn(3, 1, 5, 100 * 32, K // 5, dtype=torch.bfloat16)

    def call():
        q, k, v = (t.detach().requires_grad_() for t in qkv[:, :, :, :200])
        made = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        with te_mx.autocast(recipe=ONE_COPY):
            out = found(made.transpose(1, 2).reshape(1, 200, K), is_first_microbatch=True)
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v, found.weight))

    equal(call(), by_steps(monkeypatch, call))
    assert counted


def test_what_is_no_plain_call(counted):
    x = torch.randn(32, K, dtype=torch.bfloat16, requires_grad=True)
    with te_mx.autocast(recipe=ONE_COPY):
        biased = te_mx.Linear(K, 64, params_dtype=torch.bfloat16)
        biased(x, is_first_microbatch=True)
        layers()[0](x)
        layers()[0](x[:0], is_first_microbatch=True)
    with te_mx.autocast(recipe=MXFP8BlockScaling()):
        layers()[0](x, is_first_microbatch=True)
    assert not counted


@pytest.mark.parametrize(
    ("fmt", "rule"), [("mxfp8_e4m3", "rceil"), ("mxfp4", "even"), ("fp8_e4m3_1x128", "pow2:0")]
)
def test_values_of_codes_behind_each_other(fmt, rule):
    parts = [torch.randn(rows, K, dtype=torch.bfloat16) for rows in (96, 32, 64)]
    quantized = [ops.quantize_2d(part, f"{fmt}@rows", rule=rule).row for part in parts]
    want = torch.cat([ops.dequantize_2d(one, torch.float32) for one in quantized])
    assert torch.equal(ops.dequantize_joined_2d(quantized, torch.float32), want)
