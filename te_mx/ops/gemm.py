"""te_mx::gemm and te_mx::gemm_out: D[n, m] = epilogue(b[n, k] @ a[m, k]^T) on two quantized
operands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_mx.backends import cpu, cpu_memory, reference, sm90, sm90_exact, sm90_layout
from te_mx.backends.base import BIAS_GRADS, GELUS, Epilogue, GemmParts, Operand
from te_mx.engine import envelopes, split_k, workspace
from te_mx.engine.explain import LAST_RUN, warn_fallback
from te_mx.engine.written import check_apart
from te_mx.ops.checks import checked, one_device, writable
from te_mx.ops.library import define, is_direct


class Mode(NamedTuple):
    """How a GPU without block-scaled tensor cores multiplies: "adaptive" or "exact", and the
    alignment spread of the first; whether it may cut K into parts. CPUs are always exact and never
    cut."""

    precision: str = "adaptive"
    spread: int = sm90_layout.DEFAULT_SPREAD
    split_k: bool = False


_DEFAULT_MODE = Mode()


def gemm_2d(
    a: Operand,
    b: Operand,
    *,
    bias: Tensor | None = None,
    gelu: str | None = None,
    gelu_in: Tensor | None = None,
    bias_grad: str | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype,
    aux_dtype: torch.dtype | None = None,
    want_aux: bool = True,
    accumulate: bool = False,
    tag: int = -1,
    mode: Mode = _DEFAULT_MODE,
) -> GemmParts:
    """D[n, m] = epilogue(b @ a^T). Products are exact, sums are fp32; see Epilogue for the order of
    the rest.

    Args:
        a: logical [m, k]; TE's A.
        b: logical [n, k]; TE's B.
        bias: [m], added before GELU.
        gelu: "tanh" or "erf": apply it and return aux, the value before it; with gelu_in, the form
            whose derivative multiplies D.
        gelu_in: [n, m], the value before GELU.
        bias_grad: "operand": sum of b over k, fp32 [n]; "result": sum of D over its rows, fp32 [m].
        out: [n, m] contiguous, written in place; its dtype then replaces out_dtype.
        out_dtype: fp32, bf16 or fp16.
        aux_dtype: dtype of aux, that of out by default.
        want_aux: False when nobody needs aux, as without a backward pass: it is not written.
        accumulate: add to out.
        tag: when 0 or more, the name of the kernel that ran is kept in `explain.LAST_RUN[tag]`.
        mode: precision, alignment spread and whether K may be cut, on GPUs.
    """
    if is_direct(b.codes, bias, gelu_in, out):
        epilogue = Epilogue(bias, gelu, gelu_in, bias_grad, accumulate)
        on_cpu = b.codes.is_cpu
        if out is None and on_cpu:
            out = cpu_memory.empty((b.rows, a.rows), out_dtype)
        elif out is None:
            out = torch.empty((b.rows, a.rows), dtype=out_dtype, device=b.codes.device)
        run = _on_cpu if on_cpu else _on_cuda
        kept = (aux_dtype or out.dtype) if want_aux else None
        return run(a, b, epilogue, out, kept, tag, mode)
    sides = (
        a.codes, a.scales, a.packed, a.fmt, a.order, b.codes, b.scales, b.packed, b.fmt, b.order
    )  # fmt: skip
    rest = (bias, gelu or "", gelu_in, bias_grad or "", *mode)
    kept = (aux_dtype or (out_dtype if out is None else out.dtype)) if want_aux else None
    if out is None:
        out, aux, sums = _OP(*sides, *rest, out_dtype, kept, tag)
    else:
        writable(out)
        aux, sums = _OP_OUT(*sides, *rest, out, accumulate, kept, tag)
    has_aux = want_aux and gelu is not None and gelu_in is None
    return GemmParts(out, aux if has_aux else None, sums if bias_grad else None)


def _aux(
    epilogue: Epilogue, out: Tensor, aux_dtype: torch.dtype | None,
    empty_like: Callable[..., Tensor] = torch.empty_like,
) -> Tensor | None:  # fmt: skip
    """Room for the value before GELU; None where there is none, or without a dtype: nobody needs
    it."""
    if epilogue.gelu is None or epilogue.gelu_in is not None or aux_dtype is None:
        return None
    return empty_like(out, dtype=aux_dtype)


def _on_cpu(
    a: Operand, b: Operand, epilogue: Epilogue, out: Tensor, aux_dtype: torch.dtype | None,
    tag: int, mode: Mode,
) -> GemmParts:  # fmt: skip
    a, b = checked(a, "a"), checked(b, "b")
    n, m, k = b.rows, a.rows, a.k
    _check_rest(a, b, n, m, k, epilogue, out)
    aux = _aux(epilogue, out, aux_dtype, cpu_memory.empty_like)
    packed = "sm90" in (a.order, b.order)  # only tests and tools multiply those on a CPU
    ran = envelopes.REFERENCE if packed else envelopes.select("cpu", n, m, k)
    bias_grad = None
    if ran not in (envelopes.REFERENCE, envelopes.ZERO_SIZE):
        call = cpu.GemmCall(ran, a, b, epilogue, out, aux)
        nbytes = call.workspace_bytes()
        scratch = workspace.acquire(_CPU, nbytes)
        ran = call.run(scratch, nbytes) or envelopes.REFERENCE
        workspace.release(scratch, nbytes)
        bias_grad = call.bias_grad
    if ran in (envelopes.REFERENCE, envelopes.ZERO_SIZE):
        if ran == envelopes.REFERENCE and not packed:
            why = cpu.missing_reason() or "the native code does not take this problem"
            warn_fallback("gemm on the CPU", why)
        bias_grad = reference.gemm(a, b, epilogue, out, aux)
    elif not out.is_inference():
        torch.autograd.graph.increment_version(out)  # native code wrote behind autograd's back
    if tag >= 0:
        LAST_RUN[tag] = ran
    return GemmParts(out, aux, bias_grad)


def _on_cuda(
    a: Operand, b: Operand, epilogue: Epilogue, out: Tensor, aux_dtype: torch.dtype | None,
    tag: int, mode: Mode,
) -> GemmParts:  # fmt: skip
    a, b = checked(a, "a"), checked(b, "b")
    n, m, k = b.rows, a.rows, a.k
    _check_rest(a, b, n, m, k, epilogue, out)
    aux = _aux(epilogue, out, aux_dtype)
    device = out.device
    ran = envelopes.select_gpu(device.index, n, m, k, mode.precision)
    held: list[tuple[Tensor | None, int]] = []

    def scratch(nbytes: int) -> Tensor | None:
        held.append((workspace.acquire(device, nbytes), nbytes))
        return held[-1][0]

    bias_grad = None
    if ran == sm90.ADAPTIVE:
        parts = split_k.parts(device.index, n, m, k) if mode.split_k else 1
        done, bias_grad = sm90.gemm(a, b, epilogue, out, aux, mode.spread, scratch, parts)
        if not done:
            ran = envelopes.REFERENCE
        elif epilogue.bias_grad == "operand":
            bias_grad = sm90.operand_sums(b, scratch)
    elif ran == sm90.EXACT:
        if "sm90" in (a.order, b.order):
            raise ValueError(
                "precision 'exact' needs plain operands, got one packed for 'adaptive'; quantize "
                "again with the recipe that runs now"
            )
        bias_grad = sm90_exact.gemm(a, b, epilogue, out, aux, scratch)
    for buffer, nbytes in held:
        workspace.release(buffer, nbytes)
    if ran in (envelopes.REFERENCE, envelopes.ZERO_SIZE):
        if ran == envelopes.REFERENCE:
            why = sm90.problem(device.index) or "the native code does not take this problem"
            warn_fallback(f"gemm on {device}", why)
        bias_grad = reference.gemm(a, b, epilogue, out, aux)
    elif not out.is_inference():
        torch.autograd.graph.increment_version(out)
    if tag >= 0:
        LAST_RUN[tag] = ran
    return GemmParts(out, aux, bias_grad)


def _on_other(
    a: Operand, b: Operand, epilogue: Epilogue, out: Tensor, aux_dtype: torch.dtype | None,
    tag: int, mode: Mode,
) -> GemmParts:  # fmt: skip
    a, b = checked(a, "a"), checked(b, "b")
    _check_rest(a, b, b.rows, a.rows, a.k, epilogue, out)
    aux = _aux(epilogue, out, aux_dtype)
    bias_grad = reference.gemm(a, b, epilogue, out, aux)
    if tag >= 0:
        LAST_RUN[tag] = envelopes.REFERENCE
    return GemmParts(out, aux, bias_grad)


# -------------------------------------------------------------------------- checks before addresses
_BESIDE_B = ("a", "the packed form of a", "the packed form of b", "bias", "gelu_in", "out")
_GELUS, _BIAS_GRADS = (None, *GELUS), (None, *BIAS_GRADS)


def _check_rest(
    a: Operand, b: Operand, n: int, m: int, k: int, epilogue: Epilogue, out: Tensor
) -> None:
    bias, gelu, gelu_in, bias_grad, _ = epilogue
    device = b.codes.device
    if (
        a.codes.device != device
        or out.device != device
        or (bias is not None and bias.device != device)
        or (gelu_in is not None and gelu_in.device != device)
        or (a.packed is not None and a.packed.device != device)
        or (b.packed is not None and b.packed.device != device)
    ):
        one_device(device, _BESIDE_B, (a.codes, a.packed, b.packed, bias, gelu_in, out))
    if k != b.k:
        raise ValueError(f"a and b must have the same k, got {k} and {b.k}")
    if gelu not in _GELUS or bias_grad not in _BIAS_GRADS:
        raise ValueError(
            f"gelu must be one of {_GELUS} and bias_grad one of {_BIAS_GRADS}, got {gelu!r} and "
            f"{bias_grad!r}"
        )
    if out.shape != (n, m) or not out.is_contiguous():
        raise ValueError(f"out must be contiguous [{n}, {m}], got {tuple(out.shape)}")
    if bias is not None and bias.shape != (m,):
        raise ValueError(f"bias must be [{m}], got {tuple(bias.shape)}")
    if gelu_in is not None and gelu_in.shape != (n, m):
        raise ValueError(f"gelu_in must be [{n}, {m}], got {tuple(gelu_in.shape)}")


# ---------------------------------------------------------------------------------------------- ops
_CPU = torch.device("cpu")
_SIDES = (
    "Tensor a_codes, Tensor a_scales, Tensor? a_packed, str a_fmt, str a_order, "
    "Tensor b_codes, Tensor b_scales, Tensor? b_packed, str b_fmt, str b_order, "
    "Tensor? bias, str gelu, Tensor? gelu_in, str bias_grad, "
    "str precision, int spread, bool split_k"
)


def _make_ops(run: Callable[..., GemmParts]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Implementations of gemm and gemm_out around _on_cpu, _on_cuda, _on_other or _on_fake."""

    def gemm(*args: Any) -> tuple[Tensor, ...]:
        a, b, epilogue, mode = _read(args)
        out_dtype, aux_dtype, tag = args[17:]
        out = b.codes.new_empty((b.rows, a.rows), dtype=out_dtype)
        return (out, *_present(run(a, b, epilogue, out, aux_dtype, tag, mode)))

    def gemm_out(*args: Any) -> tuple[Tensor, ...]:
        a, b, epilogue, mode = _read(args)
        out, accumulate, aux_dtype, tag = args[17:]
        epilogue = epilogue._replace(accumulate=accumulate)
        if run is not _on_fake:  # te_mx.gemm cannot see addresses in code that is being compiled
            check_apart(out, "out", (("bias", epilogue.bias), ("gelu_in", epilogue.gelu_in)))
        return _present(run(a, b, epilogue, out, aux_dtype, tag, mode))

    return gemm, gemm_out


