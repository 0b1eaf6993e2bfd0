"""The forward of te_mx.Linear on a kept weight of which there are only plain rowwise codes, as
FSDP2 gathers it: what calls of one size share is found once. The same kernels on the same bytes as
autograd/linear.py, whose backward follows; the host does less. It serves the plain case: no bias,
gradients that go back to autograd, and a kernel that makes its call once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_mx._ops import Operand, Target, quantized
from te_mx._ops.gemm import prepared
from te_mx._ops.library import is_direct
from te_mx.autograd import shared_inputs, steps
from te_mx.autograd.backward import outputs
from te_mx.autograd.saved import NOTHING, Kept
from te_mx.autograd.shapes import flatten
from te_mx.dispatch.registry import PreparedGemm, derive, derived
from te_mx.runtime.ran import LAST_RUN


class Same(NamedTuple):
    """What calls share: how the input is quantized, and whether backward reads the input itself;
    the product and the name of its kernel; what is kept of the weight, beside its tensors."""

    target: Target
    keep: bool
    product: PreparedGemm | None
    name: str
    w_beside: Kept


def same_of(x: Tensor, weight_NK: Tensor, call: Any) -> Same | None:
    """What a call (of autograd/linear.py) shares with others, where it is a plain one; else None.
    Gradients are on."""
    kept, settings = call.kept, call.settings
    if (
        not settings.one_copy
        or kept.col is not None
        or call.sink is not None
        or call.tokens is not None
        or call.lent is not None
        or not is_direct(x)
    ):
        return None
    need = x.requires_grad, weight_NK.requires_grad
    row: Operand = kept.row
    rows = x.numel() // row.k if row.k else 0
    key = (
        "linear on codes", rows, row.spec, row.rows, row.k, settings, x.device, call.out_dtype,
        need, call.save_x,
    )  # fmt: skip
    found = derived().get(key)
    if found is None:
        found = _same(rows, row, x, need, call)
        if x.device.type != "cuda" or x.device.index is not None:
            derive(key, found)
    return found if found.product is not None else None


def _same(rows: int, w_row: Operand, x: Tensor, need: tuple[bool, bool], call: Any) -> Same:
    settings = call.settings
    target, keep = steps.plan_input(x.device, settings, need[1], call.save_x)
    product, name = None, ""
    # Of no rows, and where backward reads the weight itself, the steps say what happens.
    if rows and w_row.packed is None and settings.backward != "high_precision":
        mode = steps.mode_of(settings)
        product, name = prepared(
            (rows, w_row.rows, w_row.k), target.row, w_row.spec, x.device, call.out_dtype, mode
        )
    w_kept = Kept.operand(w_row) if need[0] else NOTHING
    return Same(target, keep, product, name, w_kept.beside)


def forward(ctx: Any, x: Tensor, weight_NK: Tensor, call: Any, same: Same) -> tuple[Tensor, ...]:
    """y = x @ w^T, as LinearFunction.forward."""
    need_dx, need_dw = ctx.needs_input_grad[:2]
    target, w_row = same.target, call.kept.row
    entry = shared_inputs.entry_for(x, weight_NK, target.row, target.col, target.rule)
    if entry is None:
        q = quantized(flatten(x), target)
        entry = shared_inputs.put(x, target, q, weight_NK)
    else:
        q = entry.quantized()
    y = torch.empty((*x.shape[:-1], w_row.rows), dtype=call.out_dtype, device=x.device)
    if same.product(q.row, w_row, y):  # type: ignore[misc, arg-type]
        if call.tag >= 0:
            LAST_RUN[call.tag] = same.name
    else:
        y = steps.fprop(q.row, w_row, None, call.settings, call.out_dtype, call.tag, x)  # type: ignore[arg-type]
    x_kept = NOTHING
    if need_dw and same.keep:
        x_kept = Kept.of(call.sources or (x,))
    elif need_dw:
        x_kept = Kept.operand(q.row if q.col is None else q.col)  # type: ignore[arg-type]
    w_tensors = (w_row.codes, w_row.scales, None) if need_dx else NOTHING.tensors
    ctx.settings, ctx.tag, ctx.x_shape = call.settings, call.tag, x.shape
    ctx.lent, ctx.tokens, ctx.sinks = None, None, (None,)
    ctx.kept = x_kept.beside, same.w_beside
    ctx.dtypes = x.dtype, weight_NK.dtype, None
    ctx.siblings = None
    if need_dx:
        ctx.siblings = shared_inputs.joined(x, ctx) if entry is None else entry.joined(x, ctx)
    return outputs(ctx, (*x_kept.tensors, *w_tensors), y)
