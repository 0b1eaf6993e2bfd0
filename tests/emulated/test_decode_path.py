"""Frozen te_mx.Linear on few rows: the decode kernel of Hopper, its form of the weight, and when it
does not run."""

from __future__ import annotations

import copy

import pytest
import torch
from emulated_hopper import CALLS, PRODUCTS

import te_mx
from te_mx import formats, layouts
from te_mx.backends.sm90.decode import Decode
from te_mx.layouts.operand import Operand
from te_mx.recipe import BlockScaling, Float8BlockScaling, MXFP8BlockScaling
from te_mx.runtime.kernel_log import LAST_RUN

pytestmark = pytest.mark.usefixtures("on_hopper")

N, K = 52, 168
FORMATS = "mxfp8_e4m3", "mxfp4"


def frozen(w="mxfp8_e4m3", drop=False, dtype=torch.bfloat16, **kwargs):
    torch.manual_seed(3)
    layer = te_mx.Linear(K, N, dtype=dtype, **kwargs)
    te_mx.freeze_weights(layer, drop_master=drop, recipe=recipe_of(w))
    return layer


def recipe_of(w):
    return BlockScaling(x="mxfp8_e4m3", w=w, g="mxfp8_e5m2")


def run(layer, x, w="mxfp8_e4m3"):
    with torch.no_grad(), te_mx.autocast(recipe=recipe_of(w)):
        return layer(x)


def exact(layer_weight, bias, x, w):
    """The product of the decoded numbers in fp64."""
    sides = []
    for values, name in ((x, "mxfp8_e4m3"), (layer_weight, w)):
        fmt = formats.get(name)
        sides.append(fmt.dequantize(*fmt.quantize(values, "rceil"), K, torch.float64))
    return sides[0] @ sides[1].t() + bias.double()


@pytest.mark.parametrize("drop", [False, True])
def test_how_many_rows_it_takes(drop):
    layer = frozen(drop=drop)
    for rows in (1, 32, 33, 64, 65):
        PRODUCTS.clear()
        run(layer, torch.randn(rows, K, dtype=torch.bfloat16))
        assert bool(PRODUCTS) == (rows <= 64), rows


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("w", FORMATS)
def test_few_rows_run_on_the_decode_kernel(w, drop):
    layer = te_mx.Linear(K, N, dtype=torch.bfloat16)
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    te_mx.freeze_weights(layer, drop_master=drop, recipe=recipe_of(w))
    x = torch.randn(2, 3, K, dtype=torch.bfloat16)
    y = run(layer, x, w)
    assert PRODUCTS == [(6, N, K)]
    assert LAST_RUN[layer._tag] == ("sm90_mxfp4" if w == "mxfp4" else "sm90_decode")
    torch.testing.assert_close(
        y.double(), exact(weight, bias, x.view(-1, K), w).view(2, 3, N), rtol=2**-8, atol=0
    )


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("f32", [False, True])
def test_blockwise_fp8_runs_on_it(f32, drop):
    recipe = Float8BlockScaling(use_f32_scales=f32)
    layer = te_mx.Linear(K, 2 * N, dtype=torch.bfloat16)
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().double()
    te_mx.freeze_weights(layer, drop_master=drop, recipe=recipe)
    x = torch.randn(20, K, dtype=torch.bfloat16)
    with torch.no_grad(), te_mx.autocast(recipe=recipe):
        y = layer(x)
    assert PRODUCTS == [(20, 2 * N, K)]
    sides = []
    for values, name in ((x, "fp8_e4m3_1x128"), (weight, "fp8_e4m3_128x128")):
        fmt = formats.get(name)
        codes = fmt.quantize(values, "fp32" if f32 else "pow2")
        sides.append(fmt.dequantize(*codes, K, torch.float64))
    torch.testing.assert_close(y.double(), sides[0] @ sides[1].t() + bias, rtol=2**-8, atol=1e-5)


def test_exact_products_are_asked_for():
    for precision in ("adaptive", "exact"):
        recipe = MXFP8BlockScaling(precision=precision)
        layer = te_mx.Linear(K, N, dtype=torch.bfloat16)
        te_mx.freeze_weights(layer, recipe=recipe)
        with torch.no_grad(), te_mx.autocast(recipe=recipe):
            layer(torch.randn(2, K, dtype=torch.bfloat16))
        (asked,) = (call.args for call in CALLS if call.name == "decode")
        assert asked.exact == (precision == "exact")
        CALLS.clear()


def test_strided_rows_and_other_dtypes_and_no_bias():
    for dtype in (torch.float32, torch.float16):
        layer = frozen(dtype=dtype, bias=False)
        x = torch.randn(K, 5, dtype=dtype).t()
        assert torch.equal(run(layer, x), run(layer, x.contiguous()))
    assert len(PRODUCTS) == 4


def test_gradients_and_plain_modules_run_as_ever():
    layer, x = frozen(), torch.randn(4, K, dtype=torch.bfloat16, requires_grad=True)
    with te_mx.autocast(recipe=recipe_of("mxfp8_e4m3")):
        layer(x).sum().backward()
    assert x.grad is not None
    te_mx.unfreeze_weights(layer)
    run(layer, x)
    assert PRODUCTS == []


