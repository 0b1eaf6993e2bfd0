"""te_mx::gemm and te_mx::gemm_out: D[m, n] = epilogue(lhs[m, k] @ rhs[n, k]^T) on two quantized
operands, and the forms that operands take which stand still."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from te_mx._ops import checks
from te_mx._ops.library import define, is_direct
from te_mx.dispatch import run
from te_mx.dispatch.calls import Epilogue, GemmParts, Mode
from te_mx.dispatch.problem import Problem, place_of
from te_mx.dispatch.registry import pick, pick_problem
from te_mx.layouts.operand import Operand
from te_mx.runtime import cpu_memory
from te_mx.runtime.arguments import check_apart
from te_mx.runtime.kernel_log import LAST_RUN, note_read, note_written

_DEFAULT_MODE = Mode()


def gemm_2d(
    lhs: Operand,
    rhs: Operand,
    epilogue: Epilogue = Epilogue(),  # noqa: B008 (it is immutable)
    *,
    out: Tensor | None = None,
    out_dtype: torch.dtype,
    aux_dtype: torch.dtype | None = None,
    want_aux: bool = True,
    tag: int = -1,
    mode: Mode = _DEFAULT_MODE,
    shape: Sequence[int] | None = None,
) -> GemmParts:
    """D[m, n] = epilogue(lhs @ rhs^T). Products are exact, sums are fp32; tensor scales (their
    product in fp32), where operands have them, multiply the sums before the epilogue.

    Args:
        lhs: logical [m, k]; Transformer Engine's B.
        rhs: logical [n, k]; Transformer Engine's A.
        epilogue: what happens to the sums. With gelu and no gelu_in, aux is the value before GELU.
        out: [m, n] contiguous, written in place; its dtype then replaces out_dtype.
        out_dtype: fp32, bf16 or fp16.
        aux_dtype: dtype of aux, that of out by default.
        want_aux: False when nobody needs aux, as without a backward pass: it is not written.
        tag: when 0 or more, the name of the kernel that ran is kept in `LAST_RUN[tag]`.
        mode: precision, alignment spread and whether K may be cut, on GPUs.
        shape: of a new D, in the place of [m, n].
    """
    bias, gelu, gelu_in, bias_grad, accumulate = epilogue
    if is_direct(lhs.codes, bias, gelu_in, out):
        made = None
        if shape is not None and out is None:
            # The result itself: a view that a Function returns cannot be changed in place.
            made = empty(lhs.codes, shape, out_dtype)
            out = made if len(shape) == 2 else made.view(lhs.rows, rhs.rows)
        given = out if made is None else None
        lhs, rhs, out, aux = _ready(lhs, rhs, epilogue, out, out_dtype, aux_dtype, want_aux)
        ran = run.gemm(lhs, rhs, epilogue, out, aux, mode)
        if given is not None:
            note_written(given)
        if tag >= 0:
            LAST_RUN[tag] = ran.name
        return GemmParts(out if made is None else made, aux, ran.bias_grad)
    sides, wholes = (*_flat(lhs), *_flat(rhs)), (lhs.tensor_scale, rhs.tensor_scale)
    rest = (bias, gelu or "", gelu_in, bias_grad or "", *mode)
    kept = (aux_dtype or (out_dtype if out is None else out.dtype)) if want_aux else None
    if out is None:
        out, aux, sums = GEMM(*sides, *rest, out_dtype, kept, tag, *wholes)
    else:
        checks.writable(out)
        aux, sums = GEMM_OUT(*sides, *rest, out, accumulate, kept, tag, *wholes)
    has_aux = want_aux and gelu is not None and gelu_in is None
    if shape is not None and len(shape) != 2:
        out = out.view(shape).detach()
    return GemmParts(out, aux if has_aux else None, sums if bias_grad else None)


def _flat(operand: Operand) -> tuple[Any, ...]:
    codes, scales, spec, rows, k, packed, _ = operand
    return codes, scales, packed, spec, rows, k


def _ready(
    lhs: Operand, rhs: Operand, epilogue: Epilogue, out: Tensor | None, out_dtype: torch.dtype,
    aux_dtype: torch.dtype | None, want_aux: bool,
) -> tuple[Operand, Operand, Tensor, Tensor | None]:  # fmt: skip
    """Operands, out and aux as kernels take them: checked, or allocated where none is given."""
    lhs, rhs = lhs.checked("lhs"), rhs.checked("rhs")
    checks.product(lhs, rhs, epilogue, out)
    if out is None:
        out = empty(lhs.codes, (lhs.rows, rhs.rows), out_dtype)
    aux = None
    if want_aux and epilogue.gelu is not None and epilogue.gelu_in is None:
        aux = empty(out, (lhs.rows, rhs.rows), aux_dtype or out.dtype)
    return lhs, rhs, out, aux


def empty(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A result of a GEMM where `like` is."""
    if like.is_cpu and type(like) is Tensor and not torch.compiler.is_compiling():
        return cpu_memory.empty(tuple(shape), dtype)
    return torch.empty(shape, dtype=dtype, device=like.device)


