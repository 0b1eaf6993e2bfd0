"""The autograd function of the MLPs of all groups, as the experts of a mixture are: two grouped
linear layers and an activation between them.

    h = x @ w1_g^T + bias1_g,  a = act(h),  y = a @ w2_g^T + bias2_g        groups of rows

Steps and shapes as in autograd/grouped.py, and the same bits. What lies between the products is
quantized as it is computed: a in both directions, which is never written itself, and in backward
the gradient of h. Backward keeps the columns of x and of a, and h.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_mx._ops.grouped_fused import act_quantize_grouped
from te_mx._ops.grouped_gemm import gemm_rows, on_device
from te_mx._ops.grouped_quantize import quantize_grouped
from te_mx.autograd.grouped import (
    GroupedCall,
    GroupForms,
    col_sums,
    for_dgrad,
    gradients_of,
    kept_for_dgrad,
    split_parts,
    weights_of,
    wgrad_of,
)
from te_mx.autograd.linear_recipe import DGRAD, by_steps, mode_of, new_seed
from te_mx.autograd.node import outputs, place, run_backward, tag_of
from te_mx.autograd.saved import NOTHING, Kept, flatten, shaped, unflatten
from te_mx.dispatch.fused import Activation, ActStep, Target
from te_mx.dispatch.grouped_calls import ActGroups, Groups
from te_mx.layouts.operand import Operand, Quantized, Stack

_ARGUMENTS = 5  # of the autograd function before the parameters


class _Need(NamedTuple):
    """Which gradients a layer makes: of its input, its weights, its biases."""

    dx: bool
    dw: tuple[bool, ...]
    db: tuple[bool, ...]


class _Layer(NamedTuple):
    """What backward is told of one of the layers, beside tensors."""

    call: GroupedCall
    form: GroupForms
    need: _Need
    stacked: bool
    dtypes: tuple[torch.dtype, torch.dtype]  # of the weights and of the biases, if there are any
    weights: Stack | None = None  # without tensors; None: the weights themselves are kept
    input: Kept = NOTHING
    tensors: int = 0  # that were kept of the weights

    @classmethod
    def of(
        cls, x: Tensor, call: GroupedCall, parts: Sequence[Tensor], needs: Sequence[bool], dx: bool
    ) -> _Layer:
        count = len(parts) // 2 if call.has_bias else len(parts)
        form = GroupForms.of(x, parts[0] if parts[0].dim() == 2 else parts[0][0], call.settings)
        need = _Need(dx, tuple(needs[:count]), tuple(needs[count:]))
        return cls(call, form, need, parts[0].dim() == 3, (parts[0].dtype, parts[-1].dtype))

    def forward(
        self, x: Quantized, parts: Sequence[Tensor], groups: Groups, kept_x: Tensor | None
    ) -> tuple[Tensor, _Layer, list[Tensor | None]]:
        """(y, what backward is told, the tensors that it keeps: of the input, then of the
        weights). kept_x: the input itself, where that is kept."""
        weights, bias = split_parts(parts, self.call.has_bias)
        row, col = weights_of(weights, self.form, self.call, self.need.dx)
        assert x.row is not None
        y_RN = gemm_rows(
            x.row, row, groups, bias=bias, out_dtype=self.call.out_dtype, tag=self.call.tag,
            mode=mode_of(self.call.settings),
        )  # fmt: skip
        held = row if self.form.one_copy else col  # of one copy backward makes the columns
        stack, tensors = kept_for_dgrad(held, parts[: len(self.need.dw)], self.need.dx)
        kept = NOTHING
        if any(self.need.dw):
            kept = Kept.itself(kept_x) if x.col is None else Kept.operand(x.col)
        told = self._replace(weights=stack, input=kept.beside, tensors=len(tensors))
        return y_RN, told, [*kept.tensors, *tensors]

    def target(self) -> Target:
        """What the gradient of the result is quantized to, without a seed."""
        form, need = self.form, self.need
        return Target(form.g.row if need.dx else "", form.g.col if any(need.dw) else "",
                      form.g_rule, any(need.db))  # fmt: skip

    def dgrad(
        self, g_row: Operand | None, saved: Sequence[Tensor], groups: Groups, dtype: torch.dtype
    ) -> Tensor:
        """The gradient of the input; saved: what was kept of the weights."""
        assert g_row is not None
        return gemm_rows(
            g_row, for_dgrad(self, tuple(saved)), groups, out_dtype=dtype,
            tag=tag_of(self.call.tag, DGRAD), mode=mode_of(self.call.settings),
        )  # fmt: skip

    def gradients(
        self, g: Quantized, saved: Sequence[Tensor], groups: Groups
    ) -> tuple[Tensor | None, ...]:
        """Those of the parameters; saved: what was kept of the input."""
        dw = db = None
        if any(self.need.dw):
            assert g.col is not None
            kept = self.input.with_tensors(tuple(saved))  # type: ignore[arg-type]
            wgrad = wgrad_of(kept, g.col, groups, self.call, self.form, self.stacked)
            dw = place(self.call.sink, wgrad, self.dtypes[0])
            if dw is not None and not self.stacked:
                dw = dw.unflatten(0, (len(self.need.dw), -1))
        if g.col_sum is not None and any(self.need.db):
            db = g.col_sum.to(self.dtypes[1])
        return (
            *gradients_of(dw, self.need.dw, self.stacked),
            *gradients_of(db, self.need.db, self.stacked),
        )


class GroupedMLPFunction(torch.autograd.Function):
    """y of x [..., K]; gradients have the dtypes of what they belong to. calls: of both layers;
    parts: the parameters of the first one, `split` of them, and of the second."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, offs: Tensor, calls: tuple[GroupedCall, GroupedCall], act: Activation,
        split: int, *parts: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        need_dx, needs = ctx.needs_input_grad[0], ctx.needs_input_grad[_ARGUMENTS:]
        first = _Layer.of(x, calls[0], parts[:split], needs[:split], need_dx)
        need_da = need_dx or any(needs[:split])
        second = _Layer.of(x, calls[1], parts[split:], needs[split:], need_da)
        there = on_device(offs, first.form.x.row, x)
        y_RN, layers, saved = _run(x, Groups(there, calls[0].capacity), (first, second), act, parts,
                                   split)  # fmt: skip
        ctx.layers, ctx.act, ctx.x_like = layers, act, (x.shape, x.dtype)
        ctx.sinks, ctx.capacity = (calls[0].sink, calls[1].sink), calls[0].capacity
        return outputs(ctx, [offs, there, *saved], unflatten(y_RN, x))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return run_backward(_backward, "te_mx: experts", ctx, *grads)


