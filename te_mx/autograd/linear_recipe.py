"""The steps of a linear layer: what is quantized to what, what backward keeps, and the three GEMMs.
The only place that reads a recipe, with grouped.py (tokens and weights of groups); the autograd
functions of all families are made of it.

Shapes: M tokens, N out_features, K in_features; x [M, K], w [N, K], g [M, N].

    fprop  y[M, N]  = x @ w^T + bias     on x and w rowwise
    dgrad  dx[M, K] = g @ w              on g rowwise, w columnwise
    wgrad  dw[N, K] = g^T @ x            on g and x columnwise

What is kept of x and of w, and so how wgrad and dgrad run:

==================  =====================  ===========================================
kept                its GEMM runs on       when
==================  =====================  ===========================================
columnwise codes    these codes            x: by default; w: keep_weight_columns
rowwise codes       columnwise codes made  w: one_copy_weights
                    of what they decode to
rowwise codes       what they decode to    backward_override "dequantized"
the tensor itself   columnwise codes of it w: by default; x: save_original_input
the tensor itself   the tensor itself      "high_precision"; x: wgrad_with_hp
==================  =====================  ===========================================

The steps of a weight that stands still: quantized once for several calls.

A weight that compiled code looks for when it runs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from te_mx import formats
from te_mx._ops import (
    Epilogue,
    GemmParts,
    Made,
    Mode,
    Operand,
    OperandLayouts,
    Quantize,
    Quantized,
    Stack,
    Target,
    convert_2d,
    dequantize_2d,
    gemm_2d,
    kept_form,
    operand_layouts,
    plain,
    quantize_2d,
    quantize_two_2d,
    quantized,
    turned,
)
from te_mx._ops.quantize import tensors_of
from te_mx.autograd import high_precision, input_cache
from te_mx.autograd.grad_target import INPUT, OUTPUT_GRADIENT, Reads, Wgrad
from te_mx.autograd.saved import NOTHING, SavedOperand, flatten, unflatten
from te_mx.dispatch.kernels import derive, derived
from te_mx.dispatch.linear import Weight as Parts
from te_mx.dispatch.problem import INVARIANT
from te_mx.formats.scaling import is_stochastic
from te_mx.layouts import ROWS, Layout, spec_of
from te_mx.recipes.settings import Settings
from te_mx.runtime import compiled
from te_mx.runtime.kernel_log import LAST_RUN
from te_mx.runtime.streams import current

_known = derived()
Weight = TypeVar("Weight", Operand, Stack, Operand | Stack)


class TracedWeight(NamedTuple):
    """In the place of a rowwise operand of a weight: `times` (x, bias, gelu, dtype) is the product,
    with GELU ("tanh" or "erf") inside unless that is "". There are no gradients."""

    times: Callable[[Operand, Tensor | None, str, torch.dtype], Tensor]


FPROP, DGRAD, WGRAD = 0, 1, 2
GEMMS = ("fprop", "dgrad", "wgrad")


def record(tag: int) -> None:
    """Note for te_mx.audit that a GEMM ran in high precision."""
    if tag >= 0:
        LAST_RUN[tag] = high_precision.HIGH_PRECISION


def mode_of(settings: Settings, backward: bool = False) -> Mode:
    """How the GEMMs multiply; those of gradients promise nothing of single rows."""
    precision = settings.backward_precision if backward else settings.precision
    return Mode(precision, settings.spread, settings.split_k)


class Roles(NamedTuple):
    """In which formats and layouts inputs, weights and output gradients are quantized, so that the
    kernels of a device take them as they are."""

    x: OperandLayouts
    w: OperandLayouts
    g: OperandLayouts


def roles(device: torch.device, settings: Settings, op: str = "gemm") -> Roles:
    """The forms of a layer's operands; `op` "gemm_rows" for the tokens of groups."""
    if torch.compiler.is_compiling():
        return _make_roles(device, settings, op)
    key = (device, settings, op)
    found = _known.get(key)
    if found is None:
        found = _make_roles(device, settings, op)
        if device.type != "cuda" or device.index is not None:
            _known[key] = found
    return found


