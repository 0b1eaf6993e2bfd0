"""The autograd functions behind te_mx.LayerNormLinear and te_mx.LayerNormMLP, behind MLP blocks of
other libraries' models that are fused where they stand (te_mx/fusion/fused_mlp.py), and behind
te_mx.Linear where its roles have several formats: a normalization or none, a product, and in an MLP
an activation and a second product. The first weight of a block is one parameter, or those of the
gate and of the up projection, one behind the other: one GEMM all the same.

Shapes: M tokens, K in_features (hidden_size), N out_features of the first product; of an MLP F
ffn_hidden_size, N = 2F for gated activations, else F, and H out_features.

    norm   z[M, K]  = norm(x)                       fp32, rounded to the output's dtype
    fc1    h[M, N]  = z @ w1[N, K]^T + b1           y of a LayerNormLinear
    act    a[M, F]  = act(h)                        fp32, rounded to the output's dtype
    fc2    y[M, H]  = a @ w2[H, F]^T + b2
    back   da = g @ w2, dh = da * act'(h), dz = dh @ w1, dw2 = g^T @ a, dw1 = dh^T @ z
    norm   dx, dweight, dbias from dz, x, mean, rstd   fp32, rounded to the dtypes of what they
                                                       belong to

Bit for bit what a normalization and te_mx.Linear after it compute, but z is never written unless
somebody asks for it: x is read once, and z is quantized from the caches. GELU runs inside the
GEMMs: fc1's epilogue adds the bias, stores h (if there will be a backward pass) and applies GELU to
the fp32 sum; the dgrad of fc2 multiplies its fp32 sum by GELU's derivative at h and sums the result
for b1. For other activations a and dh are quantized as they are computed, without being written,
and b1's gradient sums dh as rounded.

Saved for backward: x, with mean and rstd in fp32 (8 bytes a token); h; and for the GEMMs what
autograd/linear.py saves: columnwise codes of z and a, 1.03 bytes an element, and the weights, or
what the recipe says instead. Joined weights are never saved: backward reads the parameters again.
Codes of a block that backward can make again to the byte are not saved either: those of a, of h,
and those of an x that a normalization just made, of what it was made of.

Where the device has a kernel for it the layer is one native call each way: the kernels of the steps
on the same bytes in the same order, of which only the host sees less."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_mx._ops import Epilogue, Operand, Quantized, gemm_2d, quantized
from te_mx._ops.fused import act_quantize_2d
from te_mx._ops.library import are_direct, facts_of, has_memory, is_watched
from te_mx._ops.linear import layer_kernel
from te_mx.autograd import input_cache, linear_recipe, norm, sequence_parallel, weight_parts
from te_mx.autograd.grad_target import WeightGradient
from te_mx.autograd.linear_recipe import DGRAD, FPROP, WGRAD, QuantizedWeight, TracedWeight
from te_mx.autograd.node import (
    NO_LINK,
    apply_below,
    linked,
    needs_gradient,
    outputs,
    place,
    run_backward,
    tag_of,
)
from te_mx.autograd.norm import NormStep, Source, source_of
from te_mx.autograd.saved import NOTHING, SavedOperand, flatten, shaped, surely, unflatten
from te_mx.autograd.sequence_parallel import Tokens
from te_mx.dispatch.fused import Activation, ActStep, Target
from te_mx.dispatch.kernels import derive, derived
from te_mx.dispatch.layer import Formats, LayerPlan, LayerProblem, Product
from te_mx.dispatch.linear import LATER, Into
from te_mx.recipes.settings import Settings
from te_mx.runtime.kernel_log import LAST_RUN

_known = derived()


class Block(NamedTuple):
    """What a block says beside. save_x: as of autograd.linear.Call. codes: stand in for quantizing
    the parts of w1 and w2. lent: these parts and w2 are parameters of several ranks."""

    save_x: bool = False
    codes: tuple[QuantizedWeight, ...] = ()
    lent: tuple[Any, ...] = ()


class Call(NamedTuple):
    """What one call of the module fixes: without `act` there is one product; `return_z` returns z
    beside y; with tags the kernels of fc1 (for each of its parts) and fc2 are recorded, as by
    autograd.linear.linear; `tokens` as there; `block` of one of other libraries."""

    step: NormStep
    act: Activation | None
    settings: Settings
    return_z: bool = False
    tags: tuple[int, ...] = (-1, -1)
    tokens: Tokens | None = None
    block: Block | None = None

    def record(self, gemm: int) -> None:
        """Note that the GEMM of fc1 was that of all its parts."""
        first, *others = self.tags[:-1]
        ran = LAST_RUN.get(first + gemm) if first >= 0 and others else None
        for tag in others:
            if ran is not None and tag >= 0:
                LAST_RUN[tag + gemm] = ran

    @property
    def owner(self) -> str:
        if self.block is not None:
            return "te_mx: a fused MLP block"
        if self.act is not None:
            return "te_mx.LayerNormMLP"
        return "te_mx.Linear" if self.step.norm is None else "te_mx.LayerNormLinear"


class Parameters(NamedTuple):
    """Weights and biases of the normalization and of the products; of a layer with one product the
    last two are None. A weight that stands still may be None where nothing is differentiated."""

    norm_weight: Tensor | None
    norm_bias: Tensor | None
    w1: Tensor | None
    b1: Tensor | None
    w2: Tensor | None = None
    b2: Tensor | None = None


NONE_KEPT = NOWHERE = (None, None)


class Weights(NamedTuple):
    """For fc1 and fc2: weights that are kept, and where the gradients go."""

    kept: tuple[QuantizedWeight | None, QuantizedWeight | None] = (None, None)
    grad_targets: tuple[WeightGradient | None, WeightGradient | None] = (None, None)


class Needs(NamedTuple):
    """Which gradients are asked for, of w1 and b1 for any part."""

    dx: bool
    norm_weight: bool
    norm_bias: bool
    dw1: bool
    db1: bool
    dw2: bool
    db2: bool

    @property
    def dz(self) -> bool:
        return self.dx or self.norm_weight or self.norm_bias

    @property
    def dh(self) -> bool:
        return self.dz or self.dw1 or self.db1


def activated(
    z: Operand, w: Operand | TracedWeight, bias: Tensor | None, call: Call,
    plan: linear_recipe.Input, need_h: bool,
) -> tuple[Tensor | None, Tensor | None, Quantized]:  # fmt: skip
    """h (with GELU only if it is needed), a if the plan keeps it, and a quantized."""
    step, act, settings, _, tags, *_ = call
    assert act is not None
    if act.gelu_form:
        if isinstance(w, TracedWeight):
            a = w.times(z, bias, act.gelu_form, step.dtype)
            return None, a, quantized(a, plan.target)
        made = gemm_2d(
            z, w, Epilogue(bias, act.gelu_form), out_dtype=step.dtype, want_aux=need_h,
            tag=tags[0], mode=linear_recipe.mode_of(settings),
        )  # fmt: skip
        return made.aux, made.out, quantized(made.out, plan.target)
    h = linear_recipe.fprop(z, w, bias, settings, step.dtype, tags[0])
    made_a = act_quantize_2d(ActStep(h, None, act, step.dtype, plan.keep, plan.target))
    return h, made_a.out, made_a.quantized


def through_activation(
    call: Call, gradient: linear_recipe.Gradient, kept_w2: SavedOperand, h: Tensor,
    need: tuple[bool, bool, bool],
) -> tuple[linear_recipe.Gradient, Tensor]:  # fmt: skip
    """dh, quantized for fc1 as `need` (dz, dw1, db1) says, and its sums over the tokens."""
    step, act, settings, _, tags, *_ = call
    assert act is not None
    target, itself = linear_recipe.plan_gradient(h.device, settings, *need)
    tag = tag_of(tags[-1], DGRAD)
    if act.gelu_form and gradient.q.row is not None:
        made = linear_recipe.dgrad(
            gradient, kept_w2, settings, h.dtype, tag, gelu=act.gelu_form, gelu_in=h,
            bias_grad=need[2],
        )  # fmt: skip
        target = target._replace(col_sum=False)
        return linear_recipe.Gradient(made.out, quantized(made.out, target), target), made.bias_grad  # type: ignore[return-value]
    da = linear_recipe.dgrad(gradient, kept_w2, settings, step.dtype, tag).out
    parts = act_quantize_2d(ActStep(h, da, act, h.dtype, itself, target))
    inner = linear_recipe.Gradient(parts.out, parts.quantized, target)
    return inner, parts.quantized.col_sum  # type: ignore[return-value]


def _row(q: Quantized) -> Operand:
    assert q.row is not None
    return q.row


# ------------------------------------------------------------------------------------------- blocks
def _makes_again(call: Call, plan_a: linear_recipe.Input) -> bool:
    """Whether backward makes the columnwise codes of a again, of h: one more read against 1.03
    bytes an element kept. GELU inside a GEMM reads the sums before they are rounded to h, so its
    codes cannot be made again."""
    assert call.act is not None
    return call.act.gelu_form is None and not plan_a.keep and bool(plan_a.target.col)


def _made_again(call: Call, h: Tensor) -> SavedOperand:
    """The columnwise codes of a, as forward would have made them."""
    assert call.act is not None
    plan = linear_recipe.plan_input(h.device, call.settings, True)
    target = Target("", plan.target.col, plan.target.rule)
    made = act_quantize_2d(ActStep(h, None, call.act, call.step.dtype, False, target)).quantized.col
    assert made is not None
    return SavedOperand.operand(made)


def _quantized(
    x: Tensor, parts: Sequence[Any], plan: linear_recipe.Input, settings: Settings, need_dx: bool,
    kept: QuantizedWeight | None = None,
) -> tuple[Quantized, Operand, Operand | None]:  # fmt: skip
    """x and w1; x perhaps by whoever made it, or by a sibling. Without columnwise codes where
    `source_of` has what to make them of."""
    q = input_cache.find(x, plan.target)
    if q is None and source_of(x) is not None:
        q = input_cache.find(x, plan.target._replace(col=""))
    if q is None and kept is None and len(parts) == 1:
        return linear_recipe.input_and_weight(x, plan, None, parts[0], settings, need_dx)
    q = q or linear_recipe.quantized_input(x, plan)
    return q, *weight_parts.operands(kept, parts, settings, need_dx)


class _Again(NamedTuple):
    """What backward of a block makes again, beside tensors: columns of a; those of x, by this step;
    w1, of as many parts."""

    a: bool = False
    step: NormStep | None = None
    parts: int = 0


_NOT_AGAIN = _Again()


# ------------------------------------------------------------------------------------ step by step
class LayerFunction(torch.autograd.Function):
    """y, or (y, z). first: weight and bias of every part of w1."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None,
        w2: Tensor | None, b2: Tensor | None, weights: Weights, call: Call, *first: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        need, settings, block, tokens = _needs(ctx), call.settings, call.block, call.tokens
        parts: Sequence[Any] = first[::2]
        if block is not None and block.lent:
            *parts, w2 = [one.local for one in block.lent]
        b1, codes = weight_parts.joined(first[1::2]), () if block is None else block.codes
        save_x = block is not None and block.save_x
        plan_z = sequence_parallel.plan_input(x, settings, need.dw1, save_x, tokens)
        if block is not None:
            q, w1_row, w1_col = _quantized(x, parts, plan_z, settings, need.dz, weights.kept[0])
        else:
            w1_row, w1_col = linear_recipe.weight_operands(
                weights.kept[0], parts[0], settings, need.dz
            )
        kept_a, kept_w2, h, again = NOTHING, NOTHING, None, _NOT_AGAIN
        if call.act is not None:
            plan_a = linear_recipe.plan_input(x.device, settings, need.dw2)
            if block is not None and _makes_again(call, plan_a):
                again = _Again(a=True)
                plan_a = plan_a._replace(target=plan_a.target._replace(col=""))
            w2_row, w2_col = linear_recipe.weight_operands(weights.kept[1], w2, settings, need.dh)
        norms, source, z = norm.NOTHING, None, None
        if block is not None:
            if need.dw1 and plan_z.target.col and q.col is None:
                source = source_of(x)
                assert source is not None
                again = again._replace(step=source.step)
            kept_z = plan_z.kept(q, x, need.dw1 and source is None)
        else:
            made = call.step.forward(
                flatten(x), norm_weight, norm_bias, call.return_z or plan_z.keep, plan_z.target
            )
            q, z = made.quantized, made.z
            norms = call.step.saved(x, norm_weight, made) if need.dz else norms
            kept_z = plan_z.kept(q, z, need.dw1)
        row = sequence_parallel.rows_of_all(q.row, tokens)
        dtype = call.step.dtype
        if call.act is not None:
            h, a, qa = activated(row, w1_row, b1, call, plan_a, need.dh or again.a)
            call.record(FPROP)
            kept_a = plan_a.kept(qa, a, need.dw2 and not again.a)
            kept_w2 = linear_recipe.kept_for_dgrad(w2_row, w2_col, w2, settings, need.dh)
            y_M = linear_recipe.fprop(_row(qa), w2_row, b2, settings, dtype, call.tags[-1])
        else:
            y_M = linear_recipe.fprop(row, w1_row, b1, settings, dtype, call.tags[0])
        kept_w1, own = weight_parts.kept_of((w1_row, w1_col), parts, settings, need.dz, codes)
        kept = kept_z, kept_w1, kept_a, kept_w2
        ctx.kept, ctx.again = [one.beside for one in kept], again._replace(parts=len(own))
        ctx.call, ctx.grad_targets, ctx.x_like = call, weights.grad_targets, (x.shape, x.dtype)
        ctx.rows = [part.shape[0] for part in parts] if len(parts) > 1 else [0]
        ctx.dtypes = [None if t is None else t.dtype for t in (norm_bias, parts[0], b1, w2, b2)]
        y = sequence_parallel.unflatten_all(y_M, x, tokens)
        shown = (shaped(z, x.shape),) if call.return_z else ()  # type: ignore[arg-type]
        saved_h = h if need.dh or again.a else None
        tensors = [t for one in kept for t in one.tensors]
        made_of = () if source is None else source.tensors
        return outputs(ctx, (*norms, saved_h, *tensors, *own, *made_of), y, *shown)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        call = ctx.call
        made = run_backward(_backward, call.owner, ctx, *grads)
        if call.block is None or not call.block.lent:
            return made
        *lent, last = call.block.lent  # parameters of several ranks
        dx, d_weight, d_bias, dw2, db2, _, _, *first = made
        first[::2] = [one.whole(dw) for one, dw in zip(lent, first[::2], strict=True)]
        return dx, d_weight, d_bias, last.whole(dw2), db2, None, None, *first


