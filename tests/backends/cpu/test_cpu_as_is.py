"""Few rows as they are on a weight that stands still, on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch

import te_mx
from te_mx import workspace
from te_mx.backends.cpu.frozen import MOST_ROWS, stream_for

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ROUNDED = {BF16: 2.0**-8, F16: 2.0**-11, F32: 2.0**-24}  # half an ulp
ROWS = (1, 2, 3, 4, 5, 9, 15, 16, 17, 20, 31, 32, 33, 37, 48, 63, 64, 65)
FORMATS = "mxfp8_e4m3", "mxfp8_e5m2", "mxfp4", "fp8_e4m3_128x128", "fp8_e4m3_1x128", "nvfp4"


def layer(fmt, dtype, k=130, n=21, spoil=lambda codes, scales: None):
    torch.manual_seed(0)
    made = te_mx.Linear(k, n, dtype=dtype)
    te_mx.freeze_weights(made, drop_master=True, fmt=fmt, activations="bf16")
    state = made.state_dict()
    spoil(state["weight"], state.get("weight_scale", state.get("weight_scale_inv")))
    made.load_state_dict(state)
    return made


def run(made, x):
    with torch.no_grad(), workspace.guarded():
        return made(x), te_mx.audit(made)["(root)"].fprop


def assert_inside(made, x, y):
    """The bound of the contract, c = 1, against fp64."""
    w, b, x = made._one_copy("weight").values(torch.float64), made.bias.double(), x.double()
    exact, size = x @ w.T + b, x.abs() @ w.abs().T + b.abs()
    least = 2.0**-25 if y.dtype == F16 else 2.0**-134 if y.dtype == BF16 else 2.0**-150
    bound = (x.shape[-1] + 2) * 2.0**-24 * size + ROUNDED[y.dtype] * exact.abs() + least
    assert ((y.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_number_of_rows(isa, fmt, dtype):
    """Inside the bound, and a row has the bits that it has alone."""
    stream = stream_for(dtype)
    for k, n in ((130, 21), (1, 1), (33, 16), (2100, 5)):
        made = layer(fmt, dtype, k, n)
        for m in ROWS if k == 130 else (1, 5, 16):
            x = torch.randn(m, k).to(dtype)
            y, ran = run(made, x)
            assert ran == (stream if m <= MOST_ROWS[stream] else "weight only")
            assert_inside(made, x, y)
            if ran == stream:
                assert torch.equal(y[-1], run(made, x[-1])[0])
                assert torch.equal(y, run(made, x.t().contiguous().t())[0])


@pytest.mark.parametrize("dtype", ROUNDED)
def test_inputs_of_every_size(isa, dtype):
    """From denormal numbers to the largest; what one power of two for a row does not hold goes to
    torch, and so does a weight with such a row."""
    made, stream = layer("mxfp8_e4m3", dtype), stream_for(dtype)
    least, most = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    small = least * torch.finfo(dtype).eps
    x = torch.randn(4, 130).to(dtype)
    x[0] = 0
    x[1] = (torch.arange(130) - 60) * small
    x[2], x[3, ::2] = most / 512, 0
    for rows in (x, x * 2.0**-6):
        y, ran = run(made, rows)
        assert ran == stream
        assert_inside(made, rows, y)
    x[3, 0], x[3, 1] = most, small
    ran = run(made, x)[1]
    assert ran == (stream if dtype == F16 else "weight only")

    def spread(codes, scales):
        scales[3, 0], scales[3, 1] = 20, 220

    made = layer("mxfp8_e4m3", dtype, spoil=spread)
    assert run(made, torch.randn(3, 130).to(dtype))[1] == "weight only"


def test_no_number(isa):
    """NaN and Inf stay in their rows and columns, as they do in torch."""

    def nan(codes, scales):
        codes[2, 5], scales[4, 1] = 0x7F, 255

    for dtype in ROUNDED:
        made, x = layer("mxfp8_e4m3", dtype, spoil=nan), torch.randn(4, 130).to(dtype)
        x[0, 3], x[1, 129], x[3, 64] = torch.inf, torch.nan, -torch.inf
        y, ran = run(made, x)
        assert ran == stream_for(dtype)
        plain = copy.deepcopy(made)
        te_mx.unfreeze_weights(plain, dequantize=True)
        with torch.no_grad():
            expected = torch.nn.functional.linear(x.float(), plain.weight.float())
        for asks in (torch.isnan, torch.isposinf, torch.isneginf):
            assert torch.equal(asks(y), asks(expected))


def test_scales_that_are_no_powers_of_two(isa):
    def factors(codes, scales):
        scales *= 1.37

    made = layer("fp8_e4m3_128x128", BF16, spoil=factors)
    for m in (1, 16, 17):
        x = torch.randn(m, 130, dtype=BF16)
        y, _ = run(made, x)
        assert_inside(made, x, y)


def test_compiled():
    made, x = layer("mxfp4", BF16), torch.randn(3, 130, dtype=BF16)
    expected, ran = run(made, x)
    torch._dynamo.reset()
    with torch.no_grad():
        assert torch.equal(torch.compile(made, fullgraph=True, backend="aot_eager")(x), expected)
    assert te_mx.audit(made)["(root)"].fprop == ran != "weight only"
