"""Few rows on a weight that stands still, on the CPU: prepared records, the bits of the steps."""

from __future__ import annotations

import pytest
import torch

import te_mx
from te_mx import workspace
from te_mx.backends.cpu import frozen, gemm
from te_mx.dispatch import registry
from te_mx.dispatch import run as dispatch

FORMATS = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp4")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def layer(drop_master, fmt, dtype=torch.float32, bias=True):
    torch.manual_seed(0)
    made = te_mx.Linear(70, 33, bias, dtype=dtype)
    te_mx.freeze_weights(made, drop_master, fmt=fmt, activations="mxfp8")
    return made


@pytest.fixture
def steps(monkeypatch):
    """Layers that run step by step, for the time of a call."""

    def run(made, x):
        with monkeypatch.context() as patched, torch.no_grad(), te_mx.autocast():
            patched.setattr(frozen.Frozen, "accepts", lambda self, problem: "is not asked")
            registry.forget()
            expected = made(x)
        registry.forget()
        return expected

    return run


def no_step(what):
    raise AssertionError("a layer quantized step by step")


def run(made, x):
    with pytest.MonkeyPatch.context() as patched, torch.no_grad(), te_mx.autocast():
        patched.setattr(dispatch, "quantize", no_step)
        with workspace.guarded():
            return made(x)


@pytest.mark.parametrize("drop_master", [False, True])
@pytest.mark.parametrize("fmt", FORMATS)
def test_bits_are_those_of_the_steps(isa, fmt, drop_master, steps):
    for dtype in DTYPES:
        for bias in (False, True):
            made = layer(drop_master, fmt, dtype, bias)
            for x in (
                torch.randn(16, 70), torch.randn(2, 3, 70), torch.randn(70),
                torch.randn(70, 5).t(), torch.randn(4, 210)[:, ::3],
            ):  # fmt: skip
                x = x.to(dtype)
                got = run(made, x)
                assert te_mx.audit(made)["(root)"].fprop.endswith("_stream")
                assert got.dtype == dtype and torch.equal(got, steps(made, x))


def test_a_packed_weight_is_read_packed(isa, steps, monkeypatch):
    """Where a table, here the lack of another one, says that the kernel for many rows is taken."""
    monkeypatch.setattr(gemm.Stream, "accepts", lambda self, problem: "is not there")
    registry.forget()
    made, x = layer(False, "mxfp8_e4m3"), torch.randn(3, 70)
    assert torch.equal(run(made, x), steps(made, x))
    registry.forget()


def test_wide_scales_run_where_the_steps_run_them(isa, steps):
    made = layer(True, "mxfp8_e4m3")
    x = torch.randn(4, 70)
    x[:, :32] *= 2.0**60
    x[:, 32:64] *= 2.0**-60
    got = run(made, x)
    assert te_mx.audit(made)["(root)"].fprop == "wide_f64"
    assert torch.equal(got, steps(made, x))


def test_a_change_of_the_codes_and_of_threads_is_seen(steps):
    made, x = layer(True, "mxfp4"), torch.randn(2, 70)
    first, threads = run(made, x), torch.get_num_threads()
    made.weight_scale += 1
    assert torch.equal(run(made, x), steps(made, x)) and not torch.equal(run(made, x), first)
    try:
        torch.set_num_threads(threads + 1)
        assert torch.equal(run(made, x), steps(made, x))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("drop_master", [False, True])
@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_do_not_follow_those_beside_them(isa, fmt, drop_master):
    """Up to 16 of them, and beyond, where another kernel sums in another order."""
    made = te_mx.Linear(520, 33)
    te_mx.freeze_weights(made, drop_master, fmt=fmt, activations="mxfp8")
    x = torch.randn(64, 520)
    with torch.no_grad(), te_mx.autocast():
        for counts in (range(1, 17), (17, 31, 32, 33, 64)):
            whole = made(x[: counts[-1]])
            for m in counts:
                assert torch.equal(made(x[:m]), whole[:m]), m
        alone = torch.cat([made(row) for row in x[:16].split(1)])
        assert torch.equal(alone, made(x[:16]))
