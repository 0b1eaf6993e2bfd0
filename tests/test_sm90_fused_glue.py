"""The Python side of the fused steps on Hopper, on a machine without one: as test_sm90_glue.py."""

from __future__ import annotations

import fake_sm90
import pytest
import strategies
import torch

from te_mx.backends import sm90
from te_mx.backends.base import PLAIN
from te_mx.backends.fused import ACTIVATIONS, NORMS, Activation, Norm, Wanted
from te_mx.engine.explain import FallbackWarning
from te_mx.ops import fused_run

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMS = (
    Wanted("e4m3", True, "transposed", "rceil", 8),
    Wanted("e5m2", True, "plain", "floor", PLAIN),
    Wanted("e4m3", False, "transposed", "rceil", PLAIN),
    Wanted("e4m3", False, None, "rceil", 8),
)


@pytest.fixture(autouse=True)
def hopper(monkeypatch, threads):
    threads(1)
    monkeypatch.setattr(sm90, "_native", fake_sm90)
    monkeypatch.setattr(sm90, "_problems", {None: None})
    monkeypatch.setattr(sm90, "stream", lambda index: 0)
    monkeypatch.setattr(sm90, "set_execution", lambda args, index: None)


def same(got, expected):
    for mine, theirs in zip(got, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


def layouts(x):
    """x, and as rows apart, off by two elements, and columns apart."""
    return x, torch.nn.functional.pad(x, (2, 3))[:, 2:-3], x.t().contiguous().t()


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("z_dtype", DTYPES, ids=str)
def test_normalization(kind, dtype, z_dtype):
    x = strategies.tensor("normal", 75, 130, 3, dtype)
    weight, bias = torch.randn(260)[::2], torch.randn(130)
    for i, given in enumerate(layouts(x)):
        call = given, weight, bias if i else None, Norm(kind, 1e-5), z_dtype
        for wanted in FORMS:
            for want_z in (False, True):
                got = fused_run.norm_on_cuda(*call, want_z, wanted)
                expected = fused_run.norm_composed(*call, want_z, wanted)
                same((*got[:3], *got[3]), (*expected[:3], *expected[3]))
        dz = strategies.tensor("normal", 75, 130, 4, z_dtype)
        for grad in layouts(dz):
            back = grad, given, weight, expected.mean, expected.rstd, dtype
            got, want = (
                fused_run.norm_backward_on_cuda(*back),
                fused_run.norm_backward_composed(*back),
            )
            same(got[:1], want[:1])
            torch.testing.assert_close(got[1:], want[1:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations(name, dtype):
    act = Activation(name, limit=1.5, alpha=1.25, offset=0.5)
    h = strategies.tensor("normal", 75, 260 if act.gated else 130, 3, dtype)
    grad = strategies.tensor("normal", 75, 130, 4, dtype)
    for wanted in FORMS:
        for rows, g in zip(layouts(h), layouts(grad), strict=True):
            for pair, col_sum in ((None, False), (g, True)):
                asked = wanted._replace(col_sum=col_sum)
                for want_out in (False, True):
                    rest = act, dtype, want_out, asked
                    got = fused_run.act_on_cuda(rows, pair, *rest)
                    # torch's own functions differ in the last bit on rows apart.
                    expected = fused_run.act_composed(h, None if pair is None else grad, *rest)
                    same((got.out, *got[1][:4]), (expected.out, *expected[1][:4]))
                    if col_sum:
                        torch.testing.assert_close(got[1].col_sum, expected[1].col_sum)


def test_mixed_dtypes_pass_through_fp32():
    act = Activation("swiglu")
    h, grad = torch.randn(33, 140).half(), torch.randn(33, 70).bfloat16()
    for pair in (None, grad):
        call = h, pair, act, torch.bfloat16, True, FORMS[0]
        got, expected = fused_run.act_on_cuda(*call), fused_run.act_composed(*call)
        same((got.out, *got[1]), (expected.out, *expected[1]))


def test_what_is_missing_is_told(monkeypatch, fresh_warnings):
    monkeypatch.setattr(sm90, "_problems", {None: "hidden by a test"})
    x, weight = torch.randn(3, 40), torch.ones(40)
    with pytest.warns(FallbackWarning, match="normalization on the CPU.*hidden by a test"):
        fused_run.norm_on_cuda(
            x, weight, None, Norm("RMSNorm", 1e-5), torch.float32, True, FORMS[1]
        )
    with pytest.warns(FallbackWarning, match="activation on the CPU.*hidden by a test"):
        fused_run.act_on_cuda(x, None, Activation("silu"), torch.float32, True, FORMS[1])


def test_nothing_to_do():
    x, weight = torch.randn(0, 40), torch.ones(40)
    made = fused_run.norm_on_cuda(
        x, weight, None, Norm("LayerNorm", 1e-5), torch.float32, True, FORMS[1]
    )
    assert made.z.shape == (0, 40) and made.quantized.row_codes.shape == (0, 40)
    made = fused_run.act_on_cuda(x, None, Activation("silu"), torch.float32, True, FORMS[1])
    assert made.out.shape == (0, 40)
