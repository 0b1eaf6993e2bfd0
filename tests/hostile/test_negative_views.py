"""Tensors whose memory holds the negatives of their values (torch._neg_view, the imaginary part of
a conjugate): read as what they stand for, wherever a tensor is taken.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import te_mx
from te_mx import _ops as ops
from te_mx._ops.fused import act_quantize_2d, norm_backward_2d, norm_quantize_2d
from te_mx._ops.grouped_fused import act_quantize_grouped
from te_mx._ops.grouped_gemm import gemm_k, gemm_rows
from te_mx._ops.grouped_quantize import columns_of_weights, quantize_grouped, quantize_weights
from te_mx.dispatch.calls import ActGroups, Groups
from te_mx.dispatch.fused import Activation, ActStep, Norm, NormStep, Target
from te_mx.recipe import MXFP8BlockScaling

FAMILIES = {
    "Linear": lambda: te_mx.Linear(64, 40),
    "LayerNormLinear": lambda: te_mx.LayerNormLinear(64, 40),
    "LayerNormMLP": lambda: te_mx.LayerNormMLP(64, 40),
    "LayerNormMLP relu": lambda: te_mx.LayerNormMLP(64, 40, activation="relu"),
    "GroupedLinear": lambda: te_mx.GroupedLinear(2, 64, 40),
    "GroupedLinear stacked": lambda: te_mx.GroupedLinear(2, 64, 40, single_grouped_weight=True),
}


def negative(x: Tensor) -> Tensor:
    """x as a view of -x."""
    return torch._neg_view(-x.detach())


def imaginary(x: Tensor) -> Tensor:
    """x as the imaginary part of a conjugate."""
    return torch.complex(torch.zeros_like(x), -x.detach()).conj().imag


def run(layer: nn.Module, x: Tensor, grad: Tensor | None, recipe=None) -> list[Tensor]:
    splits = ([9, 15],) if isinstance(layer, te_mx.GroupedLinear) else ()
    x = x.detach().requires_grad_()
    with te_mx.autocast(recipe=recipe):
        y = layer(x, *splits)
    found = [x, *layer.parameters()]
    return [y.detach(), *torch.autograd.grad(y, found, y.detach().sin() if grad is None else grad)]


def assert_same(got: list[Tensor], expected: list[Tensor]) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("view", [negative, imaginary])
@pytest.mark.parametrize("family", FAMILIES)
def test_input_gradient_and_every_parameter(family: str, view):
    layer, x = FAMILIES[family](), torch.randn(24, 64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    expected = run(layer, x, None)
    grad = expected[0].sin()
    assert view(x).is_neg() and torch.equal(view(x), x)
    assert_same(run(layer, view(x), grad), expected)
    assert_same(run(layer, x, view(grad)), expected)
    for name, parameter in layer.named_parameters():
        other = copy.deepcopy(layer)
        other._parameters[name] = nn.Parameter(view(parameter))
        assert getattr(other, name).is_neg()
        assert_same(run(other, x, grad), expected)


@pytest.mark.parametrize("recipe", [None, MXFP8BlockScaling(backward_override="high_precision")])
@pytest.mark.parametrize("family", ["Linear", "GroupedLinear", "GroupedLinear stacked"])
def test_main_grad(family: str, recipe):
    """Nothing is written where every reader would have to negate it again."""
    layer = FAMILIES[family]()
    layer.fuse_wgrad_accumulation = True
    for parameter in layer.parameters():
        parameter.main_grad = negative(torch.ones_like(parameter))
    with pytest.raises(RuntimeError, match=r"main_grad must be contiguous .*, got a negative view"):
        run(layer, torch.randn(24, 64), None, recipe)


def test_functions():
    x, w, bias, out = (torch.randn(s) for s in ((24, 64), (40, 64), (40,), (24, 40)))
    A, B = te_mx.quantize(w), te_mx.quantize(x)
    assert torch.equal(te_mx.gemm(A, B, bias=negative(bias)).out, te_mx.gemm(A, B, bias=bias).out)
    with pytest.raises(ValueError, match="out is a negative view"):
        te_mx.gemm(A, B, out=negative(out))
    expected = te_mx.gemm(A, B, gelu_in=out, grad=True, bias=True)
    got = te_mx.gemm(A, B, gelu_in=negative(out), grad=True, bias=True)
    assert_same(got[::2], expected[::2])
    weights, offs = torch.randn(2, 40, 64), torch.tensor([9, 24])
    expected = te_mx.grouped_linear(x, weights, offs=offs, bias=out[:2])
    parts = [weights[0], negative(weights[1])]
    got = te_mx.grouped_linear(
        negative(x), parts, offs=negative(offs), bias=[out[0], negative(out[1])]
    )
    assert torch.equal(got, expected)
    expected = te_mx.grouped_wgrad(out, x, offs)
    assert torch.equal(te_mx.grouped_wgrad(negative(out), negative(x), negative(offs)), expected)
    with pytest.raises(ValueError, match="out is a negative view"):
        te_mx.grouped_wgrad(out, x, offs, out=negative(expected))


def test_ops():
    """The layer below, which modules and autograd functions are made of."""
    x, dz, weight = torch.randn(24, 64), torch.randn(24, 64), torch.randn(64)
    rows, cols, grouped = (f"mxfp8_e4m3@{name}" for name in ("rows", "cols", "grouped_cols"))
    norm, target = Norm("LayerNorm", 1e-5), Target(rows, cols, "rceil", col_sum=True)
    act = Activation("swiglu")
    offs = torch.tensor([9, 24])

    def compute(view) -> list[Tensor | None]:
        def seen(operand):
            return operand._replace(codes=view(operand.codes), scales=view(operand.scales))

        made = norm_quantize_2d(
            NormStep(view(x), view(weight), view(weight), norm, x.dtype, True, target)
        )
        back = norm_backward_2d(
            view(dz), view(x), view(weight), view(made.mean), view(made.rstd), x.dtype
        )
        h = act_quantize_2d(ActStep(view(x), None, act, x.dtype, True, target))
        dh = act_quantize_2d(ActStep(view(x), view(dz[:, :32]), act, x.dtype, True, target))
        q = ops.quantize_2d(view(x), rows, cols, rule="rceil", col_sum=True)
        values = [ops.dequantize_2d(seen(one), torch.float32) for one in q[:2]]
        packed = ops.convert_2d(seen(q.row), "mxfp8_e4m3@sm90:8")
        groups = Groups(view(offs))
        g = quantize_grouped(view(x), groups, rows, grouped, rule="rceil")
        to_groups = Target(rows, grouped, "rceil")
        step = ActStep(view(x), view(dz[:, :32]), act, x.dtype, False, to_groups)
        dg = act_quantize_grouped(ActGroups(step, groups))
        stack, _ = quantize_weights([view(x), x], rows, rule="rceil")
        turned = columns_of_weights(seen(stack), cols, "rceil")
        y = gemm_rows(seen(g.row), seen(stack), groups, bias=view(dz[:2, :24]), out_dtype=x.dtype)
        dw = gemm_k(seen(g.col), seen(g.col), groups, out_dtype=x.dtype)
        product = ops.gemm_2d(seen(q.row), seen(g.row), out_dtype=x.dtype).out
        return [
            *made[:3], *parts(made.quantized), *back, h.out, *parts(h.quantized), dh.out,
            *parts(dh.quantized), *parts(q), *values, *packed[:2], *parts(g)[:4], *parts(dg)[:4],
            *turned[:2], y,
            dw, product,
        ]  # fmt: skip

    assert_same(compute(negative), compute(lambda tensor: tensor))
    operand = ops.quantize_2d(x, rows).row
    with pytest.raises(ValueError, match="out is a negative view"):
        ops.gemm_2d(operand, operand, out=negative(torch.ones(24, 24)), out_dtype=torch.float32)


def parts(made: ops.Quantized) -> list[Tensor]:
    """Codes and scales of both directions, and perhaps sums."""
    sums = [] if made.col_sum is None else [made.col_sum]
    return [*made.row[:2], *made.col[:2], *sums]