def _run(
    x: Tensor, groups: Groups, layers: tuple[_Layer, _Layer], act: Activation,
    parts: Sequence[Tensor], split: int,
) -> tuple[Tensor, tuple[_Layer, _Layer], list[Tensor | None]]:  # fmt: skip
    first, second = layers
    columns = any(first.need.dw) and not first.call.save_x
    q = quantize_grouped(
        flatten(x), groups, first.form.x.row, first.form.x.col if columns else "",
        rule=first.form.rule,
    )  # fmt: skip
    h_RN, first, saved = first.forward(q, parts[:split], groups, x)
    form = second.form
    target = Target(form.x.row, form.x.col if any(second.need.dw) else "", form.rule)
    a = act_quantize_grouped(ActGroups(ActStep(h_RN, None, act, h_RN.dtype, False, target), groups))
    y_RN, second, more = second.forward(a, parts[split:], groups, None)
    return y_RN, (first, second), [h_RN if second.need.dx else None, *saved, *more]


def _backward(ctx: Any, tensors: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    first, second = ctx.layers
    host_offs, offs, h_RN, *rest = tensors
    groups, g_RN = Groups(offs.contiguous(), ctx.capacity), flatten(grad)
    end = 3 + first.tensors
    x_saved, w1_saved, a_saved, w2_saved = (
        rest[:3], rest[3:end], rest[end : end + 3], rest[end + 3 :],
    )  # fmt: skip
    row, col, rule, sums, _ = second.target()
    if row or col:
        g = quantize_grouped(
            g_RN, groups, row, col, rule=rule, col_sum=sums, seed=new_seed(g_RN.device, rule)
        )
    else:
        g = Quantized(None, None, col_sums(g_RN, Groups(host_offs, ctx.capacity)))
    dx = None
    mine: tuple[Tensor | None, ...] = (None,) * (len(first.need.dw) + len(first.need.db))
    da_RN = second.dgrad(g.row, w2_saved, groups, h_RN.dtype) if second.need.dx else None
    theirs = second.gradients(g, a_saved, groups)
    if da_RN is not None:
        target = first.target()
        target = target._replace(seed=new_seed(g_RN.device, target.rule))
        step = ActStep(h_RN, da_RN, ctx.act, h_RN.dtype, False, target)
        gh = act_quantize_grouped(ActGroups(step, groups))
        if first.need.dx:
            dx = shaped(first.dgrad(gh.row, w1_saved, groups, ctx.x_like[1]), ctx.x_like[0])
        mine = first.gradients(gh, x_saved, groups)
    return dx, *(None,) * (_ARGUMENTS - 1), *mine, *theirs


def runs(calls: tuple[GroupedCall, GroupedCall], x: Tensor, first: Sequence[Tensor]) -> bool:
    """Whether two layers, and an activation between them, are one function. first: the parameters
    of the first one. Not where backward is no products of quantized operands, and not where the
    first layer has gradients of biases alone."""
    count = len(first) // 2 if calls[0].has_bias else len(first)
    biases = any(p.requires_grad for p in first[count:])
    others = x.requires_grad or any(p.requires_grad for p in first[:count])
    return all(by_steps(call.settings) and not call.save_x for call in calls) and (
        others or not biases or not torch.is_grad_enabled()
    )


def grouped_mlp(
    x: Tensor, offs: Tensor, calls: tuple[GroupedCall, GroupedCall], act: Activation,
    parts: tuple[Sequence[Tensor], Sequence[Tensor]],
) -> Tensor:  # fmt: skip
    """x [..., K] -> [..., N], differentiable. parts: the parameters of each layer, as those of
    autograd.grouped.grouped_linear; offs: end offsets of the groups."""
    given = *parts[0], *parts[1]
    split = len(parts[0])
    if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in given)):
        return GroupedMLPFunction.apply(x, offs, calls, act, split, *given)[0]
    layers = tuple(
        _Layer.of(x, call, own, [False] * len(own), False)
        for call, own in zip(calls, parts, strict=True)
    )
    groups = Groups(on_device(offs, layers[0].form.x.row, x), calls[0].capacity)
    return unflatten(_run(x, groups, layers, act, given, split)[0], x)  # type: ignore[arg-type]
