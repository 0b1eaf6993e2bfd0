"""A changed weight is never missed, except where the user said that it stands still."""

from __future__ import annotations

import pytest
import torch

import te_mx
from te_mx.autograd import linear
from te_mx.dispatch import run
from te_mx.recipe import Format, MXFP8BlockScaling

HYBRID = MXFP8BlockScaling(fp8_format=Format.HYBRID)
FLOOR = MXFP8BlockScaling(scale_rule="floor")


def fresh(layer):
    """A new layer with the same parameters, which cannot have kept anything."""
    other = te_mx.Linear(layer.in_features, layer.out_features)
    other.load_state_dict(layer.state_dict())
    return other


def in_place(layer):
    with torch.no_grad():
        layer.weight.add_(0.25)


def data_swap(layer):
    layer.weight.data = torch.randn_like(layer.weight)


def write_through_data(layer):
    layer.weight.data.mul_(-1)  # does not change the version counter


def write_one_element_through_data(layer):
    layer.weight.data[3, 5] = 7.0


def write_through_numpy(layer):
    layer.weight.detach().numpy()[:] += 0.5


def new_parameter(layer):
    layer.weight = torch.nn.Parameter(torch.randn_like(layer.weight))


def load(layer):
    layer.load_state_dict(te_mx.Linear(40, 8).state_dict())


def load_assign(layer):
    layer.load_state_dict(te_mx.Linear(40, 8).state_dict(), assign=True)


def optimizer_step(layer):
    layer.weight.grad = torch.randn_like(layer.weight)
    torch.optim.SGD(layer.parameters(), 0.1).step()


def fused_optimizer_step(layer):
    layer.weight.grad = torch.randn_like(layer.weight)
    torch.optim.AdamW(layer.parameters(), 0.1, foreach=True).step()


CHANGES = [
    in_place, data_swap, write_through_data, write_one_element_through_data, write_through_numpy,
    new_parameter, load, load_assign, optimizer_step, fused_optimizer_step,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("grad", [True, False])
def test_changes_are_seen_at_the_next_forward(change, grad):
    layer, x = te_mx.Linear(40, 8), torch.randn(5, 40)
    with torch.set_grad_enabled(grad), te_mx.autocast():
        before = layer(x)
        layer(x)
    change(layer)
    with torch.set_grad_enabled(grad), te_mx.autocast():
        after = layer(x)
        assert not torch.equal(after, before)
        assert torch.equal(after, fresh(layer)(x))


def test_bias_changes_are_always_seen():
    layer, x = te_mx.Linear(40, 8), torch.randn(5, 40)
    with torch.no_grad(), te_mx.autocast():
        layer(x, is_first_microbatch=True)
        layer.bias.data.add_(1)
        assert torch.equal(layer(x, is_first_microbatch=False), fresh(layer)(x))


def test_weight_norm_is_recomputed():
    layer, x = te_mx.Linear(40, 8), torch.randn(5, 40)
    torch.nn.utils.parametrizations.weight_norm(layer)
    with torch.no_grad(), te_mx.autocast():
        before = layer(x)
        layer.parametrizations.weight.original0.data.mul_(2)
        assert torch.allclose(layer(x) - layer.bias, 2 * (before - layer.bias))


# --------------------------------------------------------------------------- is_first_microbatch
@pytest.fixture
def weights_quantized(monkeypatch):
    """The times that a weight [33, 70] or [8, 40] was quantized: to "row", "col" or "both"."""
    sides = []
    quantize = run.quantize

    def record(what):
        if tuple(what.x.shape) in ((33, 70), (8, 40)):
            sides.append("col" if not what.row else "both" if what.col else "row")
        return quantize(what)

    monkeypatch.setattr(run, "quantize", record)
    monkeypatch.setattr(
        linear, "infer_in_one_call", lambda *_: None
    )  # which quantizes in native code
    return sides


def grads(layer, xs, first):
    layer.zero_grad()
    results = []
    for i, x in enumerate(xs):
        x = x.clone().requires_grad_()
        with te_mx.autocast(recipe=HYBRID):
            y = layer(x, is_first_microbatch=None if first is None else first == i)
        y.square().sum().backward()
        results += [y.detach(), x.grad]
    return [*results, layer.weight.grad.clone(), layer.bias.grad.clone()]


@pytest.mark.usefixtures("family")
def test_caching_gives_the_bits_of_not_caching(by_steps, weights_quantized):
    layer, xs = te_mx.Linear(70, 33), [torch.randn(20, 70) for _ in range(3)]
    expected = grads(layer, xs, None)
    assert weights_quantized == ["row", "col"] * 3  # forward, backward
    weights_quantized.clear()
    got = grads(layer, xs, 0)
    assert weights_quantized == ["both"]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.usefixtures("family")
def test_false_reuses_and_true_quantizes_again():
    layer, x = te_mx.Linear(40, 8), torch.randn(5, 40)
    with torch.no_grad(), te_mx.autocast():
        kept = layer(x, is_first_microbatch=True)
        in_place(layer)
        assert torch.equal(layer(x, is_first_microbatch=False), kept)
        now = layer(x)
        assert torch.equal(now, fresh(layer)(x))
        assert torch.equal(layer(x, is_first_microbatch=False), kept)
        assert torch.equal(layer(x, is_first_microbatch=True), now)
        assert torch.equal(layer(x, is_first_microbatch=False), now)


def test_false_without_anything_kept_quantizes(weights_quantized):
    layer, x = te_mx.Linear(40, 8), torch.randn(5, 40)
    with torch.no_grad(), te_mx.autocast():
        assert torch.equal(layer(x, is_first_microbatch=False), fresh(layer)(x))
        layer(x, is_first_microbatch=False)
    assert weights_quantized == ["row"] * 2  # the layer, and fresh


@pytest.mark.usefixtures("family")
def test_kept_rowwise_only_then_needed_for_backward(weights_quantized):
    layer, x = te_mx.Linear(40, 8), torch.randn(5, 40)
    with te_mx.autocast():
        with torch.inference_mode():
            layer(x, is_first_microbatch=True)
        x.requires_grad_()
        for _ in range(2):
            layer(x, is_first_microbatch=False).sum().backward()
    assert weights_quantized == ["row", "both"]


@pytest.mark.parametrize("change", ["recipe", "device", "load_state_dict"])
def test_what_is_kept_is_dropped_when_it_no_longer_fits(change):
    layer, x = te_mx.Linear(40, 8), torch.randn(5, 40)
    recipe = None
    with torch.no_grad(), te_mx.autocast():
        kept = layer(x, is_first_microbatch=True)
    if change == "recipe":
        recipe = FLOOR
    elif change == "device":
        layer.to("meta")
        x = x.to("meta")
    else:
        load(layer)
    with torch.no_grad(), te_mx.autocast(recipe=recipe):
        y = layer(x, is_first_microbatch=False)
        assert y.device == x.device
        if change == "device":
            return
        assert torch.equal(y, fresh(layer)(x)) and not torch.equal(y, kept)


def test_high_precision_ignores_the_cache():
    layer, x = te_mx.Linear(40, 8), torch.randn(5, 40)
    with torch.no_grad(), te_mx.autocast():
        layer(x, is_first_microbatch=True)
    in_place(layer)
    assert torch.equal(
        layer(x, is_first_microbatch=False), torch.nn.functional.linear(x, layer.weight, layer.bias)
    )
