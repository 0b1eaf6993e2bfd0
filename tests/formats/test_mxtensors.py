"""te_mx.quantize, MXTensor and te_mx.gemm in every registered format, as users call them."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import oracles
import pytest
import strategies as our
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import te_mx
from te_mx import formats
from te_mx.api import blas

pytestmark = pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")

NAMES = st.sampled_from(formats.names())
EVERY = pytest.mark.parametrize("name", formats.names())
SIZES = st.sampled_from([0, 1, 2, 3, 7, 31, 32, 33, 65, 97])
BYTE = torch.uint8


@EVERY
@pytest.mark.parametrize("transposed", [None, False, True])
def test_fields(name, transposed):
    x = torch.randn(3, 5, 70)
    q = te_mx.quantize(x, fmt=name, columnwise=True, columnwise_transposed=transposed)
    fmt, flat = formats.get(name), x.view(15, 70)
    bits = fmt.element.bits
    assert q.format is fmt and formats.get(q.fmt) is fmt and q.shape == (3, 5, 70)
    assert repr(q).startswith(f"MXTensor(shape=(3, 5, 70), fmt={q.fmt!r}, rowwise + columnwise")
    if transposed is None:  # codes that share bytes are packed along the blocks
        assert q.columnwise_transposed or bits == 8
    whole = q.columnwise_transposed or bits == 8
    shown = fmt.element.torch_dtype or BYTE
    assert q.rowwise_data.dtype == shown
    assert q.rowwise_scale.dtype == q.columnwise_scale.dtype == fmt.scaling.torch_dtype
    assert q.columnwise_data.dtype == (shown if whole else BYTE)
    rule, stored = fmt.scaling.rules[0], fmt.scaling.storage
    codes, scales = fmt.quantize(flat, rule)
    nbytes = codes.nbytes + scales.nbytes
    assert torch.equal(q.rowwise_data.view(BYTE), codes)
    assert torch.equal(q.rowwise_scale.view(stored), scales)
    codes, scales = fmt.quantize(flat.t(), rule)
    if not q.columnwise_transposed:
        codes, scales = fmt.unpack(codes, 15).t(), scales.t()
    assert torch.equal(q.columnwise_data.view(BYTE), codes)
    assert torch.equal(q.columnwise_scale.view(stored), scales)
    assert q.nbytes == nbytes + codes.nbytes + scales.nbytes
    if fmt.scaling.scale == "e8m0":
        assert q.nbytes == 15 * -(-70 * bits // 8) + 15 * 3 + codes.numel() + 70


@EVERY
@pytest.mark.parametrize("transposed", [False, True])
def test_copies(name, transposed):
    x = torch.randn(33, 41)
    q = te_mx.quantize(x, fmt=name, columnwise=True, columnwise_transposed=transposed)
    file = io.BytesIO()
    torch.save(q, file)
    file.seek(0)
    parts = (q.rowwise_data, q.rowwise_scale, q.columnwise_data, q.columnwise_scale)
    words = ("rowwise_data", "rowwise_scale", "columnwise_data", "columnwise_scale")
    stored = [BYTE, q.format.scaling.storage] * 2
    as_bytes = [part.view(dtype) for part, dtype in zip(parts, stored, strict=True)]
    for given_parts in (parts, as_bytes):
        fields = dict(zip(words, given_parts, strict=True), columnwise_transposed=transposed)
        assert te_mx.MXTensor(q.shape, name, **fields).equal(q)
    for other in (
        torch.load(file, weights_only=True), pickle.loads(pickle.dumps(q)), copy.deepcopy(q)
    ):  # fmt: skip
        assert other.equal(q) and other.format is q.format
    short = {**fields, "rowwise_data": parts[0].view(BYTE)[:, :-1]}
    with pytest.raises(ValueError, match="rowwise_data must have shape"):
        te_mx.MXTensor(q.shape, name, **short)


def values(q: te_mx.MXTensor, usage: str) -> np.ndarray:
    """fp64 [rows, k] with k along the blocks of one copy."""
    made = q.dequantize(torch.float64, usage).numpy()
    return made if usage == "rowwise" else np.ascontiguousarray(made.T)


@given(
    m=SIZES, n=SIZES, k=SIZES, names=st.tuples(NAMES, NAMES), layout=our.LAYOUTS, seed=our.SEEDS,
    transposed=st.booleans(), rule=st.integers(0, 2),
    kind=st.sampled_from(our.FINITE_KINDS), dtype=our.DTYPES,
)  # fmt: skip
@settings(max_examples=100)
def test_products_of_any_two(m, n, k, names, layout, seed, transposed, rule, kind, dtype):
    sides = []
    for rows, usage, name, i in zip((m, n), blas.USAGES[layout], names, (0, 1), strict=True):
        shape = (rows, k) if usage == "rowwise" else (k, rows)
        x = our.tensor((kind, "outliers")[i], *shape, seed + i, torch.float32)
        rules = formats.get(name).scaling.rules
        q = te_mx.quantize(
            x, fmt=name, columnwise=True, columnwise_transposed=transposed,
            scale_rule=rules[rule % len(rules)],
        )  # fmt: skip
        sides.append((q, values(q, usage)))
    (A, a), (B, b) = sides
    made = te_mx.gemm(A, B, layout, out_dtype=dtype)
    oracles.assert_gemm(made.out, a, b)
    again = te_mx.gemm(A, B, layout, out_dtype=dtype)
    torch.testing.assert_close(again.out, made.out, rtol=0, atol=0, equal_nan=True)


@EVERY
def test_epilogues(name):
    """All words at once, beside those of MXFP8."""
    A, B = te_mx.quantize(torch.randn(24, 70), fmt=name), te_mx.quantize(torch.randn(40, 70))
    a, b = values(A, "rowwise"), values(B, "rowwise")
    bias, before = torch.randn(24), torch.randn(40, 24)
    out = before.clone()
    made = te_mx.gemm(
        A, B, bias=bias, gelu="erf", out=out, accumulate=True, aux_dtype=torch.float32
    )
    v = b @ a.T + bias.numpy()
    near = np.abs(v) * 2.0**-20
    oracles.assert_gemm(made.aux, a, b, v, near)
    oracles.assert_gemm(out, a, b, oracles.gelu(v, "erf") + before.numpy(), near + 2.0**-20)
    made = te_mx.gemm(A, B, grad=True, gelu_in=before, bias=True, out_dtype=torch.float32)
    v = (b @ a.T) * oracles.dgelu(before.double().numpy(), "tanh")
    near = np.abs(b @ a.T) * 2.0**-19
    oracles.assert_gemm(made.out, a, b, v, near + oracles.gemm_bound(a, b))
    np.testing.assert_allclose(made.bias_grad, v.sum(0), atol=1e-3)
    sums = te_mx.gemm(B, A, grad=True, bias=True).bias_grad
    np.testing.assert_allclose(sums, a.sum(1), rtol=1e-5, atol=1e-4)
