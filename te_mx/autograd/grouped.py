"""The autograd function behind te_mx.GroupedLinear and te_mx.grouped_linear.

Shapes: R rows (tokens of all groups), G groups, K in_features, N out_features. Group g owns rows
[start_g, end_g); rows of no group are 0 in y and dx and touch nothing else.

    fprop  y[R, N]     = x[start:end]   @ w_g[N, K]^T + bias_g    groups of rows
    dgrad  dx[R, K]    = g[start:end]   @ w_g[N, K]               groups of rows
    wgrad  dw_g[N, K]  = g[start:end]^T @ x[start:end]            groups of k

Bit for bit what te_mx.Linear makes of each group, but for gradients that are rounded
stochastically: they draw once for all groups. Everything is read once, for all groups: one
quantize call for the tokens, one for the weights. Offsets travel as a tensor and are not looked at
here, so nothing waits for a device. Operands are packed on the way out of the quantizer.

Grouped linear layers group by group: for recipes whose backward pass is not three MXFP8 GEMMs,
and in high precision where weight gradients have a place of their own.

Shapes and parts as above, steps of one group as in autograd/linear_recipe.py. The weight
gradients of all groups are one function of where they go, as of the grouped function.

A grouped layer of no groups: what a rank runs that has none of the experts.

The parameters of all groups and their gradients.

The steps of grouped linear layers that read the recipe: in which forms tokens and weights are
quantized, and weights that stand still.

Grouped linear layers in high precision: what a GroupedLinear is outside of te_mx.autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from te_mx import formats
from te_mx._ops import (
    Epilogue,
    Forms,
    Made,
    Operand,
    Stack,
    convert_2d,
    gemm_2d,
    quantize_2d,
    quantized,
)
from te_mx._ops.grouped_gemm import (
    gemm_k,
    gemm_k_into,
    gemm_rows,
    kept_stack,
    on_device,
)
from te_mx._ops.grouped_quantize import (
    columns_of_weights,
    quantize_grouped,
    quantize_weights,
    weight_columns,
)
from te_mx.autograd import high_precision, linear_recipe, weight_parts
from te_mx.autograd.grad_target import (
    INPUT,
    OUTPUT_GRADIENT,
    GroupedWgrad,
    Reads,
    WeightGradient,
    Wgrad,
)
from te_mx.autograd.linear_recipe import (
    DGRAD,
    WGRAD,
    KeptWeight,
    at_rest,
    by_steps,
    columns_now,
    mode_of,
    needs_columns,
    new_seed,
    on_codes,
    packs,
    roles,
    same_weight,
    widens,
)
from te_mx.autograd.node import (
    outputs,
    place,
    run_backward,
    tag_of,
)
from te_mx.autograd.saved import (
    NOTHING,
    Kept,
    flatten,
    shaped,
    unflatten,
)
from te_mx.dispatch.grouped_calls import Groups
from te_mx.dispatch.groups import col_sums_on_device, device_bounds, host_bounds, readable
from te_mx.layouts import spec_of
from te_mx.recipes.settings import Settings


class NoGroups(torch.autograd.Function):
    """Zeros [..., N] of x [..., K], a weight [0, N, K] and a bias [0, N] or None. All of them get
    the gradients of their shapes, so that whoever looks at gradients finds the same ones on all
    ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype,
        sink: WeightGradient | None,
    ) -> Tensor:  # fmt: skip
        like = [(x.shape, x.dtype), (weight.shape, weight.dtype)]
        ctx.like = [*like, None if bias is None else (bias.shape, bias.dtype)]
        ctx.sink = sink
        return x.new_zeros((*x.shape[:-1], weight.shape[1]), dtype=dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        made: list[Tensor | None] = [
            grad.new_zeros(like[0], dtype=like[1]) if like is not None and needed else None
            for like, needed in zip(ctx.like, ctx.needs_input_grad, strict=False)
        ]
        if ctx.sink is not None and ctx.needs_input_grad[1]:
            shape, dtype = ctx.like[1]

            def run(out: Tensor | None, dtype: torch.dtype, accumulate: bool) -> Tensor:
                return grad.new_zeros(shape, dtype=dtype) if out is None else out

            made[1] = ctx.sink.take(Wgrad(run, ()), dtype)
        return (*made, None, None)


def split_parts(
    parts: Sequence[Tensor], has_bias: bool
) -> tuple[list[Tensor] | Tensor, Tensor | None]:
    """(the weight of every group, or all in one [G, N, K]; biases [G, N] or None)."""
    if parts[0].dim() == 3:
        return parts[0], parts[1] if has_bias else None
    count = len(parts) // 2 if has_bias else len(parts)
    return list(parts[:count]), weight_parts.stack(parts[count:]) if has_bias else None


def gradients_of(
    grad: Tensor | None, needed: Sequence[bool], stacked: bool
) -> tuple[Tensor | None, ...]:
    """The gradient of all groups as those of the parameters that need one."""
    if grad is None or stacked:
        return tuple(grad if need else None for need in needed)
    return tuple(g if need else None for g, need in zip(grad.unbind(0), needed, strict=False))


def col_sums(x: Tensor, groups: Groups) -> Tensor:
    """Sums over the rows of each group, fp32 [G, cols]; each is x[start:end].sum(0)."""
    offs, capacity = groups
    if not readable(offs):
        return col_sums_on_device(x, *device_bounds(offs, capacity, x.shape[0]))
    bounds = zip(*host_bounds(offs, capacity, x.shape[0]), strict=True)
    return torch.stack([x[start:end].sum(0, dtype=torch.float32) for start, end in bounds])


class KeptWeights(NamedTuple):
    """Weights quantized once for several calls: rowwise, and columnwise where backward needs it."""

    settings: Settings
    row: Stack
    col: Stack | None
    made: Made

    def on_current_stream(self) -> KeptWeights:
        """These weights, once the current stream has waited for them."""
        stacks = (self.row, self.col) if self.col is not None else (self.row,)
        tensors = [t for stack in stacks for t in (stack.codes, stack.scales)]
        self.made.await_on_current_stream(self.row.codes.device, *tensors)
        return self

    def serves(self, settings: Settings, device: torch.device, need_col: bool) -> bool:
        """Whether a call with these settings on this device would quantize to the same."""
        asked = _kept(weight_forms(device, settings), settings)
        return (
            (self.col is not None or not needs_columns(settings, need_col))
            and self.row.codes.device == device
            and same_weight(self.settings, settings)
            and self.row.spec == asked.row
            and (self.col is None or self.col.spec == asked.col)
        )


class GroupForms(NamedTuple):
    """Specs of the operands of one call: tokens x and g by groups, weights; and their rules."""

    x: Forms
    g: Forms
    w: Forms
    rule: str
    g_rule: str
    w_col_rule: str
    one_copy: bool  # dgrad starts from the rowwise codes of the weights

    @classmethod
    def of(cls, x: Tensor, weight: Tensor, settings: Settings) -> GroupForms:
        """Raises ValueError for formats of tokens whose blocks may lie in several groups."""
        check_rows_of_tokens(settings)
        device = x.device
        rules = settings.scale_rule, settings.gradient_rule, settings.weight_columns_rule
        if x.numel() and weight.numel():
            tokens = roles(device, settings, "gemm_rows")
            weights = weight_forms(device, settings)
            return cls(tokens.x, tokens.g, weights, *rules, settings.one_copy)
        # The quantizers of groups pack nothing that is empty.
        return cls(
            Forms(at_rest(settings.x), f"{settings.x_columns}@grouped_cols"),
            Forms(at_rest(settings.g), f"{settings.g_columns}@grouped_cols"),
            Forms(at_rest(settings.w), f"{settings.w_columns}@cols"),
            *rules,
            settings.one_copy,
        )


def check_rows_of_tokens(settings: Settings) -> None:
    """Raise ValueError unless inputs and output gradients have blocks of one row."""
    for role, name in (("x", settings.x), ("g", settings.g)):
        if formats.get(name).scaling.block[0] != 1:
            raise ValueError(
                f"te_mx: {role} cannot have format {name}: its blocks hold several rows, which may "
                "belong to several groups; use a format with blocks of one row in grouped layers"
            )


def weight_forms(device: torch.device, settings: Settings) -> Forms:
    """Specs of weights; those whose bytes are kept are packed when they are multiplied."""
    form = roles(device, settings).w
    if form.col == at_rest(settings.w_columns):  # plain columns of all lie as the weights do
        form = form._replace(col=f"{settings.w_columns}@cols")
    return form if packs(settings) else form._replace(row=at_rest(settings.w))


def _kept(form: Forms, settings: Settings) -> Forms:
    """The same of weights that are kept, of which no copy is wider than its codes."""
    return form._replace(row=at_rest(settings.w)) if widens(form.row) else form


def kept_weights(weights: Sequence[Tensor], settings: Settings, need_col: bool) -> KeptWeights:
    """Quantize and pack weights that stand still."""
    # Made outside of inference_mode, because a training step may use it later.
    with torch.inference_mode(False), torch.no_grad():
        first = weights[0]
        rule, form = settings.scale_rule, _kept(GroupForms.of(first, first, settings).w, settings)
        columns = form.col if needs_columns(settings, need_col) else ""
        row, col = quantize_weights(weights, form.row, columns, rule=rule)
        if not packs(settings):
            return KeptWeights(settings, row, None, Made.now(row.codes.device))
        mode, given = mode_of(settings), roles(first.device, settings, "gemm_rows")
        packed = None if col is None else kept_stack(col, mode, given.g.row)
        made = Made.now(row.codes.device)
        return KeptWeights(settings, kept_stack(row, mode, given.x.row), packed, made)


_ALIGNED = 8  # F.grouped_mm takes rows of whole 16 bytes


def grouped_plain(
    x_RK: Tensor, groups: Groups, weights: Sequence[Tensor] | Tensor, biases: Sequence[Tensor]
) -> Tensor:
    """F.linear on the rows of every group, zeros on rows of no group; [R, N]. weights [N, K] of
    every group, or one tensor [G, N, K]. No bias: [].

    A loop over the groups where the host knows them. Elsewhere F.grouped_mm in bf16, or every
    group on all rows: slower, but nothing waits for the device.
    """
    offs, capacity = groups
    each = list(biases) if biases else [None] * len(weights)
    if not readable(offs):
        starts, ends = device_bounds(offs, capacity, x_RK.shape[0])
        row = torch.arange(x_RK.shape[0], device=x_RK.device).unsqueeze(1)
        if _has_grouped_mm(x_RK, weights[0], capacity):
            return _grouped_mm(x_RK, ends, row, weights, biases)
        total: Tensor | None = None
        for start, end, weight, bias in zip(starts, ends, weights, each, strict=True):
            own = (row >= start) & (row < end)
            # Zeros instead of what lies outside, so that NaN there reaches no gradient.
            part = F.linear(torch.where(own, x_RK, 0), weight, bias)
            part = torch.where(own, part, 0)
            total = part if total is None else total + part
        assert total is not None
        return total
    parts, at = [], 0
    bounds = host_bounds(offs, capacity, x_RK.shape[0])
    for start, end, weight, bias in zip(*bounds, weights, each, strict=True):
        part = F.linear(x_RK[start:end], weight, bias)
        if start > at:
            parts.append(part.new_zeros(start - at, part.shape[1]))
        parts.append(part)
        at = end
    if at < x_RK.shape[0]:
        parts.append(parts[-1].new_zeros(x_RK.shape[0] - at, parts[-1].shape[1]))
    return torch.cat(parts)


def _has_grouped_mm(x: Tensor, weight: Tensor, capacity: int) -> bool:
    """Whether F.grouped_mm takes the problem: bf16 on CUDA, rows of whole 16 bytes."""
    if not x.is_cuda or capacity:
        return False
    autocast = torch.is_autocast_enabled("cuda")
    dtypes = {torch.get_autocast_dtype("cuda")} if autocast else {x.dtype, weight.dtype}
    return dtypes == {torch.bfloat16} and all(size % _ALIGNED == 0 for size in weight.shape)


def _grouped_mm(
    x: Tensor, ends: Tensor, row: Tensor, weights: Sequence[Tensor] | Tensor,
    biases: Sequence[Tensor],
) -> Tensor:  # fmt: skip
    if isinstance(weights, Tensor):
        stacked = weights.to(torch.bfloat16)
    else:
        stacked = torch.stack([w.to(torch.bfloat16) for w in weights])
    inside, offs = row < ends[-1], ends.int()
    x = torch.where(inside, x.to(torch.bfloat16), 0)
    out = F.grouped_mm(x, stacked.transpose(-2, -1), offs=offs)
    if biases:
        # The product of a column of ones and a row of biases (and as many zeros as 16 bytes take),
        # because its gradient sums over the tokens in fp32; that of an index would sum in bf16.
        rows_G1N = weight_parts.stack(biases).to(torch.bfloat16).unsqueeze(1)
        rows_G8N = F.pad(rows_G1N, (0, 0, 0, _ALIGNED - 1))
        out = out + F.grouped_mm(x.new_ones(x.shape[0], _ALIGNED), rows_G8N, offs=offs)
    return torch.where(inside, out, 0)


_PARTS = 3  # arguments of the autograd function before the parameters


class GroupedCall(NamedTuple):
    """What one call fixes. `kept` stands in for quantizing the weights; `tag` and `save_x` are as
    for autograd.linear.Call; `sink` takes the weight gradients."""

    capacity: int
    settings: Settings
    out_dtype: torch.dtype
    has_bias: bool
    kept: KeptWeights | None = None
    tag: int = -1
    save_x: bool = False
    sink: WeightGradient | None = None


class GroupedLinearFunction(torch.autograd.Function):
    """y = grouped x @ w_g^T + bias_g; gradients have the dtypes of what they belong to.

    `parts` are the weights and then the biases: G of each, or one stacked tensor of each.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, offs: Tensor, call: GroupedCall, *parts: Tensor
    ) -> tuple[Tensor, ...]:
        weights, bias = split_parts(parts, call.has_bias)
        count = len(parts) // 2 if call.has_bias else len(parts)
        need_dx, need = ctx.needs_input_grad[0], ctx.needs_input_grad[_PARTS:]
        need_dw, settings = any(need[:count]), call.settings
        form = GroupForms.of(x, weights[0], settings)
        there = on_device(offs, form.x.row, x)  # once for all ops
        groups = Groups(there, call.capacity)
        columns = need_dw and not call.save_x
        q = quantize_grouped(
            flatten(x), groups, form.x.row, form.x.col if columns else "", rule=form.rule
        )
        w_row, w_col = weights_of(weights, form, call, need_dx)
        assert q.row is not None
        y_RN = gemm_rows(
            q.row, w_row, groups, bias=bias, out_dtype=call.out_dtype, tag=call.tag,
            mode=mode_of(settings),
        )  # fmt: skip
        if form.one_copy:
            w_col = w_row  # its columns are made in backward
        ctx.weights, w_saved = kept_for_dgrad(w_col, parts[:count], need_dx)
        x_kept = NOTHING
        if need_dw:
            x_kept = Kept.itself(x) if q.col is None else Kept.operand(q.col)
        ctx.x_kept, ctx.form, ctx.call, ctx.x_shape = x_kept.beside, form, call, x.shape
        ctx.count, ctx.stacked, ctx.sinks = count, parts[0].dim() == 3, (call.sink,)
        ctx.dtypes = x.dtype, parts[0].dtype, parts[-1].dtype
        saved = offs, there, *x_kept.tensors, *w_saved
        return outputs(ctx, saved, unflatten(y_RN, x))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return run_backward(_backward, "te_mx.GroupedLinear", ctx, *grads)


def weights_of(
    weights: Sequence[Tensor] | Tensor, form: GroupForms, call: GroupedCall, need_dx: bool
) -> tuple[Stack, Stack | None]:
    """The operands of the weights: kept ones, or made now in one read."""
    kept, settings = call.kept, call.settings
    if kept is not None and (kept.row.layout.exact or not form.x.row.endswith("@rows")):
        return kept.row, kept.col
    first = weights if isinstance(weights, Tensor) else weights[0]
    col = form.w.col if columns_now(first, settings, need_dx) else ""
    return quantize_weights(weights, form.w.row, col, rule=form.rule)


def kept_for_dgrad(
    operand: Stack | None, weights: Sequence[Tensor], need_dx: bool
) -> tuple[Stack | None, Sequence[Tensor | None]]:
    """What dgrad needs of the weights, without tensors, and the tensors: an operand's, or the
    weights themselves."""
    if not need_dx:
        return None, ()
    if operand is None:
        return None, weights
    codes, scales, packed = operand.codes, operand.scales, operand.packed
    return operand._replace(codes=None, scales=None, packed=None), (codes, scales, packed)  # type: ignore[arg-type]


def for_dgrad(ctx: Any, saved: tuple[Tensor, ...]) -> Stack:
    """The columnwise operand of what was kept."""
    form = ctx.form
    if ctx.weights is None:
        weights = saved[0] if ctx.stacked else saved
        return weight_columns(weights, form.w.col, rule=form.w_col_rule)
    codes, scales, packed = saved
    kept = ctx.weights._replace(codes=codes, scales=scales, packed=packed)
    return columns_of_weights(kept, form.w.col, form.w_col_rule) if form.one_copy else kept


def _backward(ctx: Any, tensors: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    need_dx, need = ctx.needs_input_grad[0], ctx.needs_input_grad[_PARTS:]
    count, call, form = ctx.count, ctx.call, ctx.form
    need_dw, need_db = need[:count], need[count:]
    host_offs, offs = tensors[:2]
    tag, mode = call.tag, mode_of(call.settings)
    groups = Groups(offs.contiguous(), call.capacity)
    x_dtype, w_dtype, b_dtype = ctx.dtypes
    g_RN = flatten(grad)
    dx = dw = db = None
    if not (need_dx or any(need_dw)):
        db = col_sums(g_RN, Groups(host_offs, call.capacity)).to(b_dtype)
        grads = *gradients_of(None, need_dw, ctx.stacked), *gradients_of(db, need_db, ctx.stacked)
        return (None,) * _PARTS + grads

    q = quantize_grouped(
        g_RN, groups, form.g.row if need_dx else "", form.g.col if any(need_dw) else "",
        rule=form.g_rule, col_sum=any(need_db), seed=new_seed(g_RN.device, form.g_rule),
    )  # fmt: skip
    if need_dx:
        assert q.row is not None
        dx_RK = gemm_rows(
            q.row,
            for_dgrad(ctx, tensors[5:]),
            groups,
            out_dtype=x_dtype,
            tag=tag_of(tag, DGRAD),
            mode=mode,
        )
        dx = shaped(dx_RK, ctx.x_shape)
    if any(need_dw):
        # A function of where the result goes, because a sink may run it later or into main_grad.
        assert q.col is not None
        x_kept = ctx.x_kept.with_tensors(tensors[2:5])
        wgrad = wgrad_of(x_kept, q.col, groups, call, form, ctx.stacked)
        dw = place(ctx.sinks[0], wgrad, w_dtype)
        if dw is not None and not ctx.stacked:
            dw = dw.unflatten(0, (count, dw.shape[0] // count))
    if q.col_sum is not None:
        db = q.col_sum.to(b_dtype)
    grads = *gradients_of(dw, need_dw, ctx.stacked), *gradients_of(db, need_db, ctx.stacked)
    return (dx,) + (None,) * (_PARTS - 1) + grads


def wgrad_of(
    x_kept: Kept, g_col: Operand, groups: Groups, call: GroupedCall, form: GroupForms, stacked: bool
) -> GroupedWgrad:
    """dw [G, N, K], or [G * N, K] for separate weights: what they are when concatenated."""
    mode, tag = mode_of(call.settings), tag_of(call.tag, WGRAD)
    made: list[Operand] = []
    reads: Reads = () if x_kept.spec else ((INPUT, x_kept.tensors[0]),)  # type: ignore[assignment]

    def columns() -> Operand:
        if not made:
            made.append(make_columns())
        return made[0]

    def make_columns() -> Operand:
        if x_kept.spec:
            return x_kept.as_operand()
        x = x_kept.tensors[0]  # x itself was saved
        assert x is not None
        q = quantize_grouped(flatten(x), groups, col=form.x.col, rule=form.rule)
        assert q.col is not None
        return q.col

    def together(out: Tensor | None, dtype: torch.dtype, accumulate: bool) -> Tensor:
        x_col = columns()
        shape = (len(groups.offs), g_col.rows, x_col.rows)
        dw = gemm_k(
            g_col, x_col, groups, out=None if out is None else out.view(shape), out_dtype=dtype,
            accumulate=accumulate, tag=tag, mode=mode,
        )  # fmt: skip
        return dw if stacked else dw.flatten(0, 1)

    def into(outs: Sequence[Tensor], accumulate: bool) -> bool:
        return gemm_k_into(g_col, columns(), groups, outs, accumulate, tag=tag, mode=mode)

    # On the CPU groups gain less from one call than a sum of all gradients beside main_grad costs.
    if not (groups.offs.is_cpu and g_col.codes.is_cpu and g_col.layout.exact):
        return GroupedWgrad(together, reads, into=into)

    def one(i: int, out: Tensor, accumulate: bool) -> None:
        bounds = host_bounds(*groups, g_col.k)
        start, end = bounds.starts[i], bounds.ends[i]
        g_own, x_own = (o.group(start, end, i) for o in (g_col, columns()))
        gemm_2d(
            g_own, x_own, Epilogue(accumulate=accumulate), out=out, out_dtype=out.dtype, tag=tag,
            mode=mode,
        )  # fmt: skip

    return GroupedWgrad(together, reads, one)


def grouped_linear(x: Tensor, offs: Tensor, parts: Sequence[Tensor], call: GroupedCall) -> Tensor:
    """x [..., K] -> [..., N], differentiable; rows are those of x flattened.

    parts: the weights [N, K] of all groups and then the biases [N], or one stacked weight [G, N, K]
    and one bias [G, N]; offs: end offsets of the groups.
    """
    settings = call.settings
    if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in parts)):
        if not by_steps(settings):
            bounds = bounds_of(offs, call.capacity, flatten(x).shape[0])
            still = None if call.kept is None else (call.kept.row, call.kept.col)
            loop = Call(
                bounds, still, settings, call.out_dtype, call.tag, call.save_x, call.sink,
                call.has_bias,
            )  # fmt: skip
            return GroupedLoopFunction.apply(x, loop, *parts)[0]
        return GroupedLinearFunction.apply(x, offs, call, *parts)[0]
    weights, bias = split_parts(parts, call.has_bias)
    form = GroupForms.of(x, weights[0], settings)
    row, _ = weights_of(weights, form, call, False)
    return infer(x, offs, row, bias, call)


def grouped_on_codes(
    x: Tensor, offs: Tensor, w_row: Stack, bias_GN: Tensor | None, call: GroupedCall
) -> Tensor:
    """x [..., K] -> [..., N] on weights of which only plain rowwise codes are left, differentiable
    in x and the biases."""
    wanted = x.requires_grad or (bias_GN is not None and bias_GN.requires_grad)
    if not (torch.is_grad_enabled() and wanted):
        return infer(x, offs, w_row, bias_GN, call)
    settings = on_codes(call.settings)
    kept = KeptWeights(settings, w_row, None, Made(0, None))
    # The codes in the place of the weights have no gradient, and nothing reads them there.
    parts = (w_row.codes,) if bias_GN is None else (w_row.codes, bias_GN)
    return grouped_linear(x, offs, parts, call._replace(settings=settings, kept=kept))


def infer(
    x: Tensor, offs: Tensor, w_row: Stack, bias_GN: Tensor | None, call: GroupedCall
) -> Tensor:
    """x [..., K] -> [..., N] on quantized weights, without autograd."""
    settings = call.settings
    form = GroupForms.of(x, w_row.codes, settings)
    groups = Groups(on_device(offs, form.x.row, x), call.capacity)
    q = quantize_grouped(flatten(x), groups, form.x.row, rule=form.rule)
    assert q.row is not None
    y_RN = gemm_rows(
        q.row, w_row, groups, bias=bias_GN, out_dtype=call.out_dtype, tag=call.tag,
        mode=mode_of(settings),
    )  # fmt: skip
    return unflatten(y_RN, x)


_ARGUMENTS = 2  # of the autograd function before the parameters


class Call(NamedTuple):
    """What one call fixes. `settings` None runs in high precision; `kept` are the operands of
    weights that stand still, for fprop and perhaps for dgrad."""

    bounds: Sequence[tuple[int, int]]
    kept: tuple[Stack, Stack | None] | None
    settings: Settings | None
    out_dtype: torch.dtype
    tag: int
    save_x: bool
    sink: WeightGradient | None
    has_bias: bool


def bounds_of(offs: Tensor, capacity: int, rows: int) -> list[tuple[int, int]]:
    """(start, end) of every group.

    Raises:
        NotImplementedError: only the device knows them, or code is being compiled.
    """
    if not readable(offs):
        raise NotImplementedError(
            "te_mx.GroupedLinear: this recipe's backward runs group by group, which needs m_splits "
            "as a list or on the CPU, and no torch.compile; got splits that the host does not know"
        )
    return list(zip(*host_bounds(offs, capacity, rows), strict=True))


class GroupedLoopFunction(torch.autograd.Function):
    """y of x [..., K]; gradients have the dtypes of what they belong to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Call, *parts: Tensor) -> tuple[Tensor, ...]:
        weights, biases = split_parts(parts, call.has_bias)
        count = len(parts) // 2 if call.has_bias else len(parts)
        need_dx, need = ctx.needs_input_grad[0], ctx.needs_input_grad[_ARGUMENTS:]
        need_dw, x_RK = any(need[:count]), flatten(x)
        made, saved, beside = [], [], []
        for i, (start, end) in enumerate(call.bounds):
            bias = None if biases is None else biases[i]
            group = _fprop(x_RK[start:end], weights[i], bias, i, call, need_dx, need_dw)
            made.append(group[0])
            saved += [*group[1].tensors, *group[2].tensors]
            beside.append((group[1].beside, group[2].beside))
        ctx.call, ctx.kept, ctx.x_like = call, beside, (x.shape, x.dtype)
        ctx.sinks = (call.sink,)
        ctx.stacked, ctx.dtypes = parts[0].dim() == 3, [p.dtype for p in parts]
        return outputs(ctx, saved, unflatten(_gathered(made, call.bounds, x_RK.shape[0]), x))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return run_backward(_loop_backward, "te_mx.GroupedLinear", ctx, *grads)


