"""The fused steps of the Hopper backend, on a machine without one: as test_sm90_glue.py."""

from __future__ import annotations

import itertools

import as_on_hopper
import fake_sm90
import pytest
import strategies
import torch

from te_mx._ops import Quantize
from te_mx._ops.fused import act_quantize_2d, norm_backward_2d, norm_quantize_2d
from te_mx.backends.reference import fused
from te_mx.backends.reference.quantize import quantize
from te_mx.backends.sm90 import binding
from te_mx.dispatch import registry
from te_mx.dispatch.fused import (
    ACTIVATIONS,
    NORMS,
    Activation,
    ActParts,
    ActStep,
    Norm,
    NormParts,
    NormStep,
    Target,
)
from te_mx.layouts.operand import Quantized
from te_mx.runtime.kernel_log import FallbackWarning

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
E4M3, E5M2, LOW = "mxfp8_e4m3", "mxfp8_e5m2", "fp8_e4m3_1x128"
TARGETS = (
    Target(f"{E4M3}@sm90:8", f"{E4M3}@sm90:8", "rceil"),
    Target(f"{E5M2}@rows", f"{E5M2}@cols", "floor"),
    Target("", f"{E4M3}@rows", "rceil"),
    Target(f"{LOW}@sm90_factors", f"{LOW}@sm90:8", "pow2"),
    Target(f"{LOW}@sm90_factors", f"{LOW}@sm90_factors", "fp32:0.001"),
    Target("", "", "rceil"),
)
# What native code does not make in one step: the value is made there, and quantized apart.
APART = (
    Target(f"{E4M3}@rows", f"{E5M2}@rows", "rceil"),
    Target(f"{E4M3}@sm90:8", f"{E4M3}@rows", "rceil"),
    Target("", f"{E4M3}@cols", "even"),
    Target("mxfp6_e2m3@rows", "mxfp4@rows", "floor"),
)


@pytest.fixture(autouse=True)
def hopper(threads):
    threads(1)
    with as_on_hopper.hopper():
        yield


def quantized(values, target):
    """As a target says, by the reference."""
    if target.codes:
        return quantize(Quantize(values, *target))
    return Quantized(col_sum=values.sum(0, dtype=torch.float32) if target.col_sum else None)


def norm_one_by_one(s):
    mean, rstd, z = fused.normalize(s.x, s.weight, s.bias, s.norm, s.dtype)
    return NormParts(mean, rstd, z if s.keep else None, quantized(z, s.target))


def act_one_by_one(s):
    if s.grad is None:
        out = fused.activate(s.h, s.act, s.dtype)
    else:
        out = fused.activate_backward(s.grad, s.h, s.act, s.dtype)
    return ActParts(out if s.keep else None, quantized(out, s.target))


def parts_of(made):
    """Tensors, specs and sizes, without sums."""
    *tensors, q = made
    sides = [(None,) * 5 if side is None else side[:5] for side in (q.row, q.col)]
    return [*tensors, *(part for side in sides for part in side)]