def _make_roles(device: torch.device, settings: Settings, op: str) -> Roles:
    tracing = torch.compiler.is_compiling()  # when a constant takes the place of what is below
    specs = compiled.role_specs if tracing else role_specs
    x, x_col, w, w_col, g, g_col = specs(device, op, *settings).split(" ")
    return Roles(OperandLayouts(x, x_col), OperandLayouts(w, w_col), OperandLayouts(g, g_col))


@compiled.constant
def role_specs(device: torch.device, op: str, *fields: Any) -> str:
    """The specs of `roles`, of settings with these fields."""
    settings = Settings(*fields)
    x, w, g = settings.x, settings.w, settings.g
    x_col, w_col, g_col = settings.x_columns, settings.w_columns, settings.g_columns
    # What is multiplied with gradients lies as they do.
    rule, backward = settings.scale_rule, settings.gradient_rule

    precision = settings.backward_precision

    def row(fmt: str, other: str, right: bool = False) -> str:
        return operand_layouts(
            device, fmt, other, settings.precision, settings.spread, op, rule, right
        ).row

    def other(fmt: str, other: str, right: bool = False) -> OperandLayouts:
        return operand_layouts(device, fmt, other, precision, settings.spread, op, backward, right)

    # fprop is x @ w^T, dgrad g @ w, wgrad g^T @ x.
    inputs = row(x, w), other(x_col, g_col, right=True).col
    weights = row(w, x, right=True), other(w_col, g, right=True).col
    return " ".join((*inputs, *weights, other(g, w_col).row, other(g_col, x_col).col))


def needs_columns(settings: Settings, need_dx: bool) -> bool:
    """Whether dgrad reads a columnwise copy made of the weight itself: kept weights have one."""
    return need_dx and settings.backward is None and not settings.one_copy


def columns_now(weight: Tensor, settings: Settings, need_dx: bool) -> bool:
    """Whether forward makes that copy. By default backward does, of the weight: a parameter, or a
    view of one, is there anyway. What is computed of parameters would be kept for nothing else, and
    its codes are smaller."""
    if not need_dx or settings.backward is not None or settings.one_copy:  # needs_columns
        return False
    if settings.keep_columns:
        return True
    if torch.compiler.is_compiling() or weight.is_leaf:
        return False
    return weight._base is None or not weight._base.is_leaf


def same_weight(one: Settings, other: Settings) -> bool:
    """Whether a weight gets the same codes."""
    mine, theirs = ((s.w, s.w_columns, s.scale_rule, s.w_rule, s.one_copy) for s in (one, other))
    return mine == theirs


def by_steps(settings: Settings) -> bool:
    """Whether backward is GEMMs on operands quantized from what they are made of, and no other."""
    return settings.backward is None and not settings.wgrad_hp


def in_one_call(settings: Settings) -> bool:
    """Whether backward reads columnwise copies that forward made of both, and nothing else, and
    every role has one format."""
    return by_steps(settings) and not settings.one_copy and settings.is_uniform


def packs(settings: Settings) -> bool:
    """Whether a weight's rowwise copy may be packed: backward starts from plain codes otherwise,
    because packed ones do not decode to the same values."""
    return not settings.one_copy and settings.backward != "dequantized"


def plain_spec(fmt: str) -> str:
    """The spec of a copy whose bytes are kept as they are."""
    return f"{fmt}@rows"


def widens(spec: str) -> bool:
    """Whether codes of fewer than 8 bits take a byte each in a copy of this spec."""
    fmt, layout = spec_of(spec)
    return fmt.element.bits < 8 and layout is not ROWS


# ------------------------------------------------------------------------------------------- input
class Input(NamedTuple):
    """How the input of a linear step is quantized. `keep`: wgrad needs the input itself."""

    target: Target
    keep: bool

    def kept(self, q: Quantized, x_MK: Tensor | None, need_dw: bool) -> SavedOperand:
        """What wgrad needs; x_MK is the input itself, if that is kept."""
        if not need_dw:
            return NOTHING
        if self.keep:
            return SavedOperand.itself(x_MK)
        operand = q.col if q.col is not None else q.row
        assert operand is not None
        return SavedOperand.operand(operand)


