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

The MLPs of all groups, as the experts of a mixture are, are two such layers with an activation
between them, in the same function:

    h = x @ w1_g^T + bias1_g,  a = act(h),  y = a @ w2_g^T + bias2_g        groups of rows

What lies between the products is quantized as it is computed: a, which is never written itself, and
in backward the gradient of h. Of tokens on their way to experts (autograd/routing.py) the function
takes x itself, and its rows are those of the route. Backward keeps h and the columns of x; or x
itself, where codes of as many rows as a token has are more. Columns of a it makes again, of h.

A grouped layer of no groups: what a rank runs that has none of the experts.

The steps of grouped linear layers that read the recipe: in which forms tokens and weights are
quantized, and weights that stand still.

Grouped linear layers in high precision: what a GroupedLinear is outside of te_mx.autocast."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from te_mx import formats
from te_mx._ops import Epilogue, Made, Operand, OperandLayouts, Quantized, Stack, gemm_2d, plain
from te_mx._ops.grouped_fused import act_quantize_grouped
from te_mx._ops.grouped_gemm import gemm_k, gemm_k_into, gemm_rows, kept_stack, on_device
from te_mx._ops.grouped_quantize import (
    columns_of_weights,
    quantize_grouped,
    quantize_weights,
    weight_columns,
)
from te_mx.autograd import weight_parts
from te_mx.autograd.grad_target import INPUT, GroupedWgrad, Reads, WeightGradient, Wgrad
from te_mx.autograd.grouped_loop import GroupedCall, gathered, gradients_of, one_by_one, split_parts
from te_mx.autograd.linear_recipe import (
    DGRAD,
    WGRAD,
    QuantizedWeight,
    at_most_codes,
    by_steps,
    columns_now,
    mode_of,
    needs_columns,
    new_seed,
    on_codes,
    packs,
    plain_spec,
    roles,
    serving,
    weight_layouts,
)
from te_mx.autograd.node import outputs, place, run_backward, tag_of
from te_mx.autograd.routing import Route, rows_of, sum_of_rows
from te_mx.autograd.saved import NOTHING, SavedOperand, flatten, shaped, unflatten
from te_mx.dispatch.calls import ActGroups, Groups
from te_mx.dispatch.fused import Activation, ActStep, Target
from te_mx.dispatch.groups import col_sums_on_device, device_bounds, host_bounds, readable
from te_mx.recipes.settings import Settings