@pytest.mark.parametrize("drop", [False, True])
def test_the_form_is_made_once_and_again_after_a_change(drop, monkeypatch):
    made = []
    form = Decode.form
    monkeypatch.setattr(Decode, "form", lambda *a: made.append(1) or form(*a))
    layer, x = frozen(drop=drop), torch.randn(4, K, dtype=torch.bfloat16)
    before = run(layer, x)
    assert torch.equal(run(layer, x), before) and len(made) == 1
    if drop:
        state = {name: t.clone() for name, t in layer.state_dict().items()}
        state["weight_scale"] += 1
        layer.load_state_dict(state)
    else:
        with torch.no_grad():
            layer.weight.mul_(2)
    bias = layer.bias.detach().float()
    torch.testing.assert_close(
        run(layer, x).float() - bias, 2 * (before.float() - bias), rtol=0.02, atol=0.02
    )
    assert len(made) == 2


def test_copies_and_state_dicts_know_nothing_of_the_form():
    layer, x = frozen(drop=True), torch.randn(4, K, dtype=torch.bfloat16)
    names = set(layer.state_dict())
    y = run(layer, x)
    assert set(layer.state_dict()) == names
    other = copy.deepcopy(layer)
    assert torch.equal(run(other, x), y)
    assert other._source.decode_weights is not layer._source.decode_weights


def test_a_capture_makes_no_form(monkeypatch):
    layer, x = frozen(), torch.randn(4, K, dtype=torch.bfloat16)
    capturing = "te_mx.weights.decode.capturing"
    monkeypatch.setattr(capturing, lambda device: True)
    run(layer, x)
    assert PRODUCTS == []
    monkeypatch.setattr(capturing, lambda device: False)
    run(layer, x)
    monkeypatch.setattr(capturing, lambda device: True)
    run(layer, x)
    assert len(PRODUCTS) == 2
    assert layer._source.decode_weights.in_graphs == [
        layer._source.decode_weights.made["weight"].weight
    ]


def test_scales_that_fp32_sums_do_not_hold_run_elsewhere():
    layer = te_mx.Linear(K, N, dtype=torch.float32)
    with torch.no_grad():
        layer.weight[3] = 1e36
    te_mx.freeze_weights(layer, recipe=MXFP8BlockScaling())
    with torch.no_grad(), te_mx.autocast(recipe=MXFP8BlockScaling()):
        layer(torch.randn(2, K))
    assert PRODUCTS == []


@pytest.mark.parametrize("lies", ["rows", "sm90:8"])
@pytest.mark.parametrize("w", FORMATS)
def test_which_weights_it_takes(w, lies):
    n, k, fmt = 140, 256, formats.get(w)
    codes, scales = fmt.quantize(torch.randn(n, k), "rceil")
    width = codes.shape[1] // scales.shape[1]

    def takes(byte, zeros=False):
        some, own = codes.clone(), scales.clone()
        own[130, 2] = byte
        if zeros:
            some[130, 2 * width : 3 * width] = 0
        parts = layouts.get(lies).pack(fmt, some, own, k)
        return Decode().form(Operand(*parts, f"{w}@{lies}", n, k)) is not None

    assert all(map(takes, (24, 127, 140, 190, 255)))
    assert not any(map(takes, (0, 23, 216, 254)))
    assert takes(0, zeros=True) and takes(23, zeros=True)


def test_inputs_of_4_bits_are_values_of_their_codes():
    recipe = BlockScaling(x="mxfp4", w="mxfp4", g="mxfp8_e5m2")
    layer = te_mx.Linear(K, N, dtype=torch.bfloat16)
    te_mx.freeze_weights(layer, recipe=recipe)
    with torch.no_grad(), te_mx.autocast(recipe=recipe):
        layer(torch.randn(2, K, dtype=torch.bfloat16))
    assert LAST_RUN[layer._tag] == "sm90_mxfp4"


@pytest.mark.parametrize("w", FORMATS)
def test_inputs_as_they_are(w):
    layer = te_mx.Linear(K, N, dtype=torch.bfloat16)
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().double()
    te_mx.freeze_weights(layer, drop_master=True, recipe=recipe_of(w), activations="bf16")
    fmt = formats.get(w)
    exact_weight = fmt.dequantize(*fmt.quantize(weight, "rceil"), K, torch.float64)
    for dtype, runs in ((torch.bfloat16, True), (torch.float16, True), (torch.float32, False)):
        PRODUCTS.clear()
        x = torch.randn(3, K, dtype=dtype)
        with torch.no_grad():
            y = layer(x)
        assert bool(PRODUCTS) == runs and y.dtype == dtype
        torch.testing.assert_close(
            y.double(), x.double() @ exact_weight.t() + bias, rtol=2**-8, atol=1e-5
        )


@pytest.mark.parametrize("rows", [64, 65])
def test_explain_names_it(rows):
    told = te_mx.explain(m=N, n=rows, k=K, recipe=recipe_of("mxfp4"))
    assert "a frozen te_mx.Linear runs on sm90_mxfp4" in told.note
