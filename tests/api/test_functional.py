"""te_mx.quantize and te_mx.gemm as users call them, against fp64."""

from __future__ import annotations

import numpy as np
import oracles
import pytest
import strategies as our
import torch
from hypothesis import given
from hypothesis import strategies as st

import te_mx
from te_mx.api import blas

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def exact(q: te_mx.MXTensor, usage: str) -> np.ndarray:
    """fp64 values [rows, k] with k along the blocks of one copy."""
    values = q.dequantize(torch.float64, usage).reshape(q.rows, q.cols).numpy()
    return values if usage == "rowwise" else np.ascontiguousarray(values.T)


def problem(m, n, k, layout, seed, kind="normal", formats=("e4m3", "e4m3"), transposed=None):
    """(A, B, exact a [m, k], exact b [n, k]) with only the copies that the layout reads."""
    usage_a, usage_b = blas.USAGES[layout]
    made = []
    for rows, usage, fmt, offset in ((m, usage_a, formats[0], 0), (n, usage_b, formats[1], 1)):
        shape = (rows, k) if usage == "rowwise" else (k, rows)
        x = our.tensor(kind if offset else "outliers", *shape, seed + offset, torch.float32)
        columnwise = usage == "columnwise"
        q = te_mx.quantize(
            x, fmt=fmt, rowwise=not columnwise, columnwise=columnwise,
            columnwise_transposed=transposed if columnwise else None,
        )  # fmt: skip
        made.append((q, exact(q, usage)))
    return made[0][0], made[1][0], made[0][1], made[1][1]


# ----------------------------------------------------------------------------------------- quantize
@given(
    x=our.matrices(),
    fmt=our.FORMATS,
    rule=our.RULES,
    transposed=st.sampled_from([None, False, True]),
)
def test_quantize_any_strides(x, fmt, rule, transposed):
    q = te_mx.quantize(
        x, fmt=fmt, columnwise=True, columnwise_transposed=transposed, scale_rule=rule
    )
    codes, scales = oracles.quantize(oracles.numpy_of(x), fmt, rule)
    np.testing.assert_array_equal(q.rowwise_data.view(torch.uint8).numpy(), codes)
    np.testing.assert_array_equal(q.rowwise_scale.view(torch.uint8).numpy(), scales)
    codes, scales = oracles.columnwise(oracles.numpy_of(x), fmt, rule)
    turn = np.transpose if q.columnwise_transposed else np.asarray
    np.testing.assert_array_equal(q.columnwise_data.view(torch.uint8).numpy(), turn(codes))
    np.testing.assert_array_equal(q.columnwise_scale.view(torch.uint8).numpy(), turn(scales))


@pytest.mark.parametrize("shape", [(5,), (0,), (0, 7), (7, 0), (2, 0, 3), (2, 3, 4, 33), (1, 1, 1)])
def test_quantize_any_shape(shape):
    """Leading dimensions are flattened; a single dimension is one row."""
    x = torch.randn(shape)
    q = te_mx.quantize(x, columnwise=True)
    flat = te_mx.quantize(x.reshape(int(np.prod(shape[:-1])), shape[-1]), columnwise=True)
    assert q.shape == shape
    assert torch.equal(q.rowwise_data.view(torch.uint8), flat.rowwise_data.view(torch.uint8))
    assert torch.equal(
        q.columnwise_scale.view(torch.uint8), flat.columnwise_scale.view(torch.uint8)
    )
    assert q.dequantize().shape == shape


def test_quantize_strided_leading_dimensions():
    x = torch.randn(4, 6, 40).transpose(0, 1)[:, 1:]
    assert te_mx.quantize(x, columnwise=True).equal(te_mx.quantize(x.contiguous(), columnwise=True))


def test_quantize_lazily_negated_input():
    x = torch.complex(torch.zeros(4, 32), torch.randn(4, 32)).conj().imag
    assert x.is_neg()
    assert te_mx.quantize(x).equal(te_mx.quantize(x.resolve_neg().clone()))


def test_quantize_ignores_gradients():
    x = torch.randn(4, 32, requires_grad=True)
    assert not te_mx.quantize(x).dequantize().requires_grad
    with torch.inference_mode():
        inside = te_mx.quantize(x, columnwise=True)
    assert inside.equal(te_mx.quantize(x, columnwise=True))


# --------------------------------------------------------------------------------------------- gemm
@given(
    m=our.SIZES, n=our.SIZES, k=our.SIZES, layout=our.LAYOUTS, seed=our.SEEDS,
    kind=st.sampled_from(our.FINITE_KINDS), formats=st.tuples(our.FORMATS, our.FORMATS),
    transposed=st.booleans(), dtype=our.DTYPES,
)  # fmt: skip
def test_gemm_layouts(m, n, k, layout, seed, kind, formats, transposed, dtype):
    A, B, a, b = problem(m, n, k, layout, seed, kind, formats, transposed)
    made = te_mx.gemm(A, B, layout, out_dtype=dtype)
    assert made.out.shape == (n, m) and made.out.dtype == dtype
    assert made.aux is None and made.bias_grad is None
    oracles.assert_gemm(made.out, a, b)