def _fprop(
    x_MK: Tensor, w_NK: Tensor, bias: Tensor | None, i: int, call: Call, need_dx: bool,
    need_dw: bool,
) -> tuple[Tensor, Kept, Kept]:  # fmt: skip
    """y of one group, and what is kept of x and of w."""
    settings = call.settings
    if settings is None:
        y = torch.nn.functional.linear(x_MK, w_NK, bias)
        x_kept = Kept.itself(x_MK) if need_dw else NOTHING
        return y, x_kept, Kept.itself(w_NK) if need_dx else NOTHING
    plan = linear_recipe.plan_input(x_MK.device, settings, need_dw, call.save_x)
    kept = None
    if call.kept is not None:
        row, col = call.kept
        kept = KeptWeight(settings, row.group(i), None if col is None else col.group(i))
    w_row, w_col = linear_recipe.weight_operands(kept, w_NK, settings, need_dx)
    q = quantized(x_MK, plan.target)
    assert q.row is not None
    y = linear_recipe.fprop(q.row, w_row, bias, settings, call.out_dtype, call.tag)
    w_kept = linear_recipe.kept_for_dgrad(w_row, w_col, w_NK, settings, need_dx)
    return y, plan.kept(q, x_MK, need_dw), w_kept


def _gathered(made: list[Tensor], bounds: Sequence[tuple[int, int]], rows: int) -> Tensor:
    """The rows of all groups, and zeros for rows of no group."""
    parts, at = [], 0
    for part, (start, end) in zip(made, bounds, strict=True):
        parts += [part.new_zeros((start - at, part.shape[1])), part]
        at = end
    return torch.cat([*parts, made[-1].new_zeros((rows - at, made[-1].shape[1]))])


