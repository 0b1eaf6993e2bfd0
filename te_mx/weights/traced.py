"""te_mx::frozen_product: rows times a weight of a frozen module, in compiled code; and
te_mx::frozen_gemm: rows that are quantized already times one with a master.

Whether rows are few is decided when the op runs, so that a graph may be one of any number of rows.
Many rows are read quantized: once for all layers, in the op that made them where there is one.
Where a graph has few rows alone they are not quantized in it, and where it has many alone the
layers are the steps of eager code.

A graph knows tensors, neither modules nor what they keep. So the op is given what the module holds
(parameters, or codes and scales), and its result is a function of these and the other arguments.
When it runs it looks for the module that holds these very tensors; what that keeps of them, if they
have not changed, is used as in eager code: the same kernels, the same bits. Other tensors (of
functional_call, or changed by the graph itself) are quantized for the call.

Nothing that is kept is made while a CUDA graph is captured, or in the memory of one: torch.compile
runs a graph once before it captures it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_mx._ops import Epilogue, Operand, Target, capturing, checks, gemm_2d, held_as
from te_mx._ops.library import define
from te_mx._ops.linear import frozen_kernel
from te_mx._ops.quantize import rows_beyond_2d
from te_mx.autograd.activation import activation
from te_mx.autograd.grouped import GroupedCall, grouped_linear, grouped_on_codes
from te_mx.autograd.linear import Call, linear, linear_on_codes
from te_mx.autograd.linear_recipe import (
    GEMMS,
    QuantizedWeight,
    TracedWeight,
    mode_of,
    plain_spec,
    plan_input,
    plan_weight,
    quantized_input,
    serving,
    weight_operands,
)
from te_mx.autograd.node import needs_gradient, tag_of
from te_mx.autograd.saved import flatten, surely, unflatten
from te_mx.dispatch.calls import Groups
from te_mx.dispatch.fused import Activation
from te_mx.dispatch.problem import frozen_rows
from te_mx.layouts import ROWS, spec_of
from te_mx.recipes.settings import Settings, in_words, of_words
from te_mx.runtime import compiled
from te_mx.runtime.kernel_log import note_read
from te_mx.runtime.streams import apart
from te_mx.weights import decode, weight_only
from te_mx.weights.changes import owner_of

# The last two perhaps with the layout of the codes behind: "codes@rows".
MASTERS, CODES, AS_IS = "masters", "codes", "inputs as they are"


# ------------------------------------------------------------------------------------ while tracing
class Traced(NamedTuple):
    """What a DecodeCall is in eager code: the product of few rows and a weight of a module; or
    of any number of rows, where a graph has more numbers than that. most: of rows that are few."""

    module: Any
    key: str
    settings: Settings
    most: int
    any_number: bool

    @property
    def as_is(self) -> bool:
        """As of DecodeCall: AsIs stands around one of which the rows are not quantized."""
        return False

    def together(self, other: "Traced") -> "tuple[Traced, Traced]":
        """Products one behind the other, which eager code runs both in one way or the other."""
        most = min(self.most, other.most)
        any_number = self.any_number or other.any_number
        one, two = (each._replace(most=most, any_number=any_number) for each in (self, other))
        return one, two

    def target(self, device: torch.device) -> Target | None:
        """How what makes the rows quantizes them too, None where nobody would read that."""
        if not self.any_number or _is_as_is(self.module):
            return None
        return plan_input(device, self.settings, False).target

    def run(
        self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype, tag: int = -1,
        offs: Tensor | None = None, act: str | None = None, row: Operand | None = None,
    ) -> Tensor:  # fmt: skip
        """act(x [..., k] @ w^T + bias) [..., n]; offs: ends of groups; row: x quantized."""
        module, key, settings, most, any_number = self
        held, n = module._held_tensors(key), module._shape_of(key)[-2]
        words, target = in_words(settings), self.target(x.device)
        if target is not None and offs is None and row is None:
            row = rows_beyond_2d(flatten(x), most, target.row, rule=target.rule)
        codes, scales, spec = (None, None, "") if row is None else row[:3]
        return FROZEN_PRODUCT(
            x, codes, scales, spec, most if any_number else -1, held, bias, offs, key,
            _how(module, key), words, n, act or "", out_dtype,
        )  # fmt: skip


def ready(
    module: Any, key: str, x: Tensor, dtype: torch.dtype, settings: Settings,
    multiplies: bool = False,
) -> Traced | None:  # fmt: skip
    """What Dynamo traces of a product of as many rows as x has, in a dtype, with a weight of a
    frozen module; None where it is the steps: surely more rows than the kernel for few takes, or
    none, a weight that is computed or lent, torch.export. multiplies: only of a kernel that does
    not leave the product to the GEMM's. Nothing may need a gradient."""
    if not _holds(module, key):
        return None
    *groups, n, k = module._shape_of(key)
    fmt, lies = settings.w, "rows"
    if module._source.dropped:
        fmt, lies = module._source.settings.w, module._lies.get(key, ROWS.name)
    elif not groups:
        lies = plan_weight(x.device, settings, False).row.partition("@")[2]
    as_is = _is_as_is(module)
    specs = "" if as_is else f"{settings.x}@any", f"{fmt}@{'any' if lies == 'rows' else lies}"
    words = decode.ANY_RULE if as_is else settings.scale_rule, settings.precision
    sizes = groups[0] if groups else 0, n, k
    most = compiled.most_rows((dtype, x.device), sizes, specs, words, multiplies)
    size, limit = x.numel(), most * x.shape[-1]
    if not most or surely(size == 0) or surely(size > limit):
        return None
    return Traced(module, key, settings, most, not (surely(size > 0) and surely(size <= limit)))