@given(
    m=our.POSITIVE, n=our.POSITIVE, k=our.SIZES, seed=our.SEEDS,
    gelu=st.sampled_from([None, "tanh", "erf"]),
    dtype=our.DTYPES, aux_dtype=our.DTYPES, bias_dtype=our.DTYPES, accumulate=st.booleans(),
    layout=our.LAYOUTS,
)  # fmt: skip
def test_gemm_forward_epilogues(
    m, n, k, seed, gelu, dtype, aux_dtype, bias_dtype, accumulate, layout
):
    A, B, a, b = problem(m, n, k, layout, seed)
    scale = max(np.abs(b @ a.T).max(), 1.0)
    bias = our.tensor("normal", 1, m, seed + 2, torch.float32)[0].to(bias_dtype)
    if dtype == torch.float16 and scale > 1000:
        dtype = torch.bfloat16
    if aux_dtype == torch.float16 and scale > 1000:
        aux_dtype = torch.float32
    before = our.tensor("normal", n, m, seed + 3, dtype)
    out = before.clone() if accumulate else None
    made = te_mx.gemm(
        A, B, layout, bias=bias, gelu=gelu, out=out, out_dtype=dtype,
        aux_dtype=aux_dtype if gelu else None, accumulate=accumulate,
    )  # fmt: skip
    v = b @ a.T + bias.double().numpy()
    eps = 2.0**-23
    slack = np.abs(v) * eps
    if gelu:
        oracles.assert_gemm(made.aux, a, b, v, slack)
        assert made.aux.dtype == aux_dtype
        # The slope of GELU is below 1.13; its own evaluation in fp32 costs a few ulp of its
        # argument.
        slack = 0.13 * oracles.gemm_bound(a, b) + (1.13 + 8) * np.abs(v) * eps + 2.0**-126
        v = oracles.gelu(v, gelu)
    else:
        assert made.aux is None
    if accumulate:
        assert made.out is out
        v = v + before.double().numpy()
        slack = slack + np.abs(v) * eps
    oracles.assert_gemm(made.out, a, b, v, slack)


@given(
    m=our.POSITIVE, n=our.POSITIVE, k=our.SIZES, seed=our.SEEDS,
    gelu=st.sampled_from([None, "tanh", "erf"]),
    in_dtype=our.DTYPES, bias=st.sampled_from([None, True, torch.bfloat16, torch.float32]),
    layout=our.LAYOUTS,
)  # fmt: skip
def test_gemm_backward_epilogues(m, n, k, seed, gelu, in_dtype, bias, layout):
    A, B, a, b = problem(m, n, k, layout, seed)
    gelu_in = (our.tensor("normal", n, m, seed + 5, torch.float32) * 2).to(in_dtype)
    wanted = bias if bias is None or bias is True else torch.empty(m, dtype=bias)
    made = te_mx.gemm(
        A, B, layout, grad=True, gelu=gelu, gelu_in=gelu_in, bias=wanted, out_dtype=torch.float32
    )
    slope = oracles.dgelu(gelu_in.double().numpy(), gelu or "tanh")
    v = (b @ a.T) * slope
    error = oracles.gemm_bound(a, b) * (np.abs(slope) + 1) + np.abs(b @ a.T) * 16 * 2.0**-23
    oracles.assert_gemm(made.out, a, b, v, error)
    assert made.aux is None
    if bias is None:
        assert made.bias_grad is None
    else:
        dtype = torch.float32 if bias is True else bias
        assert made.bias_grad.dtype == dtype and made.bias_grad.shape == (m,)
        sums = (
            error.sum(0)
            + n * 2.0**-23 * np.abs(v).sum(0)
            + np.abs(v.sum(0)) * torch.finfo(dtype).eps
        )
        assert (np.abs(made.bias_grad.double().numpy() - v.sum(0)) <= sums + 1e-30).all()


@given(
    m=our.POSITIVE, n=our.SIZES, k=our.SIZES, seed=our.SEEDS, fmt=our.FORMATS, layout=our.LAYOUTS
)
def test_gemm_bias_grad_of_the_operand(m, n, k, seed, fmt, layout):
    """grad=True with bias and no gelu_in, as in a weight gradient: B summed over k."""
    A, B, a, b = problem(m, n, k, layout, seed, formats=("e4m3", fmt))
    made = te_mx.gemm(A, B, layout, grad=True, bias=True, out_dtype=torch.float32)
    oracles.assert_gemm(made.out, a, b)
    assert made.bias_grad.shape == (n,) and made.bias_grad.dtype == torch.float32
    bound = (k + 2) * 2.0**-24 * np.abs(b).sum(1)
    assert (np.abs(made.bias_grad.double().numpy() - b.sum(1)) <= bound).all()