def _loop_backward(
    ctx: Any, tensors: tuple[Tensor, ...], grad: Tensor
) -> tuple[Tensor | None, ...]:
    call, dtypes = ctx.call, ctx.dtypes
    need_dx, need = ctx.needs_input_grad[0], ctx.needs_input_grad[_ARGUMENTS:]
    count = len(dtypes) // 2 if call.has_bias else len(dtypes)
    need_dw, need_db = any(need[:count]), any(need[count:])
    g_RN = flatten(grad)
    rounded = _rounded(g_RN, call) if need_dx else None
    dx_groups: list[Tensor] = []
    wgrads: list[Wgrad] = []
    sums: list[Tensor] = []
    sixes = (tensors[i : i + 6] for i in range(0, len(tensors), 6))
    for (start, end), (x_kept, w_kept), saved in zip(call.bounds, ctx.kept, sixes, strict=True):
        x_kept, w_kept = x_kept.with_tensors(saved[:3]), w_kept.with_tensors(saved[3:])
        g_MN = g_RN[start:end]
        dx_dtype = ctx.x_like[1]
        if call.settings is None:
            if need_dx:
                dx_groups.append(high_precision.dgrad(g_MN, saved[3], dx_dtype))
            reads = (INPUT, saved[0]), (OUTPUT_GRADIENT, g_MN)
            wgrads.append(Wgrad(partial(high_precision.wgrad, g_MN, saved[0]), reads))
            if need_db:
                sums.append(high_precision.bias_gradient(g_MN, dtypes[-1]))
            continue
        codes_here = need_dx and rounded is None
        gradient = linear_recipe.quantized_gradient(
            g_MN, call.settings, codes_here, need_dw, need_db
        )
        if rounded is not None:
            row = rounded(start, end)
            gradient = gradient._replace(q=gradient.q._replace(row=row))
        if need_dx:
            tag = tag_of(call.tag, DGRAD)
            made = linear_recipe.dgrad(gradient, w_kept, call.settings, dx_dtype, tag)
            dx_groups.append(made.out)
        if need_dw:
            tag = tag_of(call.tag, WGRAD)
            wgrads.append(linear_recipe.wgrad(gradient, x_kept, call.settings, tag))
        if need_db:
            sums.append(gradient.q.col_sum)  # type: ignore[arg-type]

    dx = None
    if need_dx:
        dx = shaped(_gathered(dx_groups, call.bounds, g_RN.shape[0]), ctx.x_like[0])
    dw = place(call.sink, _together(wgrads, ctx.stacked), dtypes[0]) if need_dw else None
    if dw is not None and not ctx.stacked:
        dw = dw.unflatten(0, (count, dw.shape[0] // count))
    db = torch.stack(sums).to(dtypes[-1]) if need_db else None
    weights = gradients_of(dw, need[:count], ctx.stacked)
    return dx, None, *weights, *gradients_of(db, need[count:], ctx.stacked)


def _rounded(g_RN: Tensor, call: Call) -> Callable[[int, int], Operand] | None:
    """Rowwise codes of the gradient of some tokens, (start, end), where they are rounded
    stochastically: all tokens share one draw, as they do where groups run together. Else None."""
    if call.settings is None:
        return None
    target, _ = linear_recipe.plan_gradient(g_RN.device, call.settings, True, False, False)
    if target.seed is None:
        return None
    fmt = spec_of(target.row).format.name
    row = quantize_2d(g_RN, f"{fmt}@rows", rule=target.rule, seed=target.seed).row
    assert row is not None

    def of(start: int, end: int) -> Operand:
        part = row._replace(
            codes=row.codes[start:end], scales=row.scales[start:end], rows=end - start
        )
        return convert_2d(part, target.row)

    return of


def _together(wgrads: Sequence[Wgrad], stacked: bool) -> GroupedWgrad:
    """The weight gradients of all groups: [G, N, K], or [G * N, K] for separate weights."""

    def run(out: Tensor | None, dtype: torch.dtype, accumulate: bool) -> Tensor:
        if out is None:
            made = torch.stack([each(None, dtype, False) for each in wgrads])
            return made if stacked else made.flatten(0, 1)
        for each, place_of in zip(wgrads, out.view(len(wgrads), -1, out.shape[-1]), strict=True):
            each(place_of, dtype, accumulate)
        return out

    reads = tuple(read for each in wgrads for read in each.reads)
    return GroupedWgrad(
        run, reads, lambda i, out, accumulate: wgrads[i](out, out.dtype, accumulate)
    )


def high_precision_loop(
    x: Tensor,
    offs: Tensor,
    capacity: int,
    parts: Sequence[Tensor],
    has_bias: bool,
    sink: WeightGradient,
) -> Tensor:
    """x [..., K] -> [..., N] by nn.functional.linear, with weight gradients that go to `sink`."""
    bounds = bounds_of(offs, capacity, flatten(x).shape[0])
    call = Call(bounds, None, None, x.dtype, -1, False, sink, has_bias)
    return GroupedLoopFunction.apply(x, call, *parts)[0]