def traced(
    module: Any, key: str, x: Tensor, bias: Tensor | None, settings: Settings,
    out_dtype: torch.dtype, offs: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """x [..., k] @ weight [n, k]^T + bias as Dynamo traces it, or None, as by `ready`. offs: ends
    of the groups of a weight [G, n, k]."""
    if needs_gradient(x, bias) or (x.dtype != out_dtype and not module._source.quantizes_inputs):
        return None  # such an input is rounded first
    found = ready(module, key, x, x.dtype, settings)
    return None if found is None else found.run(x, bias, out_dtype, offs=offs)


def many_rows(
    module: Any, key: str, x: Tensor, bias: Tensor | None, settings: Settings,
    out_dtype: torch.dtype,
) -> Tensor | None:  # fmt: skip
    """x [..., k] @ weight [n, k]^T + bias for any number of rows, on what is kept of a weight
    beside its master when the graph runs; None where `traced` would be for other reasons than
    rows. The input is quantized in the graph, once for all layers that read it."""
    if module._source.dropped or needs_gradient(x, bias) or not _holds(module, key):
        return None
    held, n, words = module._held_tensors(key), module._shape_of(key)[-2], in_words(settings)
    row = quantized_input(x, plan_input(x.device, settings, False)).row
    assert row is not None
    return unflatten(FROZEN_GEMM(*row[:5], held, bias, key, words, n, "", out_dtype), x)


def kept(module: Any, key: str, settings: Settings) -> QuantizedWeight | None:
    """As `operands` of the source, for products without gradients that Dynamo traces; None where
    `many_rows` would be."""
    if module._source.dropped or not _holds(module, key):
        return None
    held, n, words = module._held_tensors(key), module._shape_of(key)[-2], in_words(settings)

    def times(x: Operand, bias: "Tensor | None", gelu: str, dtype: torch.dtype) -> Tensor:
        return FROZEN_GEMM(*x[:5], held, bias, key, words, n, gelu, dtype)

    return QuantizedWeight(settings, TracedWeight(times), None)


def _holds(module: Any, key: str) -> bool:
    """Whether a graph may be given what a frozen module holds of a weight."""
    if module._tokens is not None or not module._reads_held:
        return False
    if module._local is not None or compiled.exporting():
        return False  # shards of one rank are new tensors each time
    held = module._held_tensors(key)
    return held is not None and not needs_gradient(*held)


# Not traced: Dynamo of torch 2.11 takes every is_exporting() that it meets for True.
@compiled.constant
def exporting() -> bool:
    return torch.compiler.is_exporting()


def _how(module: Any, key: str) -> str:
    """What the op is given of a weight of this module."""
    if not module._source.dropped:
        return MASTERS
    return f"{AS_IS if _is_as_is(module) else CODES}@{module._lies.get(key, ROWS.name)}"


def _is_as_is(module: Any) -> bool:
    return module._source.dropped and not module._source.quantizes_inputs


# A graph keeps the kernels that were there when it was made.
@compiled.constant
def most_rows(
    x: tuple[torch.dtype, torch.device], sizes: tuple[int, int, int], specs: tuple[str, str],
    how: tuple[str, str], multiplies: bool,
) -> int:  # fmt: skip
    """The most rows that a kernel takes; 0 where there is none."""
    dtype, device = x
    rows = frozen_rows(sizes[0], not specs[0] or spec_of(specs[1]).layout.any_rows)
    while rows:
        found = frozen_kernel((rows, dtype, device), sizes, specs, *how)
        if found is not None and (found[1].multiplies or not multiplies):
            return rows
        rows //= 2
    return 0


# --------------------------------------------------------------------------------------------- op
def _run(x: Tensor, *args: Any) -> Tensor:
    codes, scales, spec, most, weights, bias, offs, key, how, words, n, act, out_dtype = args
    settings, groups = of_words(words), 0 if offs is None else len(offs)
    how, _, lies = how.partition("@")
    _check(x, weights, bias, offs, how, n)
    held: Any = weights
    if how != MASTERS:
        shape = (n, x.shape[-1]) if offs is None else (groups, n, x.shape[-1])
        w_spec = f"{settings.w}@{lies}" if lies else plain_spec(settings.w)
        held = held_as(weights, w_spec, shape).checked("the weight")
    checks.float_dtype(out_dtype)
    owner, kept, tag = _known(weights, key, settings, x.device, how)
    rows = x.numel() // max(x.shape[-1], 1)
    few = most < 0 or 0 < rows <= most
    if few and owner is not None and (kept is not None or how != MASTERS):
        weight = owner._source.weight(owner, key, kept, (n, x.shape[-1]), groups)
        given = None if how == AS_IS else settings
        if not (capturing(x.device) or decode.has_form(weight)):
            apart(x.device, lambda: decode.ready(x, x.dtype, weight, given))
        found = decode.ready(x, x.dtype, weight, given)
        y = None if found is None else found.run(x, bias, out_dtype, tag, offs, act or None)
        if y is not None:
            return y
    if not few and codes is not None and scales is not None:
        row = Operand(codes, scales, spec, rows, x.shape[-1]).checked("the input")
        gelu = Activation(act).gelu_form if act else None
        epilogue = Epilogue(bias, gelu)
        made = _of_codes(row, held, epilogue, kept, settings, (how, n, out_dtype, tag))
        return unflatten(activation(made, Activation(act)) if act and not gelu else made, x)
    if offs is None:
        made = _dense(x, held, bias, kept, settings, (how, n, out_dtype, tag))
    else:
        made = _grouped(x, (held, bias, offs), kept, settings, (how, n, out_dtype, tag))
    if not act:
        return made
    return activation(flatten(made), Activation(act)).view_as(made)


def _check(
    x: Tensor, weights: list[Tensor], bias: Tensor | None, offs: Tensor | None, how: str,
    n: int,
) -> None:  # fmt: skip
    """Raise ValueError unless x [.., k], weights [n, k], of which there are some of codes only, or
    one for each group, and a bias [n] of each belong together."""
    if x.dim() == 0 or x.shape[-1] == 0 or how not in (MASTERS, CODES, AS_IS):
        raise ValueError(
            f"te_mx: needs x [.., k] and weights as {MASTERS!r}, {CODES!r} or {AS_IS!r}, got "
            f"{tuple(x.shape)} and {how!r}"
        )
    if offs is not None:
        checks.offsets(offs, x.device)
    groups = () if offs is None else (len(offs),)
    if bias is not None and bias.shape != (*groups, n):
        raise ValueError(f"te_mx: bias must be {[*groups, n]}, got {tuple(bias.shape)}")
    if how == MASTERS:
        _check_masters(weights, groups, n, x.shape[-1])
    elif not 2 <= len(weights) <= 4:
        raise ValueError(f"te_mx: a weight of codes is two to four tensors, got {len(weights)}")


def _check_masters(weights: list[Tensor], groups: tuple[int, ...], n: int, k: int) -> None:
    shapes = [tuple(weight.shape) for weight in weights]
    stacked = bool(groups) and len(shapes) == 1 and len(shapes[0]) == 3
    fits = all(len(shape) == 2 and shape[1] == k for shape in shapes)
    if groups:
        fits = fits and len(shapes) == groups[0] and all(shape[0] == n for shape in shapes)
    else:
        fits = fits and sum(shape[0] for shape in shapes) == n
    if not (shapes and fits) and not (stacked and shapes[0] == (*groups, n, k)):
        raise ValueError(f"te_mx: weights must make {[*groups, n, k]}, got {shapes}")


def _known(
    weights: list[Tensor], key: str, settings: Settings, device: torch.device, how: str = MASTERS
) -> tuple[Any, Any, int]:
    """The module that holds a weight, what it keeps of it beside a master, and where it records
    the kernel; (None, None, -1) where nobody holds these tensors."""
    for one in weights if how == MASTERS else weights[:1]:
        note_read(one)
    owner = owner_of(weights, key)
    if owner is None:
        return None, None, -1
    tag = tag_of(owner._tag_now(), len(GEMMS) * owner._weight_keys.index(key))
    return owner, _kept(owner, key, settings, device) if how == MASTERS else None, tag


def _kept(owner: Any, key: str, settings: Settings, device: torch.device) -> Any:
    """What is kept of a weight as it is now, perhaps made now; None where nothing may be."""
    source = owner._source
    found, _ = source.current(owner, key)
    stands = found is not None and found.serves(settings, device, False)
    if stands or capturing(device):
        return source.operands(owner, key, settings, None, device, False)
    return apart(device, lambda: source.operands(owner, key, settings, None, device, False))


def _dense(
    x: Tensor, held: Any, bias: Tensor | None, kept: Any, settings: Settings,
    rest: tuple[str, int, torch.dtype, int],
) -> Tensor:  # fmt: skip
    """The steps of te_mx.Linear. held: masters, or an Operand of codes."""
    how, _, dtype, tag = rest
    call = Call(settings, dtype, tag, kept)
    if how == MASTERS:
        return linear(x, _joined(held), bias, call)
    if how == AS_IS:
        return weight_only.linear(x, held, bias, dtype, tag)
    return linear_on_codes(x, serving(held, settings), bias, call)


def _of_codes(
    row: Operand, held: Any, epilogue: Epilogue, kept: Any, settings: Settings,
    rest: tuple[str, int, torch.dtype, int],
) -> Tensor:  # fmt: skip
    """[rows, n] of rows that are quantized."""
    how, _, dtype, tag = rest
    with torch.no_grad():
        if how == MASTERS:
            whole = None if kept is not None else _joined(held)
            w_row, _ = weight_operands(kept, whole, settings, False)
        else:
            w_row = serving(held, settings)
        return gemm_2d(
            row, w_row, epilogue, out_dtype=dtype, tag=tag, mode=mode_of(settings)
        ).out  # fmt: skip


def _grouped(
    x: Tensor, held: tuple[Any, Tensor | None, Tensor], kept: Any, settings: Settings,
    rest: tuple[str, int, torch.dtype, int],
) -> Tensor:  # fmt: skip
    """The steps of te_mx.GroupedLinear."""
    (weights, bias, offs), (how, _, dtype, tag) = held, rest
    call = GroupedCall(0, settings, dtype, bias is not None, kept, tag)
    if how == MASTERS:
        stacked = weights[0].dim() == 3
        biases: Any = () if bias is None else (bias,) if stacked else bias.unbind(0)
        return grouped_linear(x, offs, (*weights, *biases), call)
    if how == AS_IS:
        made = weight_only.grouped(flatten(x), Groups(offs), weights, bias, dtype, tag)
        return unflatten(made, x)
    return grouped_on_codes(x, offs, serving(weights, settings), bias, call)


def _joined(weights: list[Tensor]) -> Tensor:
    return weights[0] if len(weights) == 1 else torch.cat(weights)


def _fake(x: Tensor, *args: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], args[10]), dtype=args[12])


