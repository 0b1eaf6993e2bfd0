"""te_mx.gemm of an MXTensor and a plain tensor."""

import itertools

import pytest
import torch

import te_mx

DTYPES = torch.bfloat16, torch.float16
FORMATS = "mxfp4", "mxfp8_e4m3", "fp8_e4m3_1x128", "fp8_e4m3_128x128"
SIZES = (7, 33, 65), (1, 17, 32), (40, 5, 129), (0, 4, 8), (3, 0, 8), (3, 4, 0)  # n, m, k


def operands(layout, n, m, k, fmt, dtype, plain):
    """(A, B as they are given, what they stand for as B [n, k] and A [m, k] in fp64)."""
    torch.manual_seed(n + m + k)
    values = {"A": torch.randn(m, k).to(dtype), "B": torch.randn(n, k).to(dtype)}
    columns = {"A": layout != "TN", "B": layout == "NT"}
    given, meant = {}, {}
    for name, value in values.items():
        lies = value.t().contiguous() if columns[name] else value
        if name == plain:
            given[name], meant[name] = lies, value.double()
            continue
        q = te_mx.quantize(lies, fmt=fmt, rowwise=not columns[name], columnwise=columns[name])
        usage = "columnwise" if columns[name] else "rowwise"
        decoded = q.dequantize(dtype=torch.float64, usage=usage)
        given[name], meant[name] = q, decoded.t() if columns[name] else decoded
    return given["A"], given["B"], meant["B"], meant["A"]


@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
@pytest.mark.parametrize("plain", ["A", "B"])
def test_products_are_inside_of_the_bound(layout, plain):
    for (n, m, k), fmt, dtype in itertools.product(SIZES, FORMATS, DTYPES):
        A, B, b, a = operands(layout, n, m, k, fmt, dtype, plain)
        for out_dtype in (torch.float32, torch.bfloat16):
            out = te_mx.gemm(A, B, layout, out_dtype=out_dtype).out
            exact = b @ a.t()
            # What is stored in fp32 scales decodes with a rounding of its own.
            bound = (k + 4) * 2**-24 * (b.abs() @ a.abs().t()) + 2**-140
            bound += exact.abs() * (2**-8 if out_dtype == torch.bfloat16 else 0)
            assert out.dtype == out_dtype and out.shape == (n, m)
            assert ((out.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_epilogues(dtype):
    A, B, b, a = operands("TN", 9, 33, 65, "mxfp4", dtype, "B")
    bias, before = torch.randn(33), torch.randn(9, 33)
    y = te_mx.gemm(A, B, bias=bias, gelu="tanh", out_dtype=torch.float32)
    sums = (b @ a.t()).float() + bias
    torch.testing.assert_close(y.aux, sums, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        y.out, torch.nn.functional.gelu(sums, approximate="tanh"), rtol=1e-5, atol=1e-5
    )
    out = before.clone()
    assert te_mx.gemm(A, B, out=out, accumulate=True).out is out
    torch.testing.assert_close(out, before + (b @ a.t()).float(), rtol=1e-5, atol=1e-5)
    sums = te_mx.gemm(A, B, grad=True, bias=True).bias_grad
    torch.testing.assert_close(sums, b.sum(1).float(), rtol=1e-5, atol=1e-5)


def test_leading_dimensions_autocast_and_gradients():
    w = te_mx.quantize(torch.randn(24, 64), fmt="mxfp4")
    x = torch.randn(2, 3, 64, dtype=torch.bfloat16, requires_grad=True)
    plain = te_mx.gemm(w, x, out_dtype=torch.float32).out
    with torch.autocast("cpu", torch.bfloat16):
        y = te_mx.gemm(w, x, out_dtype=torch.float32).out
    assert torch.equal(y, plain) and y.shape == (6, 24) and not y.requires_grad
    negative = torch._neg_view(x.detach())
    assert torch.equal(te_mx.gemm(w, negative, out_dtype=torch.float32).out, -plain)


def test_what_does_not_fit():
    w, x = te_mx.quantize(torch.randn(24, 64), fmt="mxfp4"), torch.randn(5, 64).half()
    for other in (x.long(), x.float(), x[0, 0]):
        with pytest.raises(TypeError, match="B must be an MXTensor, or a bfloat16 or float16"):
            te_mx.gemm(w, other)
    with pytest.raises(TypeError, match="A must be an MXTensor"):
        te_mx.gemm(x, x)
    with pytest.raises(ValueError, match=r"same k in A and B, got 64 \(A is \(24, 64\)\) and 63"):
        te_mx.gemm(w, x[:, 1:])
    with pytest.raises(ValueError, match="reads the columnwise copy of A"):
        te_mx.gemm(w, x, "NN")
    with pytest.raises(ValueError, match="Hadamard transform"):
        te_mx.gemm(te_mx.quantize(torch.randn(24, 64), fmt="mxfp4+rht32:0x7"), x)
    with pytest.raises(ValueError, match="out and B share memory"):
        te_mx.gemm(te_mx.quantize(torch.randn(64, 64)), (y := torch.ones(64, 64).half()), out=y)
    with pytest.raises(ValueError, match="layout must be"):
        te_mx.gemm(w, x, "TT")