def plan_input(
    device: torch.device, settings: Settings, need_dw: bool, save_x: bool = False
) -> Input:
    """The input of a linear step: rowwise for fprop, and what wgrad will need. save_x keeps the
    input instead of its columnwise codes, with the same result."""
    override = settings.backward
    form = roles(device, settings).x
    keep = need_dw and (
        override == "high_precision" or (override is None and (settings.wgrad_hp or save_x))
    )
    columns = need_dw and not keep and override is None
    row = plain_spec(settings.x) if override == "dequantized" else form.row
    return Input(Target(row, form.col if columns else "", settings.scale_rule), keep)


def quantized_input(x: Tensor, plan: Input) -> Quantized:
    """An input x [..., K] as planned, once for all layers that are known to read this tensor."""
    made = input_cache.find(x, plan.target)
    if made is None:
        made = quantized(flatten(x), plan.target)
        input_cache.put(x, plan.target, made)
    return made


# ------------------------------------------------------------------------------------------ weight
def plan_weight(device: torch.device, settings: Settings, columns: bool) -> Target:
    """The weight of a linear step: rowwise for fprop, and columnwise for dgrad."""
    form = roles(device, settings).w
    row = form.row if packs(settings) else plain_spec(settings.w)
    return Target(row, form.col if columns else "", settings.w_rule or settings.scale_rule)


def weight_operands(
    kept: "QuantizedWeight | None", weight_NK: Tensor | None, settings: Settings, need_dx: bool
) -> tuple[Operand, Operand | None]:
    """The operands of a weight for fprop and, where forward makes it, dgrad: kept ones, or made now
    in one read. A weight that is kept without its master is None."""
    if kept is not None:
        return serving(kept.row, settings) if kept.own else kept.row, kept.col
    assert weight_NK is not None
    columns = columns_now(weight_NK, settings, need_dx)
    q = quantized(weight_NK, plan_weight(weight_NK.device, settings, columns))
    assert q.row is not None
    return q.row, q.col


def input_and_weight(
    x: Tensor, plan: Input, kept: "QuantizedWeight | None", weight_NK: Tensor, settings: Settings,
    need_dx: bool,
) -> tuple[Quantized, Operand, Operand | None]:  # fmt: skip
    """x [..., K] and the weight quantized, at the same time where a kernel can."""
    made = None if kept is not None else input_cache.find(x, plan.target)
    if kept is not None or made is not None:
        made = made or quantized_input(x, plan)
        return made, *weight_operands(kept, weight_NK, settings, need_dx)
    row, col, rule = plan.target[:3]
    columns = columns_now(weight_NK, settings, need_dx)
    target = plan_weight(weight_NK.device, settings, columns)
    w, x_q = quantize_two_2d(
        Quantize(weight_NK, target.row, target.col, target.rule),
        Quantize(flatten(x), row, col, rule),
    )
    input_cache.put(x, plan.target, x_q)
    assert w.row is not None
    return x_q, w.row, w.col


def kept_for_dgrad(
    row: Operand, col: Operand | None, weight_NK: Tensor | None, settings: Settings, need_dx: bool
) -> SavedOperand:
    """What dgrad needs of a weight."""
    if not need_dx:
        return NOTHING
    if settings.backward == "high_precision":
        return SavedOperand.itself(weight_NK)
    if not packs(settings):
        return SavedOperand.operand(row)
    return SavedOperand.itself(weight_NK) if col is None else SavedOperand.operand(col)


def serving(held: Weight, settings: Settings) -> Weight:
    """A weight that lies once, as fprop with these settings reads it."""
    layout, device = held.layout, held.codes.device
    if layout is ROWS:
        return held
    op = "gemm_rows" if isinstance(held, Stack) else "gemm"
    wanted = roles(device, settings, op).w.row.partition("@")[2]
    grouped = isinstance(held, Stack)
    as_it_is = layout.replaces(held.format, wanted, settings.precision, grouped)
    return held if as_it_is or _stands_for(layout, wanted, settings) else plain(held)


