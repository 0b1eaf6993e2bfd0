"""MXTensor: fields, checks of hand-made parts, copies, pickles, the packed form it keeps."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import oracles
import pytest
import strategies as our
import torch
from hypothesis import given
from hypothesis import strategies as st

import te_mx
from te_mx import _ops as ops
from te_mx.dispatch.registry import pick


def sample(shape=(3, 5, 70), **kwargs) -> te_mx.MXTensor:
    kwargs = {"columnwise": True, **kwargs}
    return te_mx.quantize(torch.randn(shape, dtype=torch.bfloat16), **kwargs)


def test_fields():
    q = sample(columnwise_transposed=False)
    assert q.shape == (3, 5, 70) and (q.rows, q.cols) == (15, 70)
    assert q.fmt == "e4m3" and q.device == torch.device("cpu") and not q.columnwise_transposed
    assert q.rowwise_data.dtype == q.columnwise_data.dtype == torch.float8_e4m3fn
    assert q.rowwise_scale.dtype == q.columnwise_scale.dtype == torch.float8_e8m0fnu
    assert q.rowwise_data.shape == q.columnwise_data.shape == (15, 70)
    assert q.rowwise_scale.shape == (15, 3) and q.columnwise_scale.shape == (1, 70)
    assert q.nbytes == 15 * 70 + 15 * 3 + 15 * 70 + 70
    turned = sample(columnwise_transposed=True, fmt="e5m2", rowwise=False)
    assert turned.rowwise_data is None and turned.rowwise_scale is None
    assert turned.columnwise_data.dtype == torch.float8_e5m2 and turned.columnwise_transposed
    assert turned.columnwise_data.shape == (70, 15) and turned.columnwise_scale.shape == (70, 1)
    assert sample(columnwise=False).columnwise_data is None


def test_repr():
    q = sample(columnwise_transposed=True)
    expected = (
        "MXTensor(shape=(3, 5, 70), fmt='e4m3', rowwise + columnwise transposed, device='cpu')"
    )
    assert repr(q) == expected


def test_immutable():
    q = sample()
    with pytest.raises(AttributeError, match="immutable"):
        q.fmt = "e5m2"
    with pytest.raises(AttributeError, match="immutable"):
        del q._row_codes


@given(
    shape=st.lists(st.sampled_from([0, 1, 3, 33]), min_size=1, max_size=4), seed=our.SEEDS,
    kind=st.sampled_from(our.FINITE_KINDS), fmt=our.FORMATS, transposed=st.booleans(),
)  # fmt: skip
def test_dequantize(shape, seed, kind, fmt, transposed):
    rows, cols = int(np.prod(shape[:-1])), shape[-1]
    x = our.tensor(kind, rows, cols, seed, torch.float32)
    q = te_mx.quantize(x.view(shape), fmt=fmt, columnwise=True, columnwise_transposed=transposed)
    for usage, quantizer in (("rowwise", oracles.quantize), ("columnwise", oracles.columnwise)):
        got = q.dequantize(torch.float64, usage)
        assert got.shape == tuple(shape)
        codes, scales = quantizer(x.numpy(), fmt, "rceil")
        if usage == "columnwise":
            expected = oracles.values(
                np.ascontiguousarray(codes.T), np.ascontiguousarray(scales.T), fmt
            ).T
        else:
            expected = oracles.values(codes, scales, fmt)
        np.testing.assert_array_equal(got.numpy().reshape(rows, cols), expected)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            expected_t = torch.from_numpy(np.ascontiguousarray(expected)).float().to(dtype)
            assert torch.equal(q.dequantize(dtype, usage).view(rows, cols), expected_t)


def test_dequantize_errors():
    with pytest.raises(ValueError, match=r"has no rowwise copy; pass usage='columnwise'"):
        sample(rowwise=False).dequantize()
    with pytest.raises(ValueError, match="usage must be"):
        sample().dequantize(usage="diagonal")
    with pytest.raises(TypeError, match="dtype must be"):
        sample().dequantize(torch.int32)


# -------------------------------------------------------------------------------------- constructor
def parts(q: te_mx.MXTensor) -> dict:
    return {
        "rowwise_data": q.rowwise_data,
        "rowwise_scale": q.rowwise_scale,
        "columnwise_data": q.columnwise_data,
        "columnwise_scale": q.columnwise_scale,
        "columnwise_transposed": q.columnwise_transposed,
    }


@pytest.mark.parametrize("transposed", [False, True])
def test_constructor_takes_its_own_parts(transposed):
    q = sample(columnwise_transposed=transposed)
    assert te_mx.MXTensor(q.shape, q.fmt, **parts(q)).equal(q)
    as_bytes = {
        k: v.view(torch.uint8) if isinstance(v, torch.Tensor) else v for k, v in parts(q).items()
    }
    assert te_mx.MXTensor(list(q.shape), q.fmt, **as_bytes).equal(q)


def test_constructor_makes_strided_parts_contiguous():
    q = sample()
    strided = {
        k: v.view(torch.uint8).t().contiguous().t() if isinstance(v, torch.Tensor) else v
        for k, v in parts(q).items()
    }
    made = te_mx.MXTensor(q.shape, q.fmt, **strided)
    assert made.equal(q) and made.rowwise_data.is_contiguous()


BYTES = torch.zeros(1, 1, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"fmt": "e3m4"}, ValueError, "fmt must be one of .*'e4m3', .*'mxfp4', .* got 'e3m4'"),
        ({"shape": ()}, ValueError, "one dimension or more"),
        ({"rowwise_scale": None}, ValueError, "rowwise_data was given without rowwise_scale"),
        ({"columnwise_data": None}, ValueError, "columnwise_scale was given with"),
        ({"rowwise_data": torch.zeros(2, 64)}, TypeError, "must be uint8 or torch.float8_e4m3fn"),
        ({"rowwise_scale": torch.ones(2, 2)}, TypeError, r"use \.to\(torch.float8_e8m0"),
        ({"fmt": "fp8_e4m3_1x128", "rowwise_scale": BYTES}, TypeError, r"use \.view\(torch.float8"),
        ({"fmt": "e5m2"}, TypeError, "rowwise_data must be uint8 or torch.float8_e5m2"),
        ({"rowwise_data": [1]}, TypeError, "rowwise_data must be a tensor, got list"),
        ({"rowwise_scale": BYTES.expand(128, 4)}, ValueError, r"have shape \(2, 2\).*unpadded"),
        ({"columnwise_transposed": True}, ValueError, r"columnwise_data must have shape \(64, 2\)"),
        ({"shape": (64, 2)}, ValueError, r"rowwise_data must have shape \(64, 2\)"),
        ({"rowwise_scale": BYTES.expand(2, 2).to("meta")}, ValueError, "move them to one"),
    ],
)  # fmt: skip
def test_constructor_errors(change, error, message):
    q = sample((2, 64), columnwise_transposed=False)
    arguments = {"shape": q.shape, "fmt": q.fmt, **parts(q), **change}
    with pytest.raises(error, match=message):
        te_mx.MXTensor(**arguments)


@pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")
@pytest.mark.parametrize("fmt, count", [("mxfp4", 16), ("mxfp6_e2m3", 64)])
def test_bytes_that_are_no_codes(fmt, count):
    """One code a byte has bits that no code has: they are refused when they are given and when they
    were written, by whatever reads them."""
    scales, one = torch.full((2, 2), 127, dtype=torch.uint8), te_mx.quantize(torch.ones(3, 33))

    def made(byte):
        codes = torch.zeros(33, 2, dtype=torch.uint8)
        codes[5, 1] = byte
        return codes, te_mx.MXTensor(
            (33, 2), fmt, columnwise_data=codes, columnwise_scale=scales
        )  # fmt: skip

    message = f"columnwise_data holds the byte {count}, and codes of {fmt} are 0 to {count - 1}"
    with pytest.raises(ValueError, match=message):
        made(count)
    codes, whole = made(count - 1)
    for read in (
        lambda: whole.dequantize(usage="columnwise"),
        lambda: te_mx.gemm(whole, one, "NN", out_dtype=torch.float32),
    ):
        before = [read(), read(), read()]  # packed from the second use on
        codes[5, 1] = count
        with pytest.raises(ValueError, match=message):
            read()
        codes[5, 1] = count - 1
        assert type(before[0]) is type(read())
    q = te_mx.quantize(torch.randn(64, 32), fmt=fmt, columnwise=True)
    assert q.dequantize(usage="columnwise").isfinite().all()


def test_constructor_needs_a_copy():
    with pytest.raises(ValueError, match="got none"):
        te_mx.MXTensor((2, 64), "e4m3")


def test_constructor_wants_one_device():
    q = sample((2, 64))
    moved = {
        k: v.to("meta") if isinstance(v, torch.Tensor) and "row" in k else v
        for k, v in parts(q).items()
    }
    with pytest.raises(ValueError, match="move them to one device"):
        te_mx.MXTensor(q.shape, q.fmt, **moved)


# --------------------------------------------------------------------------------- moves and copies
def test_pickle_and_copies():
    for q in (sample(), sample(columnwise=False, fmt="e5m2"), sample((7,)), sample((0, 4))):
        buffer = io.BytesIO()
        torch.save({"weight": q}, buffer)
        buffer.seek(0)
        assert torch.load(buffer, weights_only=True)["weight"].equal(q)
        assert pickle.loads(pickle.dumps(q)).equal(q)
        assert copy.copy(q).equal(q)
        deep = copy.deepcopy(q)
        assert deep.equal(q)
        assert (
            deep.rowwise_data.data_ptr() != q.rowwise_data.data_ptr() or q.rowwise_data.numel() == 0
        )


def test_to():
    q = sample()
    assert q.to("cpu") is q and q.to(torch.device("cpu")) is q
    assert q.to("meta").device.type == "meta"
    with pytest.raises(TypeError, match="moves between devices"):
        q.to(torch.bfloat16)


def test_equal():
    q = sample()
    other = te_mx.quantize(q.dequantize() + 1, columnwise=True)
    assert not q.equal(other)
    assert not q.equal(sample(columnwise=False))
    assert not te_mx.quantize(q.dequantize()).equal(te_mx.quantize(q.dequantize().flatten(0, 1)))
    with pytest.raises(TypeError, match="compares MXTensors"):
        q.equal(q.dequantize())


# -------------------------------------------------------------------------------------- packed form
def test_packed_form_is_kept_from_the_second_use_and_never_stale(isa):
    w, x = sample((40, 70)), sample((33, 70))
    expected = te_mx.gemm(w, x).out
    assert all(kept[1] is None for kept in w._packs.values())
    assert torch.equal(te_mx.gemm(w, x).out, expected)  # packs
    assert torch.equal(te_mx.gemm(w, x).out, expected)  # reads the packed form
    kept = w._packs["rowwise", "rhs", ops.Mode(), 0][1]
    fresh = ops.kept_form(w.operand("rowwise"), "rhs", ops.Mode())
    assert (kept.packed is None) == (fresh.packed is None)
    assert kept.packed is None or torch.equal(kept.packed, fresh.packed)
    # A write through a view of the codes is noticed.
    w.rowwise_data.view(torch.uint8).zero_()
    assert te_mx.gemm(w, x).out.abs().max() == 0
    # The packed form stays home.
    assert not pickle.loads(pickle.dumps(w))._packs and not copy.deepcopy(w)._packs


def test_few_rows_keep_no_packed_form():
    """Stream kernels read the codes: packing would triple the memory for nothing."""
    w, x = sample((40, 70)), sample((3, 70))
    for _ in range(3):
        te_mx.gemm(w, x)
    spec = "mxfp8_e4m3@rows"
    if pick("gemm", x.device, spec, spec, (3, 40, 70)).name.endswith("stream"):
        assert not w._packs and not x._packs