def _read(args: tuple[Any, ...]) -> tuple[Operand, Operand, Epilogue, Mode]:
    """Operands, epilogue and mode of the arguments that both schemas start with."""
    a_codes, a_scales, a_packed, a_fmt, a_order = args[:5]
    b_codes, b_scales, b_packed, b_fmt, b_order = args[5:10]
    bias, gelu, gelu_in, bias_grad = args[10:14]
    a = Operand(a_codes, a_scales, a_fmt, a_order, a_packed)
    b = Operand(b_codes, b_scales, b_fmt, b_order, b_packed)
    epilogue = Epilogue(bias, gelu or None, gelu_in, bias_grad or None)
    return a, b, epilogue, Mode(*args[14:17])


def _present(parts: GemmParts) -> tuple[Tensor, ...]:
    """aux and bias_grad, empty where they are None: an op that writes in place returns no lists."""
    return tuple(parts.out.new_empty(0) if part is None else part for part in parts[1:])


def _on_fake(
    a: Operand, b: Operand, epilogue: Epilogue, out: Tensor, aux_dtype: torch.dtype | None,
    tag: int, mode: Mode,
) -> GemmParts:  # fmt: skip
    device = b.codes.device
    one_device(device, ("the scales of a", "the scales of b"), (a.scales, b.scales))
    beside = a.codes, a.packed, b.packed, epilogue.bias, epilogue.gelu_in, out
    one_device(device, _BESIDE_B, beside)
    bias_grad = None
    if epilogue.bias_grad is not None:
        size = b.rows if epilogue.bias_grad == "operand" else a.rows
        bias_grad = out.new_empty(size, dtype=torch.float32)
    return GemmParts(out, _aux(epilogue, out, aux_dtype), bias_grad)


_gemm_cpu, _gemm_out_cpu = _make_ops(_on_cpu)
_gemm_cuda, _gemm_out_cuda = _make_ops(_on_cuda)
_gemm_other, _gemm_out_other = _make_ops(_on_other)
_gemm_fake, _gemm_out_fake = _make_ops(_on_fake)

_OP = define(
    f"gemm({_SIDES}, ScalarType out_dtype, ScalarType? aux_dtype, int tag)"
    " -> (Tensor, Tensor, Tensor)",
    cpu=_gemm_cpu,
    cuda=_gemm_cuda,
    other=_gemm_other,
    fake=_gemm_fake,
)
_OP_OUT = define(
    f"gemm_out({_SIDES}, Tensor(a!) out, bool accumulate, ScalarType? aux_dtype, int tag)"
    " -> (Tensor, Tensor)",
    cpu=_gemm_out_cpu,
    cuda=_gemm_out_cuda,
    other=_gemm_out_other,
    fake=_gemm_out_fake,
)