def _needs(ctx: Any) -> Needs:
    x, norm_weight, norm_bias, w2, b2, _, _, *first = ctx.needs_input_grad
    return Needs(x, norm_weight, norm_bias, any(first[::2]), any(first[1::2]), w2, b2)


def _backward(
    ctx: Any, saved: tuple[Tensor, ...], g: Tensor, g_z: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    kept = [
        one.with_tensors(saved[i : i + 3]) for one, i in zip(ctx.kept, (5, 8, 11, 14), strict=True)
    ]
    kept[0] = sequence_parallel.kept_of_all(kept[0], ctx.call.tokens)
    need = _needs(ctx)
    dx, d_weight, d_bias, dw1, db1, dw2, db2 = _gradients(
        ctx, need, ctx.call.step, saved[:4], saved[4], kept, (g, g_z), ctx.again, saved[17:]
    )
    first = weight_parts.split_gradients(ctx.rows, dw1, db1, ctx.needs_input_grad[7:])
    return dx, d_weight, d_bias, dw2, db2, None, None, *first


def _gradients(
    ctx: Any, need: Needs, step: NormStep, norms: Any, h: Tensor | None, kept: list[SavedOperand],
    grads: tuple[Tensor, Tensor | None], again: _Again = _NOT_AGAIN, own: Sequence[Any] = (),
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients of x and of all parameters, from what was kept of z, w1, a and w2. own: what w1
    and the columns of x are made of again."""
    call, (g, g_z) = ctx.call, grads
    settings, tag1, tag2, block = call.settings, call.tags[0], call.tags[-1], call.block
    kept_z, kept_w1, kept_a, kept_w2 = kept
    del kept
    bias_dtype, w1_dtype, b1_dtype, w2_dtype, b2_dtype = ctx.dtypes
    dx = d_weight = d_bias = dw1 = db1 = dw2 = db2 = None
    if call.act is None:
        inner = linear_recipe.quantized_gradient(flatten(g), settings, need.dz, need.dw1, need.db1)
        sums = inner.q.col_sum
    else:
        gradient = linear_recipe.quantized_gradient(
            flatten(g), settings, need.dh, need.dw2, need.db2
        )
        if need.dw2:
            if again.a:
                assert h is not None
                kept_a = _made_again(call, h)
            wgrad = linear_recipe.wgrad(gradient, kept_a, settings, tag_of(tag2, WGRAD))
            dw2 = place(ctx.grad_targets[1], wgrad, w2_dtype)
            del wgrad
        if need.db2:
            db2 = gradient.q.col_sum.to(b2_dtype)  # type: ignore[union-attr]
        if need.dh:
            assert h is not None
            wanted = need.dz, need.dw1, need.db1
            inner, sums = through_activation(call, gradient, kept_w2, h, wanted)
        del gradient, kept_a, kept_w2
    if need.dz:
        if again.parts:
            kept_w1 = weight_parts.kept_again(own[: again.parts], block.codes, settings)
        tag, dtype = tag_of(tag1, DGRAD), step.dtype
        if block is not None or (step.norm is None and call.act is None):
            dtype = ctx.x_like[1]
        dz = linear_recipe.dgrad(inner, kept_w1, settings, dtype, tag).out
        call.record(DGRAD)
        del kept_w1
        dz = sequence_parallel.sum_of_mine(dz, call.tokens)
        dx, d_weight, d_bias = step.backward(dz, g_z, norms, ctx.x_like, need, bias_dtype)
    if need.dw1:
        if again.step is not None:
            plan = linear_recipe.plan_input(g.device, settings, True)
            kept_z = SavedOperand.operand(
                Source(tuple(own[again.parts :]), again.step).columns(plan.target)
            )
        wgrad = linear_recipe.wgrad(inner, kept_z, settings, tag_of(tag1, WGRAD))
        dw1 = place(ctx.grad_targets[0], wgrad, w1_dtype)
        call.record(WGRAD)
    if need.db1:
        db1 = sums.to(b1_dtype)  # type: ignore[union-attr]
    return dx, d_weight, d_bias, dw1, db1, dw2, db2


# ------------------------------------------------------------------------------------- in one call
def _formats(device: torch.device, settings: Settings) -> Formats:
    x, w, g = ((form.row, form.col) for form in linear_recipe.roles(device, settings))
    rules = settings.scale_rule, settings.weight_columns_rule, settings.gradient_rule
    return Formats(x, w, g, *rules, settings.precision, settings.spread)


def _product(
    w: Tensor, b: Tensor | None, kept: QuantizedWeight | None, settings: Settings, through: bool
) -> Product:
    """What the plan is told. through: whether dgrad reads the weight."""
    columns = through and (kept is not None or linear_recipe.columns_now(w, settings, through))
    need_db, dtype = b is not None and b.requires_grad, None if b is None else b.dtype
    n, k = w.shape
    return Product(n, k, w.dtype, dtype, kept is not None, columns, w.requires_grad, need_db)


class OneCall(NamedTuple):
    """A layer as one call each way: the plan, and what follows from its tensors.

    like: shape and dtype of x; norm: the dtype of the weight of the normalization; dtypes: of its
    bias, w1, b1, w2 and b2; need: which of x and all these have gradients. keeps: whether x is kept
    for backward, and the values of w1 and of w2. edges: of both weights in the graph. owner: of
    errors. plain: kernels read the parameters of the normalization as they are, and make gradients
    of their dtypes.
    """

    plan: LayerPlan
    like: tuple[torch.Size, torch.dtype]
    norm: torch.dtype | None
    dtypes: tuple[torch.dtype | None, ...]
    need: Needs
    keeps: tuple[bool, bool, bool]
    edges: tuple[int, int]
    owner: str
    plain: bool


# The weights and the call, and how it runs.
How = tuple[Weights, Call, OneCall]


def _plan(
    x: Tensor, p: Parameters, weights: Weights, call: Call, facts: Any = None
) -> OneCall | None:
    """How a call runs, found at once where one like it ran; None where its steps run one by one.
    Gradients are enabled. facts: what stands for those of x and the parameters, if known."""
    step, act, settings, return_z, _, tokens, _ = call
    w1, w2, (kept1, kept2) = p.w1, p.w2, weights.kept
    if tokens is not None or w1 is None or is_watched():
        return None
    # Of weights that are computed of parameters.
    computed = () if w1.is_leaf and (w2 is None or w2.is_leaf) else [
        w is not None and linear_recipe.columns_now(w, settings, True) for w in (w1, w2)
    ]  # fmt: skip
    # By the identity of the settings, which lives as long as the entry: a hash costs more.
    key = (
        "layer", facts or facts_of(x, *p), step, act, return_z, kept1 is None, kept2 is None,
        id(settings), *computed,
    )  # fmt: skip
    found = _known.get(key)
    if found is None:
        found = derive(key, (_make_one(x, p, weights, call), settings))
    one: OneCall | None = found[0]
    if one is None or kept1 is kept2 is None:
        return one
    for kept, columns in zip(weights.kept, (one.plan.problem.need_dx, True), strict=True):
        if kept is not None and not _serves(kept, one.plan, columns, x.device):
            return None
    return one


def _serves(kept: QuantizedWeight, plan: LayerPlan, columns: bool, device: torch.device) -> bool:
    """Whether a weight that was quantized before lies as a plan reads it."""
    row, col = kept.row, kept.col
    if not isinstance(row, Operand) or row.packed is not None or row.codes.device != device:
        return False
    return row.spec == plan.problem.formats.w[0] and (
        not columns or (col is not None and col.spec == plan.problem.formats.w[1])
    )


def _make_one(x: Tensor, p: Parameters, weights: Weights, call: Call) -> OneCall | None:
    settings, step, device = call.settings, call.step, x.device
    w1, w2, size, kernel = p.w1, p.w2, x.numel(), layer_kernel(device, settings)
    sizes = [t.numel() for t in (x, w1, w2) if t is not None]
    unlike = step.norm is not None and p.norm_weight is None
    if 0 in sizes or unlike or not linear_recipe.by_steps(settings) or settings.one_copy:
        return None
    need_dz = needs_gradient(x, p.norm_weight, p.norm_bias)
    assert w1 is not None
    if kernel is None or not (need_dz or w1.requires_grad) or not are_direct(x, *p):
        return None
    first = _product(w1, p.b1, weights.kept[0], settings, need_dz)
    problem = LayerProblem(
        size // first.k, x.dtype, step.dtype, step.norm, step.kernel_dtype(*p[:2]),
        p.norm_bias is not None, call.act, first,
        None if w2 is None else _product(w2, p.b2, weights.kept[1], settings, True), need_dz,
        call.return_z, _formats(device, settings), device,
    )  # fmt: skip
    plan = kernel.make_plan(problem)  # kept with the key of the call
    if plan is None:
        return None
    dtypes = [None if t is None else t.dtype for t in p]
    need = Needs(*(t is not None and t.requires_grad for t in (x, *p)))
    keeps = (
        need_dz and step.norm is not None, need_dz and not first.kept,
        problem.second is not None and not problem.second.kept,
    )  # fmt: skip
    plain = {*dtypes[:2]} <= {problem.norm_dtype, None} and not step.zero_centered
    plain = plain and need.dx and need.norm_weight and (need.norm_bias or p.norm_bias is None)
    edge = 3 - dtypes[:2].count(None)
    edges = edge, edge + 2 - dtypes[3:4].count(None)
    return OneCall(
        plan, (x.shape, x.dtype), dtypes[0], tuple(dtypes[1:]), need, keeps, edges, call.owner,
        plain,
    )  # fmt: skip


class OneCallLayer(torch.autograd.Function):
    """As LayerFunction."""

    @staticmethod
    def forward(
        ctx: Any, how: How, x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None,
        w1: Tensor, b1: Tensor | None, w2: Tensor | None = None, b2: Tensor | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        weights, call, one = how
        plan, (keeps_x, keeps_w1, keeps_w2) = one.plan, one.keeps
        scale, shift = norm_weight, norm_bias
        if one.norm is not None and not (
            one.plain
            and norm_weight.is_contiguous()  # type: ignore[union-attr]
            and (norm_bias is None or norm_bias.is_contiguous())
        ):
            scale, shift = call.step.as_read(norm_weight, norm_bias, plan.problem.norm_dtype)
        read: Any = (w1, None), (w2, None)
        saved: Any = w1 if keeps_w1 else None, None, w2 if keeps_w2 else None, None
        if weights.kept != NONE_KEPT:
            read, saved = _with_kept(weights.kept, plan, read, saved)
        y, z, *buffers = plan.forward(x, scale, shift, read, b1, b2)
        if call.tags[0] >= 0:
            for tag, kernel in zip(call.tags, plan.kernels, strict=False):
                LAST_RUN[tag] = kernel
        ctx.how, ctx.grad_targets = how, weights.grad_targets
        norms = (x, scale) if keeps_x else (None, None)
        made = (y,) if z is None else (y, z)
        return linked(ctx, (*norms, *buffers, *saved), NO_LINK.detach(), *made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        made = run_backward(_backward_in_one_call, ctx.how[2].owner, ctx, *grads)
        return None, *made[: len(ctx.needs_input_grad) - 1]


_run = apply_below(OneCallLayer)


def _with_kept(kept: Any, plan: LayerPlan, read: Any, saved: Any) -> tuple[Any, Any]:
    """What is read of both weights, and what is saved, where some were quantized before."""
    read, saved = [*read], [*saved]
    for i, (product, ready) in enumerate(zip(plan.products, kept, strict=False)):
        if ready is not None:
            read[i], col = linear_recipe.parts_of(ready)
            backward = product.kept and (i or plan.problem.need_dx)
            saved[2 * i : 2 * i + 2] = (backward and col) or (None, None)
    return read, saved


def _backward_in_one_call(
    ctx: Any, saved: tuple[Tensor, ...], g: Tensor, g_z: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    (_, call, one), targets = ctx.how, ctx.grad_targets
    plan: LayerPlan = one.plan
    x, scale, *kept = saved
    columns, others, *weights = plan.as_saved(kept)
    made = found = None
    into: Sequence[Into | None] = NOWHERE
    if are_direct(g, *saved):
        if targets != NOWHERE:
            found, into = _targets(ctx)
        seeds: Any = plan.seeds and [
            linear_recipe.new_seed(g.device, plan.problem.formats.g_rule) for _ in range(plan.seeds)
        ]
        made = plan.backward(
            g, x, one.like[0], scale, (columns, others), weights, into, seeds, g_z is not None
        )
    if made is None:
        return _in_steps(ctx, (x, scale), (columns, others), weights, (g, g_z))
    dx, (d_weight, d_bias), dws, (db1, db2) = made
    tags, need = call.tags, one.need
    if tags[0] >= 0:
        for i, gemm, kernel in plan.ran:
            if into[i] is not LATER or gemm != WGRAD:
                LAST_RUN[tags[i] + gemm] = kernel
    if found is not None:
        waits = into[0] is LATER or into[1] is LATER  # `in` would compare tensors
        left = plan.saved(columns, others).inputs if waits else ()
        dws = [
            dw if target is None or dw is None
            else target.done(*use) if use is not None
            else _left(target, dw, left[i], ctx, i)  # type: ignore[arg-type]
            for i, (dw, target, use) in enumerate(zip(dws, targets, found, strict=True))
        ]  # fmt: skip
    if g_z is not None and one.keeps[0]:
        lies, step = plan.saved(columns, others), call.step._replace(zero_centered=False)
        norms = x, scale.float(), lies.mean, lies.rstd
        dx, d_weight, d_bias = step.backward(dx, g_z, norms, one.like, need, one.dtypes[0])
        d_weight = None if d_weight is None else d_weight.to(one.norm)
    elif d_weight is not None and not one.plain:
        d_weight = _as(d_weight, one.norm) if need[1] else None
        d_bias = _as(d_bias, one.dtypes[0]) if need[2] else None
        dx = dx if need[0] else None
    return dx, d_weight, d_bias, dws[0], db1, dws[1], db2


def _as(grad: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    """A gradient in the dtype of what it belongs to."""
    return grad if grad is None or grad.dtype is dtype else grad.to(dtype)


def _targets(ctx: Any) -> tuple[list[Any], list[Into | None]]:
    """Of both weights where the gradient goes: for `done`, and for the plan."""
    one, nodes = ctx.how[2], ctx.next_functions
    found: list[Any] = [None, None]
    into: list[Into | None] = [None, None]
    for i, (target, product) in enumerate(zip(ctx.grad_targets, one.plan.products, strict=False)):
        if target is not None and product.need_dw:
            found[i] = target.direct(nodes[one.edges[i]][0])
            into[i] = LATER if found[i] is None else found[i][0]
    return found, into


def _left(target: WeightGradient, g: Operand, x: Operand, ctx: Any, i: int) -> Tensor | None:
    """The gradient of a weight by the columns that were left of the output gradient."""
    _, call, one = ctx.how
    gradient = linear_recipe.Gradient(None, Quantized(None, g, None), Target("", "", ""))
    kept_x, tag = SavedOperand.operand(x), tag_of(call.tags[i], WGRAD)
    wgrad = linear_recipe.wgrad(gradient, kept_x, call.settings, tag)
    return place(target, wgrad, one.dtypes[1 + 2 * i], ctx.next_functions[one.edges[i]][0])


def _in_steps(
    ctx: Any, norms: tuple[Tensor, Tensor | None], buffers: tuple[Tensor, Tensor | None],
    weights: Sequence[Any], grads: tuple[Tensor, Tensor | None],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The same for somebody who watches the ops, or where native code does not take it."""
    (_, call, one), (x, scale) = ctx.how, norms
    plan, lies = one.plan, one.plan.saved(*buffers)
    ctx.call, ctx.dtypes, ctx.x_like = call, one.dtypes, one.like
    of_weights = [
        NOTHING if w is None and lie is None
        else SavedOperand.operand(lie) if lie is not None
        else SavedOperand.itself(w) if scales is None
        else SavedOperand.operand(plan.given_columns(i, (w, scales)))
        for i, (w, scales, lie) in enumerate(
            zip(weights[::2], weights[1::2], lies.weights, strict=False)
        )
    ]  # fmt: skip
    of_inputs = [NOTHING if at is None else SavedOperand.operand(at) for at in lies.inputs]
    kept = [of_inputs[0], of_weights[0], of_inputs[-1], of_weights[-1]]
    read = x, None if scale is None else scale.float(), lies.mean, lies.rstd
    step = call.step._replace(zero_centered=False)
    dx, d_weight, *others = _gradients(ctx, one.need, step, read, lies.h, kept, grads)
    d_weight = None if d_weight is None else d_weight.to(one.norm)
    return dx, d_weight, *others


def linear_in_one_call(
    x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, weights: Weights, call: Call,
    facts: Any = None,
) -> Tensor | None:  # fmt: skip
    """y [..., N] of a linear layer, differentiable; None where its steps run one by one. facts:
    what stands for those of the three tensors, if known."""
    parameters = Parameters(None, None, weight_NK, bias_N)
    one = _plan(x, parameters, weights, call, facts)
    if one is None or not has_memory(x):
        return None
    y: Tensor = _run((weights, call, one), x, None, None, weight_NK, bias_N)[0]
    return y


def run_layer(
    x: Tensor, parameters: Parameters, weights: Weights, call: Call,
    facts: Any = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(y [..., N] or [..., H], z [..., K] or None) of x [..., K] in MXFP8, differentiable."""
    made = None
    if torch.is_grad_enabled():
        one = _plan(x, parameters, weights, call, facts)
        if one is not None and has_memory(x):
            count = 4 if call.act is None else 6
            made = _run((weights, call, one), x, *parameters[:count])
        elif needs_gradient(x, *parameters):
            of_norm, (w1, b1, *second) = parameters[:2], parameters[2:]
            made = LayerFunction.apply(x, *of_norm, *second, weights, call, w1, b1)
    if made is not None:
        return made[0], made[1] if call.return_z else None
    norm_weight, norm_bias, w1, b1, w2, b2 = parameters
    settings, step = call.settings, call.step
    plan_z = sequence_parallel.plan_input(x, settings, False, False, call.tokens)
    row, _ = linear_recipe.weight_operands(weights.kept[0], w1, settings, False)
    bias, tag = b1, call.tags[0]
    if call.act is not None:
        w2_row, _ = linear_recipe.weight_operands(weights.kept[1], w2, settings, False)
    parts = step.forward(flatten(x), norm_weight, norm_bias, call.return_z, plan_z.target)
    q = sequence_parallel.rows_of_all(parts.quantized.row, call.tokens)
    if call.act is not None:
        plan_a = linear_recipe.plan_input(x.device, settings, False)
        _, _, qa = activated(q, row, b1, call, plan_a, False)
        q, row, bias, tag = _row(qa), w2_row, b2, call.tags[1]
    y_M = linear_recipe.fprop(q, row, bias, settings, step.dtype, tag)
    y = sequence_parallel.unflatten_all(y_M, x, call.tokens)
    return y, None if parts.z is None else shaped(parts.z, x.shape)


def run_block(
    x: Tensor, first: Sequence[Tensor | None], w2: Tensor, b2: Tensor | None, weights: Weights,
    call: Call,
) -> Tensor:  # fmt: skip
    """y [..., N] of x [..., H] through a block in MXFP8, differentiable; first: weight and bias of
    each part of w1."""
    if needs_gradient(x, w2, b2, *first):
        return LayerFunction.apply(x, None, None, w2, b2, weights, call, *first)[0]
    settings, dtype = call.settings, call.step.dtype
    plan = linear_recipe.plan_input(x.device, settings, False)
    parts: Any = first[::2]
    if len(parts) > 1 and not surely(x.numel() >= parts[0].numel()):
        qa = _activated_apart(x, parts, first[1::2], plan, call)
    else:
        q, w1_row, _ = _quantized(x, parts, plan, settings, False, weights.kept[0])
        _, _, qa = activated(_row(q), w1_row, weight_parts.joined(first[1::2]), call, plan, False)
        call.record(FPROP)
    w2_row, _ = linear_recipe.weight_operands(weights.kept[1], w2, settings, False)
    return unflatten(linear_recipe.fprop(_row(qa), w2_row, b2, settings, dtype, call.tags[-1]), x)


def _activated_apart(
    x: Tensor, parts: Sequence[Tensor], biases: Sequence[Tensor | None], plan: linear_recipe.Input,
    call: Call,
) -> Quantized:  # fmt: skip
    """a, quantized, of few tokens: what weights make is joined, not the weights."""
    settings, dtype, act = call.settings, call.step.dtype, call.act
    assert act is not None and call.block is not None
    q, made = linear_recipe.quantized_input(x, plan), []
    for i, (weight, bias) in enumerate(zip(parts, biases, strict=True)):
        kept = call.block.codes[i] if call.block.codes else None
        row, _ = linear_recipe.weight_operands(kept, weight, settings, False)
        made.append(linear_recipe.fprop(_row(q), row, bias, settings, dtype, call.tags[i]))
    step = ActStep(torch.cat(made, 1), None, act, dtype, False, plan.target)
    return act_quantize_2d(step).quantized