def _stands_for(layout: Layout, wanted: str, settings: Settings) -> bool:
    """Whether products read a weight that is kept in a layout in the place of one in another: at
    precision "invariant" all read it as one without a master lies."""
    if settings.precision == INVARIANT and layout.reads_as:
        return wanted == ROWS.name
    return wanted == (layout.reads_as or layout.name)


def columns_of(row: Operand, settings: Settings) -> Operand:
    """The columnwise operand of a weight of which only rowwise codes are left: these codes
    where blocks are square, else what they decode to, quantized again."""
    row = plain(row)
    if row.format.is_square and row.format.name == settings.w_columns:
        return convert_2d(turned(row), roles(row.codes.device, settings).w.col)
    return quantized_columns(dequantize_2d(row, row.format.exact_dtype), "w", settings)


def _weight_columns(kept: SavedOperand, settings: Settings) -> Operand:
    """The columnwise operand of a weight that was kept, or that of what was."""
    if not kept.spec:
        return quantized_columns(kept.tensors[0], "w", settings)
    w = kept.as_operand()
    return columns_of(w, settings) if settings.one_copy else w


# ------------------------------------------------------------------------------------------- fprop
def fprop(
    x: Operand, w: Operand | TracedWeight, bias_N: Tensor | None, settings: Settings,
    dtype: torch.dtype, tag: int, like: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """y [M, N] = x @ w^T + bias; in the shape of a `like` [..., K] if there is one."""
    if isinstance(w, TracedWeight):
        y_MN = w.times(x, bias_N, "", dtype)
        return y_MN if like is None else unflatten(y_MN, like)
    shape = None if like is None else (*like.shape[:-1], w.rows)
    epilogue, mode = Epilogue(bias=bias_N), mode_of(settings)
    return gemm_2d(x, w, epilogue, out_dtype=dtype, tag=tag, mode=mode, shape=shape).out


# ------------------------------------------------------------------------------- gradients' operand
class Gradient(NamedTuple):
    """The output gradient of a linear step: itself and quantized, for some of its GEMMs."""

    g_MN: Tensor | None
    q: Quantized
    target: Target


def plan_gradient(
    device: torch.device, settings: Settings, need_dx: bool, need_dw: bool, need_db: bool
) -> tuple[Target, bool]:
    """What to quantize an output gradient to, and whether it is needed itself too."""
    form, rule = roles(device, settings).g, settings.gradient_rule
    rows = need_dx and settings.backward is None
    columns = need_dw and settings.backward is None and not settings.wgrad_hp
    if not (rows or columns):
        rule = settings.scale_rule  # nothing is rounded, and no seed drawn
    seed = new_seed(device, rule)
    target = Target(form.row if rows else "", form.col if columns else "", rule, need_db, seed)
    return target, rows != need_dx or columns != need_dw


def new_seed(device: torch.device, rule: str) -> Tensor | None:
    """A seed, int64 [1], from torch's default generator of a device, for rules that round
    stochastically; None for others. CUDA graphs draw anew at every replay."""
    if not is_stochastic(rule):
        return None
    return torch.randint(1 << 62, (1,), dtype=torch.int64, device=device)


def quantized_gradient(
    g_MN: Tensor, settings: Settings, need_dx: bool, need_dw: bool, need_db: bool,
    sum_dtype: torch.dtype = torch.float32,
) -> Gradient:  # fmt: skip
    """The output gradient that backward starts with; its sums over the tokens in sum_dtype."""
    target, _ = plan_gradient(g_MN.device, settings, need_dx, need_dw, need_db)
    if target.codes:
        row, col, rule, col_sum, seed = target
        q = quantize_2d(g_MN, row, col, rule=rule, col_sum=col_sum, sum_dtype=sum_dtype, seed=seed)
    else:
        q = quantized(g_MN, target)
    return Gradient(g_MN, q, target)


# ------------------------------------------------------------------------------------------- dgrad
def dgrad(
    gradient: Gradient, kept: SavedOperand, settings: Settings, dtype: torch.dtype, tag: int, *,
    gelu: str | None = None, gelu_in: Tensor | None = None, bias_grad: bool = False,
    add_to: Tensor | None = None,
) -> GemmParts:  # fmt: skip
    """dx [M, K] = g @ w; with gelu_in, times the derivative of GELU there, and perhaps its sums
    over M as the bias gradient. In high precision gelu_in is not taken. Written over add_to, and
    added to it, if that is given."""
    g_row = gradient.q.row
    if g_row is None:
        assert gradient.g_MN is not None and gelu_in is None
        w_NK = kept.values(gradient.g_MN.dtype)
        record(tag)
        dx_MK = high_precision.dgrad(gradient.g_MN, w_NK, dtype)
        return GemmParts(dx_MK if add_to is None else add_to.add_(dx_MK), None, None)
    w = _weight_columns(kept, settings)
    epilogue = Epilogue(
        None, gelu, gelu_in, "result" if bias_grad else None, accumulate=add_to is not None
    )
    return gemm_2d(
        g_row, w, epilogue, out=add_to, out_dtype=dtype, tag=tag,
        mode=mode_of(settings, backward=True),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------- wgrad
def wgrad(gradient: Gradient, kept: SavedOperand, settings: Settings, tag: int) -> Wgrad:
    """The GEMM dw [N, K] = g^T @ x, to be run now or later, into a place that is known then."""
    reads: Reads = tuple((INPUT, t) for t in kept.own)
    g_col, g_MN = gradient.q.col, gradient.g_MN
    if g_col is None:
        assert g_MN is not None

        def in_high_precision(out: "Tensor | None", dtype: torch.dtype, accumulate: bool) -> Tensor:
            record(tag)
            x_MK = flatten(kept.values(g_MN.dtype))
            return high_precision.wgrad(g_MN, x_MK, out, dtype, accumulate)

        return Wgrad(in_high_precision, (*reads, (OUTPUT_GRADIENT, g_MN)))

    def gemm(out: "Tensor | None", dtype: torch.dtype, accumulate: bool) -> Tensor:
        x_col = kept.as_operand() if kept.spec else quantized_columns(kept.tensor, "x", settings)
        return gemm_2d(
            g_col, x_col, Epilogue(accumulate=accumulate), out=out, out_dtype=dtype, tag=tag,
            mode=mode_of(settings, backward=True),
        ).out  # fmt: skip

    return Wgrad(gemm, reads)


def quantized_columns(t: Tensor | None, role: str, settings: Settings) -> Operand:
    """The columnwise operand of an input or a weight that was kept itself."""
    assert t is not None
    form: OperandLayouts = getattr(roles(t.device, settings), role)
    rule = settings.weight_columns_rule if role == "w" else settings.scale_rule
    made = quantize_2d(flatten(t), col=form.col, rule=rule).col
    assert made is not None
    return made


_WIDE = "mxfp8_e4m3"


def weight_layouts(device: torch.device, settings: Settings) -> OperandLayouts:
    """Specs of the weights of groups; kept bytes are packed when they are multiplied."""
    form = roles(device, settings).w
    if form.col == plain_spec(settings.w_columns):  # plain columns of all lie as the weights do
        form = form._replace(col=f"{settings.w_columns}@cols")
    return form if packs(settings) else form._replace(row=plain_spec(settings.w))


def at_most_codes(form: OperandLayouts, settings: Settings) -> OperandLayouts:
    """The same of weights that are kept, of which no copy is wider than its codes."""
    return form._replace(row=plain_spec(settings.w)) if widens(form.row) else form


class QuantizedWeight(NamedTuple):
    """A weight, or those of groups, quantized once for several calls: rowwise, and columnwise where
    backward needs it."""

    settings: Settings
    row: Any  # an Operand or a Stack; in compiled code perhaps a TracedWeight
    col: Any
    made: Made = Made(0, None)
    own: bool = False  # row lies for a kernel of any number of rows: others read it by rows

    def on_current_stream(self) -> "QuantizedWeight":
        """This weight, once the current stream has waited for it."""
        made, device = self.made, self.row.codes.device
        if made.event is not None and made.stream != current(device):
            operands = (self.row, self.col) if self.col is not None else (self.row,)
            tensors = tensors_of(*operands)
            made.await_on_current_stream(device, *tensors)
        return self

    def is_plain(self) -> bool:
        """Whether all operands give their bytes back."""
        return self.row.layout.exact and (self.col is None or self.col.layout.exact)

    def _is_as_asked(self, settings: Settings, device: torch.device) -> bool:
        """Whether a call would ask for operands that lie so."""
        if isinstance(self.row, Stack):
            row, col = at_most_codes(weight_layouts(device, settings), settings)
        else:
            row, col = roles(device, settings).w
        fmt, _, wanted = row.partition("@")
        lies = self.own or _stands_for(self.row.layout, wanted, settings)
        mine = self.row.format.name == fmt and lies
        return mine and (self.col is None or self.col.spec == col)

    def serves(self, settings: Settings, device: torch.device, need_dx: bool) -> bool:
        """Whether a call with these settings on this device would quantize to the same."""
        if self.row.codes.device != device:
            return False
        if torch.compiler.is_compiling():
            return self._serves(settings, device, need_dx)
        mine, row, col = self.settings, self.row, self.col
        # By the identities of settings, which live as long as the entry: a hash costs more.
        key = (
            "serves", type(row), row.spec, None if col is None else col.spec, id(mine),
            id(settings), device, need_dx,
        )  # fmt: skip
        found = _known.get(key)
        if found is None:
            found = derive(key, (self._serves(settings, device, need_dx), mine, settings))
        return found[0]

    def _serves(self, settings: Settings, device: torch.device, need_dx: bool) -> bool:
        groups = isinstance(self.row, Stack)
        return (
            (self.col is not None or not needs_columns(settings, need_dx))
            and same_weight(self.settings, settings)
            # Operands that give their bytes back serve every precision, and with every format.
            and (
                (not groups and self.is_plain())
                or ((groups or packs(settings)) and self._is_as_asked(settings, device))
            )
        )


def parts_of(kept: QuantizedWeight) -> Parts:
    """Its operands as whole layers in one call take them: of values, with the tensor scale in the
    place of scales."""
    row, col = [
        None if one is None
        else (one.codes, one.scales if one.tensor_scale is None else one.tensor_scale)
        for one in (kept.row, kept.col)
    ]  # fmt: skip
    assert row is not None
    return Parts(row, col)


def on_codes(settings: Settings) -> Settings:
    """The settings of a product with a weight of which only rowwise codes are left, for what
    follows its input back.

    dgrad starts from these codes, as under one_copy_weights. Where the recipe asks for the weight
    itself it gets the values of the codes, as in "dequantized". Columns of codes with fewer than 8
    bits are MXFP8, which holds the values of neighbouring rows as they are unless their scales lie
    more than 2^9 apart, while the codes' own format would round them once more. No other format
    holds those of NVFP4: dgrad runs on the values, as in "dequantized"."""
    w = formats.get(settings.w)
    keeps_values = settings.backward == "high_precision" or w.tensor_scaled
    backward, w_col = "dequantized" if keeps_values else settings.backward, settings.w_col
    if not w_col and w.element.bits < 8:
        w_col = _WIDE
    return settings._replace(one_copy=True, backward=backward, wgrad_hp=False, w_col=w_col)


def kept_weight(
    weight_NK: Tensor, settings: Settings, need_dx: bool, for_steps: bool = False
) -> QuantizedWeight:
    """Quantize a weight that stands still, packed unless plain codes are kept or are smaller.
    for_steps: of one training step, whose layers read packed ones without work."""
    # Made outside of inference_mode, because a training step may use it later.
    with torch.inference_mode(False), torch.no_grad():
        device = weight_NK.device
        target = plan_weight(device, settings, needs_columns(settings, need_dx))
        narrow = widens(target.row) and not for_steps
        if narrow:
            target = target._replace(row=plain_spec(settings.w))
        row, col, _ = quantized(weight_NK, target)
        assert row is not None
        if not packs(settings):
            return QuantizedWeight(settings, row, None, Made.now(device))
        mode, given = mode_of(settings), roles(device, settings)
        row = row if narrow else kept_form(row, "rhs", mode, given.x.row)
        if col is not None:
            col = kept_form(col, "rhs", mode_of(settings, backward=True), given.g.row)
    return QuantizedWeight(settings, row, col, Made.now(device))