@given(
    m=our.POSITIVE, n=our.POSITIVE, k=our.POSITIVE, seed=our.SEEDS, dtype=our.DTYPES,
    kind=st.sampled_from(our.FINITE_KINDS),
)  # fmt: skip
def test_layouts_give_the_same_bits(m, n, k, seed, dtype, kind):
    """The same codes and scales as TN, NN and NT, with the columnwise copies stored both ways."""
    A = te_mx.quantize(our.tensor(kind, m, k, seed, torch.float32))
    B = te_mx.quantize(our.tensor("block_scales", n, k, seed + 1, torch.float32))
    expected = te_mx.gemm(A, B, "TN", out_dtype=dtype).out

    def turned(q: te_mx.MXTensor, transposed: bool) -> te_mx.MXTensor:
        data, scale = q.rowwise_data.view(torch.uint8), q.rowwise_scale.view(torch.uint8)
        if not transposed:
            data, scale = data.t(), scale.t()
        return te_mx.MXTensor(
            (q.cols, q.rows), q.fmt, columnwise_data=data, columnwise_scale=scale,
            columnwise_transposed=transposed,
        )  # fmt: skip

    for transposed in (False, True):
        nn = te_mx.gemm(turned(A, transposed), B, "NN", out_dtype=dtype).out
        nt = te_mx.gemm(turned(A, transposed), turned(B, transposed), "NT", out_dtype=dtype).out
        assert torch.equal(nn, expected)
        assert torch.equal(nt, expected)


def test_flattened_operands():
    w, x = torch.randn(24, 40), torch.randn(2, 3, 40)
    A, B = te_mx.quantize(w), te_mx.quantize(x)
    out = te_mx.gemm(A, B, out_dtype=torch.float32).out
    assert torch.equal(
        out, te_mx.gemm(A, te_mx.quantize(x.view(6, 40)), out_dtype=torch.float32).out
    )


def test_out_is_written_in_place():
    A, B, a, b = problem(24, 40, 64, "TN", 1)
    for dtype in DTYPES:
        out = torch.full((40, 24), torch.nan, dtype=dtype)
        version = out._version
        assert te_mx.gemm(A, B, out=out).out is out
        assert out._version > version
        oracles.assert_gemm(out, a, b)


@pytest.mark.parametrize("accumulate", [False, True])
def test_zero_sizes(accumulate):
    for m, n, k in ((0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0)):
        A, B = te_mx.quantize(torch.randn(m, k)), te_mx.quantize(torch.randn(n, k))
        out = torch.full((n, m), 2.0) if accumulate else None
        made = te_mx.gemm(A, B, out=out, out_dtype=torch.float32, accumulate=accumulate)
        assert made.out.shape == (n, m)
        assert (made.out == (2.0 if accumulate else 0.0)).all()
    A, B = te_mx.quantize(torch.randn(3, 0)), te_mx.quantize(torch.randn(4, 0))
    bias = torch.tensor([1.0, 2.0, 3.0])
    assert torch.equal(te_mx.gemm(A, B, bias=bias, out_dtype=torch.float32).out, bias.expand(4, 3))
    assert (te_mx.gemm(A, B, grad=True, bias=True).bias_grad == 0).all()


def test_nan_blocks_spread_to_their_rows_only():
    x = torch.randn(40, 64)
    x[3, 5] = torch.nan
    w = torch.randn(48, 64)
    w[7, 60] = torch.inf
    out = te_mx.gemm(te_mx.quantize(w), te_mx.quantize(x)).out
    expected = torch.zeros(40, 48, dtype=torch.bool)
    expected[3, :] = expected[:, 7] = True
    assert torch.equal(out.isnan(), expected)


def test_gemm_does_not_track_gradients():
    A, B = te_mx.quantize(torch.randn(8, 32)), te_mx.quantize(torch.randn(4, 32))
    bias = torch.randn(8, requires_grad=True)
    made = te_mx.gemm(A, B, bias=bias, gelu="tanh")
    assert not made.out.requires_grad and not made.aux.requires_grad
    with torch.inference_mode():
        inside = te_mx.gemm(A, B, bias=bias).out
    assert torch.equal(inside, te_mx.gemm(A, B, bias=bias).out)


def test_same_bits_at_every_thread_count(threads):
    A, B, _, _ = problem(200, 300, 500, "TN", 3)
    made = []
    for count in (1, 2, 3):
        threads(count)
        done = te_mx.gemm(A, B, grad=True, bias=True, out_dtype=torch.float32)
        q = te_mx.quantize(B.dequantize(), columnwise=True)
        made.append((done.out, done.bias_grad, q.columnwise_data.view(torch.uint8)))
    for other in made[1:]:
        assert all(torch.equal(x, y) for x, y in zip(made[0], other, strict=True))