# ------------------------------------------------------------------------------ what stands still
def worth_packing(lhs: Operand, rhs: Operand, mode: Mode) -> bool:
    """Whether a product runs on a kernel that gains from operands packed before; 0 rows run on
    none, and formats without a native kernel on the reference."""
    m, n, k = lhs.rows, rhs.rows, lhs.k
    device, spread = lhs.codes.device, mode.spread
    if m == 0:
        return False
    kernel = pick(
        "gemm", device, lhs.spec, rhs.spec, (m, n, k), precision=mode.precision, spread=spread
    )
    return kernel.name != run.REFERENCE and kernel.prepares(m, n, k)


def kept_form(operand: Operand, side: str, mode: Mode, other: str = "") -> Operand:
    """An operand that is used more than once, in the form that its device's kernel for many rows
    reads without work: as it is where there is nothing to gain, and under torch.compile.

    side: "lhs" or "rhs", which it will be. other: the spec of what it is multiplied with; its own
    by default."""
    codes = operand.codes
    if torch.compiler.is_compiling() or codes.numel() == 0:
        return operand
    specs = operand.spec, other or operand.spec
    lhs, rhs = specs if side == "lhs" else specs[::-1]
    problem = Problem(
        "gemm", place_of(codes.device), lhs, rhs, 1 << 10, 1 << 10, max(operand.k, 1),
        precision=mode.precision, spread=mode.spread,
    )  # fmt: skip
    kernel = pick_problem(problem)
    with torch.inference_mode(False):  # it outlives the mode
        return kernel.prepare(operand, side, problem)


def standing_form(operand: Operand) -> Operand | None:
    """An operand in the form that the kernel for adaptive products of its format reads without
    work, on either side; None where that is as it is, as on CPUs."""
    codes, place = operand.codes, place_of(operand.codes.device)
    if place.device == "cpu" or codes.is_meta or codes.numel() == 0:
        return None
    form = kept_form(operand, "rhs", _DEFAULT_MODE)
    return None if form.codes is codes and form.spec == operand.spec else form


# ---------------------------------------------------------------------------------------------- ops
_SIDE = (
    "Tensor {0}_codes, Tensor {0}_scales, Tensor? {0}_packed, str {0}_spec, "
    "SymInt {0}_rows, SymInt {0}_k"
)
_SIDES = (
    f"{_SIDE.format('lhs')}, {_SIDE.format('rhs')}, Tensor? bias, str gelu, Tensor? gelu_in, "
    "str bias_grad, str precision, int spread, bool split_k"
)


_WHOLES = "Tensor? lhs_tensor_scale=None, Tensor? rhs_tensor_scale=None"


def _read(
    args: tuple[Any, ...], accumulate: bool, rest: int
) -> tuple[Operand, Operand, Epilogue, Mode]:
    """Operands, epilogue and mode of the arguments that both schemas start with; the tensor scales,
    if given, are behind so many."""
    wholes = (*args[rest:], None, None)
    sides = [
        Operand(codes, scales, spec, rows, k, packed, whole)
        for (codes, scales, packed, spec, rows, k), whole in zip(
            (args[:6], args[6:12]), wholes[:2], strict=True
        )
    ]
    bias, gelu, gelu_in, bias_grad = args[12:16]
    epilogue = Epilogue(bias, gelu or None, gelu_in, bias_grad or None, accumulate)
    return sides[0], sides[1], epilogue, Mode(*args[16:19])