def same(got, expected):
    for mine, theirs in zip(got, expected, strict=True):
        if isinstance(theirs, torch.Tensor):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
        else:
            assert mine == theirs


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
        for target in TARGETS:
            for keep in (False, True):
                step = NormStep(*call, keep, target)
                expected = norm_one_by_one(step)
                same(parts_of(norm_quantize_2d(step)), parts_of(expected))
        dz = strategies.tensor("normal", 75, 130, 4, z_dtype)
        for grad in layouts(dz):
            back = grad, given, weight, expected.mean, expected.rstd, dtype
            got, want = norm_backward_2d(*back), fused.normalize_backward(*back)
            same(got[:1], want[:1])
            torch.testing.assert_close(got[1:], want[1:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations(name, dtype):
    act = Activation(name, limit=1.5, alpha=1.25, offset=0.5)
    h = strategies.tensor("normal", 75, 260 if act.gated else 130, 3, dtype)
    grad = strategies.tensor("normal", 75, 130, 4, dtype)
    for target in TARGETS:
        for col_sum, keep in itertools.product([False, True], repeat=2):
            rest = act, dtype, keep, target._replace(col_sum=col_sum)
            # torch's own functions differ in the last bit on rows apart.
            expected = act_one_by_one(ActStep(h, grad if col_sum else None, *rest))
            for rows, g in zip(layouts(h), layouts(grad), strict=True):
                got = act_quantize_2d(ActStep(rows, g if col_sum else None, *rest))
                same(parts_of(got), parts_of(expected))
                sums = got.quantized.col_sum, expected.quantized.col_sum
                assert (sums[0] is not None) == (sums[1] is not None) == col_sum
                if col_sum:
                    torch.testing.assert_close(*sums)


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_what_is_quantized_is_not_written(target, monkeypatch):
    def never(args):
        raise AssertionError("the result was written and quantized in a second pass")

    monkeypatch.setattr(fake_sm90, "quantize", never)
    x, h = torch.randn(75, 130).bfloat16(), torch.randn(75, 260).bfloat16()
    if E5M2 not in target.row:  # the format of gradients
        norm_quantize_2d(
            NormStep(x, torch.ones(130), None, Norm("RMSNorm", 1e-5), torch.bfloat16, False, target)
        )
    for grad in (None, x):
        act_quantize_2d(ActStep(h, grad, Activation("swiglu"), torch.bfloat16, False, target))


def test_mixed_dtypes_pass_through_fp32():
    act = Activation("swiglu")
    h, grad = torch.randn(33, 140).half(), torch.randn(33, 70).bfloat16()
    for pair in (None, grad):
        step = ActStep(h, pair, act, torch.bfloat16, True, TARGETS[0])
        same(parts_of(act_quantize_2d(step)), parts_of(act_one_by_one(step)))


@pytest.mark.filterwarnings("ignore:te_mx runs quantize:te_mx.FallbackWarning")
@pytest.mark.parametrize("col_sum", [False, True])
@pytest.mark.parametrize("target", APART, ids=str)
def test_what_native_code_does_not_quantize(target, col_sum):
    x, grad, weight = torch.randn(75, 130), torch.randn(75, 65), torch.randn(130)
    asked = target._replace(col_sum=col_sum)
    for keep in (False, True):
        norm = NormStep(x, weight, None, Norm("RMSNorm", 1e-5), torch.bfloat16, keep, asked)
        act = ActStep(x, grad, Activation("swiglu"), torch.float32, keep, asked)
        for got, expected in (
            (norm_quantize_2d(norm), norm_one_by_one(norm)),
            (act_quantize_2d(act), act_one_by_one(act)),
        ):
            same(parts_of(got), parts_of(expected))
            if col_sum:
                torch.testing.assert_close(got.quantized.col_sum, expected.quantized.col_sum)


def test_what_is_missing_is_told(monkeypatch, fresh_warnings):
    monkeypatch.setattr(binding, "_problems", {0: "hidden by a test"})
    registry.forget()
    x, weight = torch.randn(3, 40), torch.ones(40)
    norm = NormStep(x, weight, None, Norm("RMSNorm", 1e-5), torch.float32, True, TARGETS[-1])
    with pytest.warns(FallbackWarning, match="norm_quantize on cuda:0 .*hidden by a test"):
        made = norm_quantize_2d(norm)
    with pytest.warns(FallbackWarning, match="norm_backward on cuda:0 .*hidden by a test"):
        norm_backward_2d(x, x, weight, None, made.rstd, torch.float32)
    with pytest.warns(FallbackWarning, match="act_quantize on cuda:0 .*hidden by a test"):
        act_quantize_2d(ActStep(x, None, Activation("silu"), torch.float32, True, TARGETS[-1]))


def test_nothing_to_do():
    x, weight = torch.randn(0, 40), torch.ones(40)
    norm = NormStep(x, weight, None, Norm("LayerNorm", 1e-5), torch.float32, True, TARGETS[1])
    made = norm_quantize_2d(norm)
    assert made.z.shape == (0, 40) and made.quantized.row.codes.shape == (0, 40)
    made = act_quantize_2d(ActStep(x, None, Activation("silu"), torch.float32, True, TARGETS[1]))
    assert made.out.shape == (0, 40) and made.quantized.row.codes.shape == (0, 40)
