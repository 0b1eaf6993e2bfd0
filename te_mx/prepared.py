"""te_mx.gemm of two tensors that stand still: after a few calls of the same kind the kernel, its
native record and the packed operands are known, and a call looks only at what may have changed.

What may have changed: the codes (torch counts writes to them), the stream, a graph that is being
captured, and who watches the dispatcher. Then the long way is taken, which says what is wrong.
"""

from __future__ import annotations

from operator import is_not
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from te_mx._ops import Mode
from te_mx._ops.gemm import empty
from te_mx._ops.library import is_direct
from te_mx.autograd import transforms
from te_mx.dispatch.problem import Problem, place_of
from te_mx.dispatch.registry import PreparedGemm, derived, pick_problem
from te_mx.runtime import streams

if TYPE_CHECKING:
    from te_mx.tensor import MXTensor


class Call(NamedTuple):
    """What te_mx.gemm was asked for, beside its tensors: no epilogue, a new result."""

    layout: str
    out_dtype: torch.dtype
    precision: str
    spread: int
    split_k: bool


_TYPES = (str, torch.dtype, str, int, bool)
_DEFAULTS = (None, False, None, None, False, None)
_compiling = torch.compiler.is_dynamo_compiling


class _Plan(NamedTuple):
    device: torch.device
    shape: tuple[int, int]
    a_key: tuple[Any, ...]  # of MXTensor's packed forms
    b_key: tuple[Any, ...]
    run: PreparedGemm


def run(A: Any, B: Any, call: Call, out: Any, *rest: Any) -> Tensor | None:
    """The product, perhaps in `out`, or None where the long way is to be taken: with arguments of a
    wrong type too, which may be equal to right ones. rest: all that is to be at its default."""
    if (
        _compiling()
        # One by one: tensors and arrays do not compare to a bool, and 0 is equal to False.
        or any(map(is_not, rest, _DEFAULTS))
        or not (type(A) is type(B) and hasattr(A, "_packs"))
        or tuple(map(type, call)) != _TYPES
        or transforms.active()
    ):
        return None
    plan = derived().get((A.device, A._fmt, A._shape, B._fmt, B._shape, call))
    if plan is None or A._uncounted or B._uncounted or B.device != plan.device:
        return None
    device = plan.device
    stream = streams.current(device)
    a, b = A._packs.get((*plan.a_key, stream)), B._packs.get((*plan.b_key, stream))
    if a is None or b is None:
        return None
    (a_now, rhs), (b_now, lhs) = a, b
    if (
        rhs is None
        or lhs is None
        or a_now != A._versions(plan.a_key[0])
        or b_now != B._versions(plan.b_key[0])
        or not is_direct(lhs.codes, out)
        or streams.capturing(device)
    ):
        return None
    if out is None:
        out = empty(lhs.codes, plan.shape, call.out_dtype)
        return out if plan.run(lhs, rhs, out) else None
    if not _takes(out, plan, call, A, B) or not plan.run(lhs, rhs, out):
        return None
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)
    return out


def _takes(out: Tensor, plan: _Plan, call: Call, A: MXTensor, B: MXTensor) -> bool:
    """Whether a plain tensor can be written as te_mx.gemm promises, looking at no message."""
    if (
        out.layout is not torch.strided
        or out.is_nested
        or out.shape != plan.shape
        or out.dtype != call.out_dtype
        or out.device != plan.device
        or out.requires_grad
        or not out.is_contiguous()
    ):
        return False
    start = out.data_ptr()
    end = start + out.nbytes
    for tensor in (A, B):
        for part in tensor._parts():
            if part is not None:
                first = part.data_ptr()
                if first < end and start < first + part.nbytes:
                    return False
    return True


def remember(A: MXTensor, B: MXTensor, call: Call, usages: tuple[str, str]) -> None:
    """Prepare later calls of this kind, after one that ran on packed operands."""
    known, key = derived(), (A.device, A._fmt, A._shape, B._fmt, B._shape, call)
    if key in known:
        return
    a, b = A.operand(usages[0]), B.operand(usages[1])
    assert a is not None and b is not None
    device, mode = a.codes.device, Mode(call.precision, call.spread)
    problem = Problem(
        "gemm", place_of(device), b.spec, a.spec, b.rows, a.rows, a.k, precision=call.precision,
        dtype=call.out_dtype, spread=call.spread, split_k=call.split_k,
    )  # fmt: skip
    prepared = None if problem.empty else pick_problem(problem).prepared(problem)
    if prepared is not None and (device.type != "cuda" or device.index is not None):
        a_key, b_key = (usages[0], "rhs", mode), (usages[1], "lhs", mode)
        known[key] = _Plan(device, (b.rows, a.rows), a_key, b_key, prepared)
    else:
        known[key] = None
