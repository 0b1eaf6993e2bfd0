"""The autograd function of the MLPs of all groups, as the experts of a mixture are: two grouped
linear layers and an activation between them.

    h = x @ w1_g^T + bias1_g,  a = act(h),  y = a @ w2_g^T + bias2_g        groups of rows

Steps and shapes as in autograd/grouped.py, and the same bits. What lies between the products is
quantized as it is computed: a, which is never written itself, and in backward the gradient of h.
Of tokens on their way to experts (autograd/routing.py) the function takes x itself, and its rows
are those of the route. Backward keeps h and the columns of x; or x itself, where codes of as many
rows as a token has are more. Columns of a it makes again, of h.
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
from te_mx.autograd.linear_recipe import DGRAD, by_steps, makes_again, mode_of, new_seed
from te_mx.autograd.node import outputs, place, run_backward, tag_of
from te_mx.autograd.routing import Route, rows_of, sum_of_rows
from te_mx.autograd.saved import NOTHING, Kept, flatten, shaped, unflatten
from te_mx.dispatch.fused import Activation, ActStep, Target
from te_mx.dispatch.grouped_calls import ActGroups, Groups
from te_mx.layouts.operand import Operand, Quantized, Stack

_ARGUMENTS = 8  # of the autograd function before the parameters


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

    def columns(self) -> str:
        """In which form the weight gradient reads the input."""
        return self.form.x.col if any(self.need.dw) else ""

    def forward(
        self, x: Quantized, parts: Sequence[Tensor], groups: Groups
    ) -> tuple[Tensor, _Layer, list[Tensor | None]]:
        """(y, what backward is told, the tensors that it keeps: of the input, unless its columns
        are made again, then of the weights)."""
        weights, bias = split_parts(parts, self.call.has_bias)
        row, col = weights_of(weights, self.form, self.call, self.need.dx)
        assert x.row is not None
        y_RN = gemm_rows(
            x.row, row, groups, bias=bias, out_dtype=self.call.out_dtype, tag=self.call.tag,
            mode=mode_of(self.call.settings),
        )  # fmt: skip
        held = row if self.form.one_copy else col  # of one copy backward makes the columns
        stack, tensors = kept_for_dgrad(held, parts[: len(self.need.dw)], self.need.dx)
        kept = NOTHING if x.col is None else Kept.operand(x.col)
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
        self, g: Quantized, saved: Sequence[Tensor], again: Quantized | None, groups: Groups
    ) -> tuple[Tensor | None, ...]:
        """Those of the parameters; saved: what was kept of the input; again: its columns, where
        they were made again."""
        dw = db = None
        if any(self.need.dw):
            assert g.col is not None
            kept = self.input.with_tensors(tuple(saved))  # type: ignore[arg-type]
            if again is not None and again.col is not None:
                kept = Kept.operand(again.col)
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
    """y [R, N] of x [..., K]; gradients have the dtypes of what they belong to. calls: of both
    layers; order, place: of a Route of top_k rows a token, or None; parts: the parameters of the
    first layer, `split` of them, and of the second."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, offs: Tensor, order: Tensor | None, place_of: Tensor | None,
        top_k: int, calls: tuple[GroupedCall, GroupedCall], act: Activation, split: int,
        *parts: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        need_dx, needs = ctx.needs_input_grad[0], ctx.needs_input_grad[_ARGUMENTS:]
        first = _Layer.of(x, calls[0], parts[:split], needs[:split], need_dx)
        need_da = need_dx or any(needs[:split])
        second = _Layer.of(x, calls[1], parts[split:], needs[split:], need_da)
        there = on_device(offs, first.form.x.row, x)
        # Not in compiled code, for the reason of makes_again.
        keeps_x = order is not None and top_k >= x.element_size() and any(first.need.dw)
        keeps_x = keeps_x and not torch.compiler.is_compiling()
        a_again = second.need.dx and makes_again(second.call.settings)
        y_RN, layers, saved = _run(
            _rows(x, order, top_k), Groups(there, calls[0].capacity), (first, second), act, parts,
            split, keeps_x, a_again,
        )  # fmt: skip
        ctx.layers, ctx.act, ctx.x_like, ctx.top_k = layers, act, (x.shape, x.dtype), top_k
        ctx.sinks, ctx.capacity = (calls[0].sink, calls[1].sink), calls[0].capacity
        kept_x = x if keeps_x else None
        y = unflatten(y_RN, x) if order is None else y_RN
        return outputs(ctx, [offs, there, order, place_of, kept_x, *saved], y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return run_backward(_backward, "te_mx: experts", ctx, *grads)


def _rows(x: Tensor, order: Tensor | None, top_k: int) -> Tensor:
    return flatten(x) if order is None else rows_of(x, order, top_k)


def _run(
    x_RK: Tensor, groups: Groups, layers: tuple[_Layer, _Layer], act: Activation,
    parts: Sequence[Tensor], split: int, x_again: bool = False, a_again: bool = False,
) -> tuple[Tensor, tuple[_Layer, _Layer], list[Tensor | None]]:  # fmt: skip
    """x_again, a_again: backward makes these columns."""
    first, second = layers
    form, col = first.form, "" if x_again else first.columns()
    q = quantize_grouped(x_RK, groups, form.x.row, col, rule=form.rule)
    del x_RK  # which nobody else may hold
    h_RN, first, saved = first.forward(q, parts[:split], groups)
    form, col = second.form, "" if a_again else second.columns()
    target = Target(form.x.row, col, form.rule)
    a = act_quantize_grouped(ActGroups(ActStep(h_RN, None, act, h_RN.dtype, False, target), groups))
    y_RN, second, more = second.forward(a, parts[split:], groups)
    return y_RN, (first, second), [h_RN if second.need.dx else None, *saved, *more]


def _backward(ctx: Any, tensors: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    first, second = ctx.layers
    host_offs, offs, order, place_of, x, h_RN, *rest = tensors
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
    a = None
    if second.columns() and not second.input.spec:
        target = Target("", second.columns(), second.form.rule)
        step = ActStep(h_RN, None, ctx.act, h_RN.dtype, False, target)
        a = act_quantize_grouped(ActGroups(step, groups))
    theirs = second.gradients(g, a_saved, a, groups)
    del a
    if second.need.dx:
        da_RN = second.dgrad(g.row, w2_saved, groups, h_RN.dtype)
        del g
        target = first.target()
        target = target._replace(seed=new_seed(g_RN.device, target.rule))
        step = ActStep(h_RN, da_RN, ctx.act, h_RN.dtype, False, target)
        gh = act_quantize_grouped(ActGroups(step, groups))
        del da_RN, step
        if first.need.dx:
            dx = first.dgrad(gh.row, w1_saved, groups, ctx.x_like[1])
            dx = (
                shaped(dx, ctx.x_like[0]) if order is None else sum_of_rows(dx, place_of, ctx.top_k)
            )
        again = None
        if x is not None:
            rows = rows_of(x, order, ctx.top_k)
            again = quantize_grouped(rows, groups, col=first.columns(), rule=first.form.rule)
            del rows
        mine = first.gradients(gh, x_saved, again, groups)
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
    parts: tuple[Sequence[Tensor], Sequence[Tensor]], to: Route | None = None,
) -> Tensor:  # fmt: skip
    """x [..., K] -> [..., N], differentiable; of tokens x [T, K] on a route, [R, N]. parts: the
    parameters of each layer, as those of autograd.grouped.grouped_linear; offs: end offsets of the
    groups."""
    given = *parts[0], *parts[1]
    split = len(parts[0])
    order, back, top_k = (None, None, 1) if to is None else (to.order, to.place, to.top_k)
    if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in given)):
        return GroupedMLPFunction.apply(x, offs, order, back, top_k, calls, act, split, *given)[0]
    layers = tuple(
        _Layer.of(x, call, own, [False] * len(own), False)
        for call, own in zip(calls, parts, strict=True)
    )
    groups = Groups(on_device(offs, layers[0].form.x.row, x), calls[0].capacity)
    y_RN = _run(_rows(x, order, top_k), groups, layers, act, given, split)[0]  # type: ignore[arg-type]
    return unflatten(y_RN, x) if to is None else y_RN