def _run_gemm(*args: Any) -> Tensor:
    codes, scales, spec, rows, k, weights, bias, key, words, n, gelu, out_dtype = args
    settings = of_words(words)
    _check_masters(weights, (), n, k)
    checks.float_dtype(out_dtype)
    _, kept, tag = _known(weights, key, settings, codes.device)
    row, epilogue = Operand(codes, scales, spec, rows, k), Epilogue(bias, gelu or None)
    return _of_codes(row, weights, epilogue, kept, settings, (MASTERS, n, out_dtype, tag))


def _fake_gemm(*args: Any) -> Tensor:
    return args[0].new_empty((args[3], args[9]), dtype=args[11])


FROZEN_GEMM = define(
    "frozen_gemm(Tensor codes, Tensor scales, str spec, SymInt rows, SymInt k, Tensor[] weights, "
    "Tensor? bias, str key, str settings, SymInt n, str gelu, ScalarType out_dtype) -> Tensor",
    _run_gemm,
    _fake_gemm,
)
FROZEN_PRODUCT = define(
    "frozen_product(Tensor x, Tensor? codes, Tensor? scales, str spec, int most, Tensor[] weights, "
    "Tensor? bias, Tensor? offs, str key, str how, str settings, SymInt n, str act, "
    "ScalarType out_dtype) -> Tensor",
    _run,
    _fake,
)
