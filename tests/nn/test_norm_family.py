"""What te_mx.LayerNormLinear and te_mx.LayerNormMLP do alike."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from norm_modules import assert_same, filled, gradients
from test_layernorm_linear import BF16, mxfp8
from torch.utils.checkpoint import checkpoint

import te_mx
from te_mx.autograd import linear_recipe

KINDS = {te_mx.LayerNormLinear: ("weight",), te_mx.LayerNormMLP: ("fc1_weight", "fc2_weight")}
pytestmark = pytest.mark.parametrize("kind", KINDS)


def made(kind, dtype=BF16, **kwargs):
    return filled(kind(64, 32, dtype=dtype, **kwargs))


def data(m, rows=5):
    """An input and a gradient of the result."""
    x = torch.randn(rows, 64, dtype=BF16)
    return x, torch.randn_like(m(x))


def test_checkpoints(kind):
    m, other = made(kind), made(kind)
    other.load_state_dict({**m.state_dict(), "_extra_state": torch.empty(0, dtype=torch.uint8)})
    x, _ = data(m)
    for twin in (other, copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert torch.equal(mxfp8(m)(x), mxfp8(twin)(x))


def test_micro_batches(kind, monkeypatch):
    m = made(kind)
    (x, g), run = data(m), mxfp8(m)
    plain = gradients(m, x, run, g)
    assert_same(gradients(m, x, lambda v: run(v, True), g), plain)
    with monkeypatch.context() as nothing_is_quantized_again:
        nothing_is_quantized_again.setattr(linear_recipe, "plan_weight", None)
        assert_same(gradients(m, x, lambda v: run(v, False), g), plain)
    with torch.no_grad():
        for name in KINDS[kind]:
            getattr(m, name).zero_()
    assert torch.equal(run(x, False), plain[0])  # it stands still, as the user said
    assert torch.equal(run(x, True), list(m.parameters())[-1].expand_as(g))  # the last bias


def test_weight_gradients_with_a_place_of_their_own(kind):
    plain, names = made(kind), KINDS[kind]
    x, g = data(plain)
    _, expected = gradients(plain, x, mxfp8(plain), g)
    delayed = made(kind, delay_wgrad_compute=True)
    fused = made(kind, fuse_wgrad_accumulation=True)
    for m in (delayed, fused):
        m.load_state_dict(plain.state_dict())
    for _ in range(2):
        mxfp8(delayed)(x).backward(g)
    assert all(getattr(delayed, name).grad is None for name in names)
    delayed.backward_dw()
    assert all(torch.equal(getattr(delayed, name).grad, expected[name]) for name in names)
    delayed.backward_dw()
    with pytest.raises(RuntimeError, match="no weight gradient is waiting"):
        delayed.backward_dw()
    getattr(delayed, names[0]).requires_grad_(len(names) == 1)
    mxfp8(delayed)(x).backward(g)
    delayed.backward_dw()
    for name in names:
        weight = getattr(fused, name)
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    mxfp8(fused)(x).backward(g)
    for name in names:
        weight = getattr(fused, name)
        assert weight.grad is None and torch.equal(weight.main_grad.to(BF16), expected[name])
    for m in (delayed, fused):  # and in high precision
        m(x).backward(g)
    delayed.backward_dw()


def test_recomputed_and_under_autocast(kind):
    m = made(kind, dtype=torch.float32)
    x = torch.randn(6, 64)
    with torch.autocast("cpu", BF16):
        assert mxfp8(m)(x).dtype == BF16
    g = torch.randn_like(m(x))

    def recomputed(v):
        with te_mx.autocast():
            return checkpoint(m, v, use_reentrant=False)

    assert_same(gradients(m, x, recomputed, g), gradients(m, x, mxfp8(m), g))


def test_no_second_derivative(kind):
    m = made(kind)
    x = torch.randn(6, 64, dtype=BF16, requires_grad=True)
    (dx,) = torch.autograd.grad(mxfp8(m)(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=rf"te_mx\.{kind.__name__}: trying to differentiate"):
        dx.sum().backward()
