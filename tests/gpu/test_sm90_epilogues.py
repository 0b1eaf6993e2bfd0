"""Epilogues of te_mx.gemm on Hopper: functions of the fp32 sums, in every layout and dtype."""

from __future__ import annotations

import pytest
import sm90_bounds as bounds
import torch
from test_sm90_products import tensors

import te_mx

DTYPES = [torch.bfloat16, torch.float32, torch.float16]
# (m, n, k): whole tiles, tails everywhere, one row of tokens, one output feature.
SHAPES = ((264, 300, 256), (75, 129, 96), (40, 1, 65), (1, 33, 32), (512, 512, 128))
LAYOUTS = ("TN", "NN", "NT")
PRECISIONS = ("adaptive", "exact")


@pytest.fixture(autouse=True)
def poisoned():
    """torch.empty gives NaN, so results that a kernel leaves out show."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(deterministic|CUBLAS_WORKSPACE_CONFIG)"),
    pytest.mark.parametrize("precision", PRECISIONS),
    pytest.mark.parametrize("dtype", DTYPES, ids=str),
    pytest.mark.parametrize("shape", SHAPES, ids=str),
]


def problem(shape, dtype, precision):
    """(gemm with the rest of its arguments, fp32 sums): the layout and formats follow the case."""
    m, n, k = shape
    index = SHAPES.index(shape) + DTYPES.index(dtype)
    layout = LAYOUTS[index % 3]
    formats = (("e4m3", "e4m3"), ("e4m3", "e5m2"))[(index + 1) % 2]
    a, b = bounds.pair("gaussian", m, n, k)
    A, B = tensors(a, 0.2 * b, layout, formats)

    def run(**arguments):
        with te_mx.workspace.guarded():
            return te_mx.gemm(A, B, layout, precision=precision, **arguments)

    return run, run(out_dtype=torch.float32).out


def assert_rounded(got, want, slack):
    """got is want in fp64, rounded to the dtype of got, but for slack from fp32 arithmetic."""
    bounds.assert_close(got, want, slack)


def test_bias(shape, dtype, precision):
    run, sums = problem(shape, dtype, precision)
    for bias_dtype in DTYPES:
        bias = torch.randn(shape[0], device="cuda", dtype=bias_dtype)
        assert torch.equal(run(bias=bias, out_dtype=dtype).out, (sums + bias.float()).to(dtype))
        apart = torch.randn(shape[0], 3, device="cuda", dtype=bias_dtype)[:, 1]
        assert torch.equal(run(bias=apart, out_dtype=dtype).out, (sums + apart.float()).to(dtype))
        behind = torch.randn(shape[0] + 1, device="cuda", dtype=bias_dtype)[1:]
        assert torch.equal(run(bias=behind, out_dtype=dtype).out, (sums + behind.float()).to(dtype))


def test_accumulate(shape, dtype, precision):
    run, sums = problem(shape, dtype, precision)
    old = torch.randn(sums.shape, device="cuda", dtype=dtype)
    got = run(out=old.clone(), accumulate=True).out
    assert torch.equal(got, (sums + old.float()).to(dtype))
    bias = torch.randn(shape[0], device="cuda")
    got = run(out=old.clone(), accumulate=True, bias=bias).out
    assert torch.equal(got, ((sums + bias) + old.float()).to(dtype))


@pytest.mark.parametrize("form", ["tanh", "erf"])
def test_gelu_keeps_the_value_before_it(form, shape, dtype, precision):
    run, sums = problem(shape, dtype, precision)
    bias = torch.randn(shape[0], device="cuda", dtype=dtype)
    before = sums + bias.float()
    for aux_dtype in DTYPES:
        made = run(bias=bias, gelu=form, out_dtype=dtype, aux_dtype=aux_dtype)
        assert torch.equal(made.aux, before.to(aux_dtype))
        assert_rounded(made.out, bounds.gelu(before, form), 2e-6 * (1 + before.double().abs()))
    made = run(gelu=form, out_dtype=dtype)
    assert torch.equal(made.aux, sums.to(dtype))
    assert_rounded(made.out, bounds.gelu(sums, form), 2e-6 * (1 + sums.double().abs()))
    assert made.bias_grad is None


@pytest.mark.parametrize("form", ["tanh", "erf"])
def test_backward_through_gelu_with_the_bias_gradient_of_the_result(form, shape, dtype, precision):
    run, sums = problem(shape, dtype, precision)
    for in_dtype in DTYPES:
        x = torch.randn(sums.shape, device="cuda", dtype=in_dtype)
        want = sums.double() * bounds.dgelu(x, form)
        slack = 4e-6 * sums.double().abs()
        made = run(grad=True, gelu=form, gelu_in=x, out_dtype=dtype)
        assert made.aux is None and made.bias_grad is None
        assert_rounded(made.out, want, slack)
        again = run(grad=True, gelu=form, gelu_in=x, bias=True, out_dtype=dtype)
        assert torch.equal(again.out, made.out)
        assert again.bias_grad.shape == (shape[0],)
        assert again.bias_grad.dtype == torch.float32
        stored = precision == "adaptive" and bounds.summed_as_stored(again.out, x)
        bounds.assert_bias_gradient(again.bias_grad, again.out, want, slack, stored)
    old = torch.randn(sums.shape, device="cuda", dtype=dtype)
    made = run(grad=True, gelu=form, gelu_in=x, bias=True, out=old.clone(), accumulate=True)
    assert_rounded(made.out, want + old.double(), slack + 2.0**-22 * (want.abs() + old.abs()))
    bounds.assert_bias_gradient(made.bias_grad, made.out, want, slack, stored=False)


def test_bias_gradient_of_the_operand(shape, dtype, precision):
    m, n, k = shape
    layout = LAYOUTS[(m + n) % 3]
    a, b = bounds.pair("channels", m, n, k)
    A, B = tensors(a, b, layout)
    side = B.operand("columnwise" if layout == "NT" else "rowwise")
    values = bounds.mx_values(side)
    limit = (k + 2) * 2.0**-24 * values.abs().sum(1)
    for asked in (True, torch.empty(n, device="cuda", dtype=dtype)):
        made = te_mx.gemm(A, B, layout, grad=True, bias=asked, precision=precision)
        got = made.bias_grad
        assert got.dtype == (torch.float32 if asked is True else dtype)
        bounds.assert_close(got, values.sum(1), limit)
    plain = te_mx.gemm(A, B, layout, precision=precision)
    assert torch.equal(made.out, plain.out)