def _present(parts: GemmParts) -> tuple[Tensor, Tensor]:
    """aux and bias_grad, empty where they are None: an op that writes in place returns no lists."""
    return tuple(parts.out.new_empty(0) if part is None else part for part in parts[1:])  # type: ignore[return-value]


def _run(
    lhs: Operand, rhs: Operand, epilogue: Epilogue, out: Tensor | None, out_dtype: torch.dtype,
    aux_dtype: torch.dtype | None, tag: int, mode: Mode,
) -> GemmParts:  # fmt: skip
    want_aux = aux_dtype is not None
    lhs, rhs, out, aux = _ready(lhs, rhs, epilogue, out, out_dtype, aux_dtype, want_aux)
    ran = run.gemm(lhs, rhs, epilogue, out, aux, mode)
    note_written(out)
    if tag >= 0:
        LAST_RUN[tag] = ran.name
    else:
        note_read(rhs.codes)
    return GemmParts(out, aux, ran.bias_grad)


def _gemm(*args: Any) -> tuple[Tensor, ...]:
    lhs, rhs, epilogue, mode = _read(args, False, 22)
    out_dtype, aux_dtype, tag = args[19:22]
    made = _run(lhs, rhs, epilogue, None, out_dtype, aux_dtype, tag, mode)
    return made.out, *_present(made)


def _gemm_out(*args: Any) -> tuple[Tensor, ...]:
    out, accumulate, aux_dtype, tag = args[19:23]
    lhs, rhs, epilogue, mode = _read(args, accumulate, 23)
    check_apart(out, "out", (("bias", epilogue.bias), ("gelu_in", epilogue.gelu_in)))
    return _present(_run(lhs, rhs, epilogue, out, out.dtype, aux_dtype, tag, mode))


def _fake(
    args: tuple[Any, ...], out: Tensor, aux_dtype: torch.dtype | None, rest: int
) -> tuple[Tensor, ...]:
    lhs, rhs, epilogue, _ = _read(args, False, rest)
    names = [
        f"the {what} of {side}" for side in ("lhs", "rhs") for what in ("scales", "tensor scale")
    ]
    beside = lhs.scales, lhs.tensor_scale, rhs.scales, rhs.tensor_scale
    checks.one_device(lhs.codes.device, names, beside)
    checks.product(lhs, rhs, epilogue, out)
    aux = bias_grad = None
    if epilogue.gelu is not None and epilogue.gelu_in is None and aux_dtype is not None:
        aux = torch.empty_like(out, dtype=aux_dtype)
    if epilogue.bias_grad is not None:
        size = lhs.rows if epilogue.bias_grad == "operand" else rhs.rows
        bias_grad = out.new_empty(size, dtype=torch.float32)
    return _present(GemmParts(out, aux, bias_grad))


def _gemm_fake(*args: Any) -> tuple[Tensor, ...]:
    out = args[0].new_empty((args[4], args[10]), dtype=args[19])
    return out, *_fake(args, out, args[20], 22)


def _gemm_out_fake(*args: Any) -> tuple[Tensor, ...]:
    return _fake(args, args[19], args[21], 23)


def _sizes(args: Any) -> tuple[int, int, int]:
    return args[4], args[10], args[5]


GEMM = define(
    f"gemm({_SIDES}, ScalarType out_dtype, ScalarType? aux_dtype, int tag, {_WHOLES})"
    " -> (Tensor, Tensor, Tensor)",
    _gemm,
    _gemm_fake,
    _sizes,
)
GEMM_OUT = define(
    f"gemm_out({_SIDES}, Tensor(a!) out, bool accumulate, ScalarType? aux_dtype, int tag, "
    f"{_WHOLES}) -> (Tensor, Tensor)",
    _gemm_out,
    _gemm_out_fake,
    _sizes,
)
