"""The native CPU dequantizer against ml_dtypes, over every (code, scale byte) pair."""

import ml_dtypes
import numpy as np
import pytest
import quantize_oracle as oracle
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

native = pytest.importorskip("te_mx._native")

DTYPE = {"float32": 0, "bfloat16": 1, "float16": 2}
FMT = {"e4m3": 0, "e5m2": 1}
LEVELS = [level for level in range(5) if native.isa_available(level)]
BITS = {"float32": np.uint32, "bfloat16": np.uint16, "float16": np.uint16}
BAD_ARGUMENT, UNSUPPORTED = 1, 2
GUARD = 64


@pytest.fixture(autouse=True)
def restore_isa():
    level = native.isa_current()
    yield
    native.set_isa(level)


def dequantize(codes, scales, fmt, dtype, along_rows, threads=1):
    """Bit patterns [rows, cols], from memory that was poisoned and is guarded at both ends."""
    rows, cols = codes.shape
    codes, scales = np.ascontiguousarray(codes), np.ascontiguousarray(scales)
    size = np.dtype(BITS[dtype]).itemsize
    out = np.full(rows * cols * size + 2 * GUARD, 0xA5, np.uint8)
    layout, rows_k = ("k_first", (cols, rows)) if along_rows else ("k_last", (rows, cols))
    args = native.DequantizeArgs(
        codes=codes.ctypes.data, scales=scales.ctypes.data, rows=rows_k[0], k=rows_k[1],
        layout=native.LAYOUTS[layout], element=FMT[fmt], out=out.ctypes.data + GUARD,
        out_dtype=DTYPE[dtype], threads=threads,
    )  # fmt: skip
    assert native.dequantize(args) == 0
    assert (out[:GUARD] == 0xA5).all() and (out[len(out) - GUARD :] == 0xA5).all()
    return out[GUARD : len(out) - GUARD].view(BITS[dtype]).reshape(rows, cols)


def expected_bits(codes, byte, fmt, dtype):
    target = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    with np.errstate(all="ignore"):
        # Every finite value is an fp32 number or overflows it, so this rounds once.
        values = oracle.dequantize(codes, byte, fmt).astype(np.float32).astype(target)
    return values.view(BITS[dtype]), np.isnan(values.astype(np.float32))


def check(codes, scales, fmt, dtype, along_rows, threads=1):
    axis = 0 if along_rows else 1
    each = np.repeat(scales, 32, axis=axis)[: codes.shape[0], : codes.shape[1]]
    bits, nan = expected_bits(codes, each, fmt, dtype)
    first = None
    for level in LEVELS:
        native.set_isa(level)
        got = dequantize(codes, scales, fmt, dtype, along_rows, threads)
        np.testing.assert_array_equal(got[~nan], bits[~nan], err_msg=f"isa {level}")
        value = torch.from_numpy(got.view(np.int32 if dtype == "float32" else np.int16).copy())
        assert value.view(getattr(torch, dtype)).isnan().numpy()[nan].all()
        first = got if first is None else first
        np.testing.assert_array_equal(got, first, err_msg=f"NaN patterns, isa {level}")


@pytest.mark.parametrize("dtype", DTYPE)
@pytest.mark.parametrize("fmt", FMT)
def test_every_code_and_scale(fmt, dtype):
    codes, byte = np.meshgrid(np.arange(256, dtype=np.uint8), np.arange(256, dtype=np.uint8))
    check(codes, np.repeat(byte[:, :1], 8, 1), fmt, dtype, along_rows=False)
    check(codes.T, np.repeat(byte[:, :1], 8, 1).T, fmt, dtype, along_rows=True)
    # One row of every byte beside each other: a vector of scales with both ends of the range in it.
    check(codes[:32].T.copy(), np.roll(byte[:, 0], 7).reshape(8, 32), fmt, dtype, along_rows=True)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.one_of(st.sampled_from([1, 31, 32, 33, 64]), st.integers(1, 150)),
    cols=st.one_of(st.sampled_from([1, 31, 32, 33, 64]), st.integers(1, 150)),
    fmt=st.sampled_from(list(FMT)),
    dtype=st.sampled_from(list(DTYPE)),
    along_rows=st.booleans(),
    threads=st.integers(1, 4),
    spread=st.sampled_from([1, 20, 256]),
    seed=st.integers(0, 2**32 - 1),
)
def test_equals_oracle(rows, cols, fmt, dtype, along_rows, threads, spread, seed):
    rng = np.random.default_rng(seed)
    shape = (-(-rows // 32), cols) if along_rows else (rows, -(-cols // 32))
    scales = (127 + rng.integers(0, spread, shape)).astype(np.uint8)
    codes = rng.integers(0, 256, (rows, cols), dtype=np.uint8)
    check(codes, scales, fmt, dtype, along_rows, threads)


@pytest.mark.parametrize("along_rows", [False, True])
def test_many_items_and_threads(along_rows):
    rng = np.random.default_rng(0)
    rows, cols = 330, 2500
    shape = (-(-rows // 32), cols) if along_rows else (rows, -(-cols // 32))
    codes = rng.integers(0, 256, (rows, cols), dtype=np.uint8)
    scales = rng.integers(0, 256, shape, dtype=np.uint8)
    for threads in (1, 2, 5):
        check(codes, scales, "e4m3", "bfloat16", along_rows, threads)


def test_flush_to_zero_mode_changes_nothing():
    codes, byte = np.meshgrid(np.arange(256, dtype=np.uint8), np.arange(40, dtype=np.uint8))
    scales = np.repeat(byte[:, :1], 8, 1)
    normal = dequantize(codes, scales, "e5m2", "float32", False)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no flush-to-zero mode")
    try:
        got = []
        for level in LEVELS:
            native.set_isa(level)
            got.append(dequantize(codes, scales, "e5m2", "float32", False))
    finally:
        torch.set_flush_denormal(False)
    for bits in got:
        np.testing.assert_array_equal(bits, normal)


def test_empty_and_bad_arguments():
    out = np.zeros(64, np.uint8)
    address = out.ctypes.data
    good = native.DequantizeArgs(
        codes=address, scales=address, rows=4, k=4, out=address, out_dtype=1
    )
    assert native.dequantize(good) == 0
    assert native.dequantize(native.DequantizeArgs(rows=0, k=4, out_dtype=1)) == 0
    for field, value in (
        ("codes", 0), ("scales", 0), ("rows", -1), ("element", 7), ("out_dtype", 3), ("out", 0)
    ):  # fmt: skip
        assert native.dequantize(good.copy(**{field: value})) == BAD_ARGUMENT
    for field, value in (("element", 2), ("scale_type", 1), ("layout", native.LAYOUTS["tiles"])):
        assert native.dequantize(good.copy(**{field: value})) == UNSUPPORTED