class NoGroups(torch.autograd.Function):
    """Zeros [..., N] of x [..., K], a weight [0, N, K] and a bias [0, N] or None. All get gradients
    of their shapes, so that all ranks have the same ones."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype,
        grad_target: WeightGradient | None,
    ) -> Tensor:  # fmt: skip
        like = [(x.shape, x.dtype), (weight.shape, weight.dtype)]
        ctx.like = [*like, None if bias is None else (bias.shape, bias.dtype)]
        ctx.grad_target = grad_target
        return x.new_zeros((*x.shape[:-1], weight.shape[1]), dtype=dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        made: list[Tensor | None] = [
            grad.new_zeros(like[0], dtype=like[1]) if like is not None and needed else None
            for like, needed in zip(ctx.like, ctx.needs_input_grad, strict=False)
        ]
        if ctx.grad_target is not None and ctx.needs_input_grad[1]:
            shape, dtype = ctx.like[1]

            def run(out: "Tensor | None", dtype: torch.dtype, accumulate: bool) -> Tensor:
                return grad.new_zeros(shape, dtype=dtype) if out is None else out

            made[1] = ctx.grad_target.take(Wgrad(run, ()), dtype)
        return (*made, None, None)


def col_sums(x: Tensor, groups: Groups) -> Tensor:
    """Sums over the rows of each group, fp32 [G, cols]; each is x[start:end].sum(0)."""
    offs, capacity = groups
    if not readable(offs):
        return col_sums_on_device(x, *device_bounds(offs, capacity, x.shape[0]))
    bounds = zip(*host_bounds(offs, capacity, x.shape[0]), strict=True)
    return torch.stack([x[start:end].sum(0, dtype=torch.float32) for start, end in bounds])


class GroupLayouts(NamedTuple):
    """Specs of the operands of one call: tokens x and g by groups, weights; and their rules."""

    x: OperandLayouts
    g: OperandLayouts
    w: OperandLayouts
    rule: str
    g_rule: str
    w_col_rule: str
    one_copy: bool  # dgrad starts from the rowwise codes of the weights

    @classmethod
    def of(cls, x: Tensor, weight: Tensor, settings: Settings) -> "GroupLayouts":
        """Raises ValueError for formats of tokens whose blocks may lie in several groups."""
        check_rows_of_tokens(settings)
        device = x.device
        rules = settings.scale_rule, settings.gradient_rule, settings.weight_columns_rule
        if x.numel() and weight.numel():
            tokens = roles(device, settings, "gemm_rows")
            weights = weight_layouts(device, settings)
            return cls(tokens.x, tokens.g, weights, *rules, settings.one_copy)
        # The quantizers of groups pack nothing that is empty.
        return cls(
            OperandLayouts(plain_spec(settings.x), f"{settings.x_columns}@grouped_cols"),
            OperandLayouts(plain_spec(settings.g), f"{settings.g_columns}@grouped_cols"),
            OperandLayouts(plain_spec(settings.w), f"{settings.w_columns}@cols"),
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


def kept_weights(weights: Sequence[Tensor], settings: Settings, need_col: bool) -> QuantizedWeight:
    """Quantize and pack weights that stand still."""
    # Made outside of inference_mode, because a training step may use it later.
    with torch.inference_mode(False), torch.no_grad():
        first = weights[0]
        rule = settings.w_rule or settings.scale_rule
        form = at_most_codes(GroupLayouts.of(first, first, settings).w, settings)
        columns = form.col if needs_columns(settings, need_col) else ""
        row, col = quantize_weights(weights, form.row, columns, rule=rule)
        if not packs(settings):
            return QuantizedWeight(settings, row, None, Made.now(row.codes.device))
        mode, given = mode_of(settings), roles(first.device, settings, "gemm_rows")
        packed = None if col is None else kept_stack(col, mode, given.g.row)
        made = Made.now(row.codes.device)
        return QuantizedWeight(settings, kept_stack(row, mode, given.x.row), packed, made)


_ALIGNED = 8  # F.grouped_mm takes rows of whole 16 bytes


def grouped_plain(
    x_RK: Tensor, groups: Groups, weights: Sequence[Tensor] | Tensor, biases: Sequence[Tensor]
) -> Tensor:
    """F.linear on the rows of every group, zeros on rows of no group; [R, N]. weights [N, K] of
    every group, or one tensor [G, N, K]. No bias: [].

    A loop over the groups where the host knows them. Elsewhere F.grouped_mm in bf16, or every
    group on all rows: slower, but nothing waits for the device."""
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
    bounds = list(zip(*host_bounds(offs, capacity, x_RK.shape[0]), strict=True))
    made = [
        F.linear(x_RK[start:end], weight, bias)
        for (start, end), weight, bias in zip(bounds, weights, each, strict=True)
    ]
    return gathered(made, bounds, x_RK.shape[0])


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


def weights_of(
    weights: Sequence[Tensor] | Tensor, form: GroupLayouts, call: GroupedCall, need_dx: bool
) -> tuple[Stack, Stack | None]:
    """The operands of the weights: kept ones, or made now in one read."""
    kept, settings = call.kept, call.settings
    if kept is not None and (kept.row.layout.exact or not form.x.row.endswith("@rows")):
        row = kept.row
        if row.layout.any_rows:
            row = plain(row) if need_dx else serving(row, settings)
        return row, kept.col
    first = weights if isinstance(weights, Tensor) else weights[0]
    col = form.w.col if columns_now(first, settings, need_dx) else ""
    return quantize_weights(weights, form.w.row, col, rule=settings.w_rule or form.rule)


_ARGUMENTS = 8  # of the autograd function before the parameters


class _Need(NamedTuple):
    """Which gradients a layer makes: of its input, its weights, its biases."""

    dx: bool
    dw: tuple[bool, ...]
    db: tuple[bool, ...]


class _Layer(NamedTuple):
    """What backward is told of one of the layers, beside tensors."""

    call: GroupedCall
    form: GroupLayouts
    need: _Need
    stacked: bool
    dtypes: tuple[torch.dtype, torch.dtype]  # of the weights and of the biases, if there are any
    weights: Stack | None = None  # without tensors; None: the weights themselves are kept
    input: SavedOperand = NOTHING
    tensors: int = 0  # that were kept of the weights

    @classmethod
    def of(
        cls, x: Tensor, call: GroupedCall, parts: Sequence[Tensor], needs: Sequence[bool], dx: bool
    ) -> "_Layer":
        count = len(parts) // 2 if call.has_bias else len(parts)
        form = GroupLayouts.of(x, parts[0] if parts[0].dim() == 2 else parts[0][0], call.settings)
        need = _Need(dx, tuple(needs[:count]), tuple(needs[count:]))
        return cls(call, form, need, parts[0].dim() == 3, (parts[0].dtype, parts[-1].dtype))

    def columns(self) -> str:
        """In which form the weight gradient reads the input."""
        return self.form.x.col if any(self.need.dw) else ""

    def forward(
        self, x: Quantized, parts: Sequence[Tensor], groups: Groups, itself: Tensor | None = None
    ) -> "tuple[Tensor, _Layer, list[Tensor | None]]":
        """(y, what backward is told, the tensors that it keeps: of the input, unless its columns
        are made again, then of the weights). itself: the input, if that is kept."""
        weights, bias = split_parts(parts, self.call.has_bias)
        row, col = weights_of(weights, self.form, self.call, self.need.dx)
        assert x.row is not None
        y_RN = gemm_rows(
            x.row, row, groups, bias=bias, out_dtype=self.call.out_dtype, tag=self.call.tag,
            mode=mode_of(self.call.settings),
        )  # fmt: skip
        held = row if self.form.one_copy else col  # of one copy backward makes the columns
        stack: Any = None
        tensors: Sequence[Tensor | None] = parts[: len(self.need.dw)] if self.need.dx else ()
        if self.need.dx and held is not None:
            tensors = held.codes, held.scales, held.packed
            stack = held._replace(codes=None, scales=None, packed=None)  # type: ignore[arg-type]
        kept = SavedOperand.itself(itself) if x.col is None else SavedOperand.operand(x.col)
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
        form = self.form
        if self.weights is None:
            given = saved[0] if self.stacked else saved
            w = weight_columns(given, form.w.col, rule=form.w_col_rule)
        else:
            codes, scales, packed = saved
            w = self.weights._replace(codes=codes, scales=scales, packed=packed)
            if form.one_copy:
                w = columns_of_weights(w, form.w.col, form.w_col_rule)
        return gemm_rows(
            g_row, w, groups, out_dtype=dtype, tag=tag_of(self.call.tag, DGRAD),
            mode=mode_of(self.call.settings, backward=True),
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
                kept = SavedOperand.operand(again.col)
            wgrad = wgrad_of(kept, g.col, groups, self.call, self.form, self.stacked)
            dw = place(self.call.grad_target, wgrad, self.dtypes[0])
            if dw is not None and not self.stacked:
                dw = dw.unflatten(0, (len(self.need.dw), -1))
        if g.col_sum is not None and any(self.need.db):
            db = g.col_sum.to(self.dtypes[1])
        return (
            *gradients_of(dw, self.need.dw, self.stacked),
            *gradients_of(db, self.need.db, self.stacked),
        )


class GroupedFunction(torch.autograd.Function):
    """y [R, N] of x [..., K]: one layer, or two and an activation. Gradients have the dtypes of
    what they belong to. order, place: of a Route of top_k rows a token, or None; parts: the
    parameters of the first layer, `split` of them, and of the second: weights and then biases, G of
    each, or one stacked tensor of each."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, offs: Tensor, order: Tensor | None, place_of: Tensor | None,
        top_k: int, calls: tuple[GroupedCall, ...], act: Activation | None, split: int,
        *parts: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        need_dx, needs = ctx.needs_input_grad[0], ctx.needs_input_grad[_ARGUMENTS:]
        first = _Layer.of(x, calls[0], parts[:split], needs[:split], need_dx)
        layers: tuple[_Layer, ...] = (first,)
        a_again, keeps_x, itself = False, False, None
        if act is not None:
            need_da = need_dx or any(needs[:split])
            layers = first, _Layer.of(x, calls[1], parts[split:], needs[split:], need_da)
            keeps_x = order is not None and top_k >= x.element_size() and any(first.need.dw)
            keeps_x = keeps_x and not torch.compiler.is_compiling()
            a_again = need_da
        elif first.call.save_x and any(first.need.dw):
            itself = x
        there = on_device(offs, first.form.x.row, x)  # once for all ops
        y_RN, layers, saved = _run(
            _rows(x, order, top_k), Groups(there, calls[0].capacity), layers, act, parts, split,
            keeps_x, a_again, itself,
        )  # fmt: skip
        ctx.layers, ctx.act, ctx.x_like, ctx.top_k = layers, act, (x.shape, x.dtype), top_k
        ctx.grad_targets, ctx.capacity = [call.grad_target for call in calls], calls[0].capacity
        kept_x = x if keeps_x else None
        y = unflatten(y_RN, x) if order is None else y_RN
        return outputs(ctx, [offs, there, order, place_of, kept_x, *saved], y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        owner = "te_mx.GroupedLinear" if ctx.act is None else "te_mx: experts"
        return run_backward(_backward, owner, ctx, *grads)


def _rows(x: Tensor, order: Tensor | None, top_k: int) -> Tensor:
    return flatten(x) if order is None else rows_of(x, order, top_k)


def _run(
    x_RK: Tensor, groups: Groups, layers: tuple[_Layer, ...], act: Activation | None,
    parts: Sequence[Tensor], split: int, x_again: bool = False, a_again: bool = False,
    itself: Tensor | None = None,
) -> tuple[Tensor, tuple[_Layer, ...], list[Tensor | None]]:  # fmt: skip
    """x_again, a_again: backward makes these columns; itself: of what it has."""
    first, *others = layers
    form, col = first.form, "" if x_again or itself is not None else first.columns()
    q = quantize_grouped(x_RK, groups, form.x.row, col, rule=form.rule)
    del x_RK  # which nobody else may hold
    h_RN, first, saved = first.forward(q, parts[:split], groups, itself)
    if act is None:
        return h_RN, (first,), [None, *saved]
    (second,) = others
    form, col = second.form, "" if a_again else second.columns()
    target = Target(form.x.row, col, form.rule)
    a = act_quantize_grouped(ActGroups(ActStep(h_RN, None, act, h_RN.dtype, False, target), groups))
    y_RN, second, more = second.forward(a, parts[split:], groups)
    return y_RN, (first, second), [h_RN if second.need.dx else None, *saved, *more]


def _backward(ctx: Any, tensors: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    first, last = ctx.layers[0], ctx.layers[-1]
    host_offs, offs, order, place_of, x, h_RN, *rest = tensors
    groups, g_RN = Groups(offs.contiguous(), ctx.capacity), flatten(grad)
    end = 3 + first.tensors
    x_saved, w1_saved, a_saved, w2_saved = (
        rest[:3], rest[3:end], rest[end : end + 3], rest[end + 3 :],
    )  # fmt: skip
    row, col, rule, sums, _ = last.target()
    g: Quantized | None
    if row or col:
        g = quantize_grouped(
            g_RN, groups, row, col, rule=rule, col_sum=sums, seed=new_seed(g_RN.device, rule)
        )
    else:
        g = Quantized(None, None, col_sums(g_RN, Groups(host_offs, ctx.capacity)))
    dx = a = None
    mine: tuple[Tensor | None, ...] = (None,) * (len(first.need.dw) + len(first.need.db))
    theirs: tuple[Tensor | None, ...] = ()
    if ctx.act is not None:
        if last.columns() and not last.input.spec:
            target = Target("", last.columns(), last.form.rule)
            step = ActStep(h_RN, None, ctx.act, h_RN.dtype, False, target)
            a = act_quantize_grouped(ActGroups(step, groups))
        theirs = last.gradients(g, a_saved, a, groups)
        del a
        da_RN = last.dgrad(g.row, w2_saved, groups, h_RN.dtype) if last.need.dx else None
        g = None
        if da_RN is not None:
            target = first.target()
            target = target._replace(seed=new_seed(g_RN.device, target.rule))
            step = ActStep(h_RN, da_RN, ctx.act, h_RN.dtype, False, target)
            g = act_quantize_grouped(ActGroups(step, groups))
            del da_RN, step
    if g is not None:
        if first.need.dx:
            dx = first.dgrad(g.row, w1_saved, groups, ctx.x_like[1])
            dx = (
                shaped(dx, ctx.x_like[0]) if order is None else sum_of_rows(dx, place_of, ctx.top_k)
            )
        again = None
        if x is not None:
            rows = rows_of(x, order, ctx.top_k)
            again = quantize_grouped(rows, groups, col=first.columns(), rule=first.form.rule)
            del rows
        mine = first.gradients(g, x_saved, again, groups)
    return dx, *(None,) * (_ARGUMENTS - 1), *mine, *theirs


def wgrad_of(
    x_kept: SavedOperand, g_col: Operand, groups: Groups, call: GroupedCall, form: GroupLayouts,
    stacked: bool,
) -> GroupedWgrad:  # fmt: skip
    """dw [G, N, K], or [G * N, K] for separate weights: what they are when concatenated."""
    mode, tag = mode_of(call.settings, backward=True), tag_of(call.tag, WGRAD)
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

    def together(out: "Tensor | None", dtype: torch.dtype, accumulate: bool) -> Tensor:
        x_col = columns()
        shape = (len(groups.offs), g_col.rows, x_col.rows)
        dw = gemm_k(
            g_col, x_col, groups, out=None if out is None else out.view(shape), out_dtype=dtype,
            accumulate=accumulate, tag=tag, mode=mode,
        )  # fmt: skip
        return dw if stacked else dw.flatten(0, 1)

    def into(outs: "Sequence[Tensor]", accumulate: bool) -> bool:
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
    and one bias [G, N]; offs: end offsets of the groups."""
    settings = call.settings
    if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in parts)):
        if not by_steps(settings):
            return one_by_one(x, offs, parts, call)
        given = x, offs, None, None, 1, (call,), None, len(parts)
        return GroupedFunction.apply(*given, *parts)[0]
    weights, bias = split_parts(parts, call.has_bias)
    form = GroupLayouts.of(x, weights[0], settings)
    row, _ = weights_of(weights, form, call, False)
    return infer(x, offs, row, bias, call)


def grouped_on_codes(
    x: Tensor, offs: Tensor, w_row: Stack, bias_GN: Tensor | None, call: GroupedCall
) -> Tensor:
    """x [..., K] -> [..., N] on weights of rowwise codes, differentiable in x and the biases."""
    wanted = x.requires_grad or (bias_GN is not None and bias_GN.requires_grad)
    if not (torch.is_grad_enabled() and wanted):
        return infer(x, offs, w_row, bias_GN, call)
    settings = on_codes(call.settings)
    kept = QuantizedWeight(settings, w_row, None, Made(0, None))
    # The codes in the place of the weights have no gradient, and nothing reads them there.
    parts = (w_row.codes,) if bias_GN is None else (w_row.codes, bias_GN)
    return grouped_linear(x, offs, parts, call._replace(settings=settings, kept=kept))


def infer(
    x: Tensor, offs: Tensor, w_row: Stack, bias_GN: Tensor | None, call: GroupedCall
) -> Tensor:
    """x [..., K] -> [..., N] on quantized weights, without autograd."""
    settings = call.settings
    form = GroupLayouts.of(x, w_row.codes, settings)
    groups = Groups(on_device(offs, form.x.row, x), call.capacity)
    q = quantize_grouped(flatten(x), groups, form.x.row, rule=form.rule)
    assert q.row is not None
    y_RN = gemm_rows(
        q.row, w_row, groups, bias=bias_GN, out_dtype=call.out_dtype, tag=call.tag,
        mode=mode_of(settings),
    )  # fmt: skip
    return unflatten(y_RN, x)


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
    parameters of each layer, as those of grouped_linear; offs: end offsets of the groups."""
    given = *parts[0], *parts[1]
    split = len(parts[0])
    order, back, top_k = (None, None, 1) if to is None else (to.order, to.place, to.top_k)
    if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in given)):
        return GroupedFunction.apply(x, offs, order, back, top_k, calls, act, split, *given)[0]
    layers = tuple(
        _Layer.of(x, call, own, [False] * len(own), False)
        for call, own in zip(calls, parts, strict=True)
    )
    groups = Groups(on_device(offs, layers[0].form.x.row, x), calls[0].capacity)
    y_RN = _run(_rows(x, order, top_k), groups, layers, act, given, split)[0]
    return unflatten(y_RN, x) if to is None else y_RN
