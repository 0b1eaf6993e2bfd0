"""Private ops and functions of native modules with sizes, tensors and words that do not fit: what a
process does that may end. test_private_calls.py runs it.

    python private_calls.py ops|MODULE LOG FIRST     from the case of this number on

Tensors end where a page begins that nobody may touch, so a read past one ends the process, as one
that it gets away with elsewhere would some day. LOG holds the case that runs now.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import mmap
import resource
import signal
import sys
from collections.abc import Iterator
from typing import Any

import torch

import te_mx
from te_mx._ops import Operand, Stack
from te_mx._ops.gemm import kept_form
from te_mx._ops.grouped_gemm import kept_stack
from te_mx._ops.settled import settled
from te_mx.dispatch.calls import Mode
from te_mx.recipes.settings import in_words

OPS = torch.ops.te_mx
R8, C8, G8, R4, C4 = (
    f"{fmt}@{lies}"
    for fmt, lies in (
        ("mxfp8_e4m3", "rows"), ("mxfp8_e4m3", "cols"), ("mxfp8_e4m3", "grouped_cols"),
        ("mxfp4", "rows"), ("mxfp4", "cols"),
    )
)  # fmt: skip
F32, BF16 = torch.float32, torch.bfloat16
NUMBERS = (0, -1, 1, 3, 2**31 - 1, 2**31, 2**62, 2**63 - 1, -(2**31), -(2**62))
WORDS = (
    "", "nonsense", R8, C8, R4, C4, G8, "mxfp8_e4m3@sm90:8", "mxfp8_e4m3@any",
    "fp8_e4m3_1x128@rows", "fp8_e4m3_128x128@rows", "mxfp6_e3m2@rows", "rceil+sr", "pow2",
)  # fmt: skip
SECONDS = 20  # of one call
held: list[Any] = []  # modules and memory of the calls


def op_calls() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """A good call of every op, of some several."""
    torch.manual_seed(0)
    x, y, seed = torch.randn(24, 64), torch.randn(40, 64), torch.tensor([3])
    q = OPS.quantize(x, R8, C8, "rceil", False, F32)
    p = OPS.quantize(y, R8, C8, "rceil", False, F32)
    q4 = OPS.quantize(x, R4, C4, "rceil", False, F32)
    yield "quantize", (x, R8, C8, "rceil", True, F32, None)
    yield "quantize", (x, R4, C4, "rceil+sr", False, F32, seed)
    for spec, to, codes, sizes in (
        (R8, C8, q[:2], (24, 64)), (C8, R8, q[2:], (64, 24)), (R4, C4, q4[:2], (24, 64)),
    ):  # fmt: skip
        yield "dequantize", (*codes, spec, *sizes, BF16)
        yield "convert", (*codes, spec, *sizes, to)
    for most in (4, 100):
        yield "quantize_beyond", (x, most, R8, "rceil")
    yield "quantize_joined", ([x, y], R8, C8, "rceil")
    yield "stored", (x,)

    lhs, rhs = (q[0], q[1], None, R8, 24, 64), (p[0], p[1], None, R8, 40, 64)
    mode, bias = ("adaptive", 8, False), torch.randn(40)
    yield "gemm", (*lhs, *rhs, bias, "tanh", None, "", *mode, F32, F32, -1)
    few = (q[0][:4].contiguous(), q[1][:4].contiguous(), None, R8, 4, 64)
    yield "gemm", (*few, *rhs, None, "", None, "operand", *mode, BF16, None, -1)
    packed = kept_form(Operand(p[0], p[1], R8, 40, 64), "rhs", Mode()).packed
    gelu_in = torch.randn(24, 40)
    ready = *lhs, p[0], p[1], packed, R8, 40, 64
    yield "gemm", (*ready, None, "erf", gelu_in, "result", *mode, F32, None, -1)
    out = torch.zeros(24, 40)
    yield "gemm_out", (*lhs, *rhs, bias, "", None, "", *mode, out, True, F32, -1)

    offs, ws = torch.tensor([10, 10, 24]), [torch.randn(40, 64) for _ in range(3)]
    yield "quantize_grouped", (x, offs, 0, R8, G8, "rceil", True, None)
    g = OPS.quantize_grouped(x, offs, 0, R8, G8, "rceil", False, None)
    yield "quantize_weights", (ws, R8, C8, "rceil")
    w, w4 = (OPS.quantize_weights(ws, spec, "", "rceil") for spec in (R8, R4))
    yield "columns_of_weights", (*w, R8, 40, 64, C8, "rceil")
    yield "columns_of_weights", (*w4, R4, 40, 64, C4, "rceil")
    still = settled(Stack(*w, R8, 3, 40, 64))
    yield "plain_rows", (still.codes, still.scales, still.packed, still.spec, 3, 40, 64)
    yield "plain_rows", (*w4, None, R4, 3, 40, 64)
    stack = kept_stack(Stack(*w, R8, 3, 40, 64), Mode()).packed
    for given in (None, stack):
        sides = g[0], g[1], R8, 24, 64, *w, given, R8, 3, 40
        yield "gemm_rows", (*sides, offs, 0, torch.randn(3, 40), F32, -1, "adaptive", 8)
    sides = g[2], g[3], G8, 64, g[2].clone(), g[3].clone(), G8, 64, 24
    yield "gemm_k", (*sides, offs, 0, torch.zeros(3, 64, 64), True, -1, "adaptive", 8)
    ids = torch.tensor([0, 1, 2, 0, 1, 2, 2, 1] * 3, dtype=torch.int32)
    yield "moe_align", (ids, 8, 3, torch.tensor([0, 1, 2], dtype=torch.int32))
    sorted_ids, experts, count = OPS.moe_align(ids, 8, 3, None)
    for given in (sorted_ids, None):
        sides = q[0], q[1], R8, 24, 64, *w, stack, R8, 3, 40, given, experts, count, 8, 1, 1
        rest = torch.randn(3, 40), torch.rand(24), torch.zeros(24, 40), -1, "adaptive", 8
        yield "moe_gemm", (*sides, *rest)

    scale, shift, mean, rstd = torch.randn(64), torch.randn(64), torch.randn(24), torch.rand(24)
    target = R8, C8, "rceil", True, None
    yield "norm_quantize", (x, scale, shift, "LayerNorm", 1e-5, BF16, True, *target)
    yield "norm_backward", (x.clone(), x, scale, mean, rstd, BF16)
    yield "act_quantize", (x, None, "gelu", 0.0, 0.0, 0.0, BF16, True, *target)
    half = torch.randn(24, 32)
    yield "act_quantize", (x, half, "swiglu", 0.0, 0.0, 0.0, F32, False, *target)
    target = R8, G8, "rceil", True, None
    yield "act_quantize_grouped", (x, half, "swiglu", 0.0, 0.0, 0.0, F32, offs, 0, *target)

    words = in_words(te_mx.recipe.MXFP8BlockScaling().settings)
    masters, codes = (te_mx.Linear(64, 40, dtype=BF16) for _ in range(2))
    te_mx.freeze_weights(masters)
    te_mx.freeze_weights(codes, drop_master=True)
    held.extend((masters, codes))
    given = [masters.weight.detach()], masters.bias.detach(), "weight", words, 40, "", BF16
    yield "frozen_gemm", (q[0], q[1], R8, 24, 64, *given)
    rest = codes.bias.detach(), None, "weight", "codes", words, 40, "", BF16
    tensors = codes._held_tensors("weight")
    yield "frozen_product", (x[:3].to(BF16), None, None, "", -1, tensors, *rest)
    yield "frozen_product", (x.to(BF16), q[0].clone(), q[1].clone(), R8, 4, tensors, *rest)


def op_cases() -> Iterator[tuple[str, Any, list[Any]]]:
    """Each argument of each call as it may not be: (what it is, the op, its arguments)."""
    libc = ctypes.CDLL(None)
    for name, call in op_calls():
        op = getattr(OPS, name)
        # The modules of frozen weights are found by their own tensors.
        own = name.startswith("frozen")
        for i, argument in enumerate(call):
            for wrong in (argument, *misfits(argument)):
                given = [*call[:i], wrong, *call[i + 1 :]]
                if not own:
                    given = [guarded(libc, one) for one in given]
                yield f"{name}, argument {i}: {shown(wrong)}", op, given


def shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return str([shown(one) for one in value]) if isinstance(value, list) else repr(value)


def misfits(value: Any) -> Iterator[Any]:
    """What is not this value."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (*NUMBERS, value + 1, value - 1, 10 * value, value + 32, 1000 * value)
    elif isinstance(value, float):
        yield from (float("nan"), -1.0)
    elif isinstance(value, str):
        yield from WORDS
    elif isinstance(value, torch.dtype):
        yield from (torch.float64, torch.int8, torch.float32)
    elif isinstance(value, torch.Tensor):
        yield from other_tensors(value)
        yield None
    elif isinstance(value, list):
        yield from ([], value[:-1], value + value[:1])
        for other in other_tensors(value[-1]):
            yield [*value[:-1], other]
    elif value is None:
        yield from (torch.zeros(3), torch.zeros(24, 40), torch.zeros(80, dtype=torch.uint8))


def other_tensors(t: torch.Tensor) -> Iterator[torch.Tensor]:
    yield from (t.new_empty(0), t.new_zeros(()), t[None], t.flatten(), t.to("meta"))
    if t.dim():
        yield from (
            t[:-1],
            t[:1],
            t[..., :-1],
            t[..., :0],
            torch.cat([t, t]),
            t[:1].expand(t.shape),
        )
        yield t.as_strided((2**40, *t.shape[1:]), (0, *t.stride()[1:]))
    if t.dim() == 2:
        yield from (t.t(), t.t().contiguous())
    for dtype in (torch.int8, torch.float64, torch.bfloat16, torch.int64):
        if dtype != t.dtype:
            yield t.to(dtype)
    if not t.is_floating_point():
        yield from (
            torch.full_like(t, value) for value in (-1 if t.dtype != torch.uint8 else 255, 7)
        )


def guarded(libc: Any, value: Any) -> Any:
    """A tensor in memory that ends at a forbidden page, and begins on 64 bytes if it can."""
    if isinstance(value, list):
        return [guarded(libc, one) for one in value]
    if not isinstance(value, torch.Tensor) or not value.is_cpu or not value.is_contiguous():
        return value
    size = value.numel() * value.element_size()
    if not 0 < size < 1 << 20:
        return value
    page = mmap.PAGESIZE
    room = -(-size // page) * page
    memory = mmap.mmap(-1, room + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert libc.mprotect(ctypes.c_void_p(start + room), page, 0) == 0
    raw = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=room - size)
    made = raw.view(value.dtype).view(value.shape)
    made.copy_(value)
    held.append(memory)
    del held[2:-64]  # but the modules
    return made


# ----------------------------------------------------------------------------------- native modules
def native_cases(module: str) -> Iterator[tuple[str, Any, list[Any]]]:
    """Every function with numbers that it cannot mean. Records hold no address here: what lies at
    one nobody can check."""
    native = importlib.import_module(module)
    kinds = {name: kind for name, kind in vars(native).items() if isinstance(kind, type)}
    functions = {
        name: one for name, one in vars(native).items()
        if callable(one) and name not in kinds and not name.startswith("__")
    }  # fmt: skip
    for name, function in functions.items():
        signature = (function.__doc__ or "").partition("(")[2].partition(") ->")[0]
        places = [one.split("=")[0].strip() for one in signature.split(", ") if ":" in one]
        records = [place for place in places if place.endswith("record")]
        if not records:
            for i in range(len(places)):
                for number in NUMBERS:
                    given: list[Any] = [8] * len(places)
                    given[i] = number
                    yield f"{name}{tuple(given)}", function, given
            if not places:
                yield f"{name}()", function, []
            continue
        for kind in kinds.values():
            for record in records_of(kind):
                rest = [[] if "list" in p.lower() or "Seq" in p else 0 for p in places]
                yield (
                    f"{name}({record!r})",
                    function,
                    [
                        record if place in records else other
                        for place, other in zip(places, rest, strict=True)
                    ],
                )


def records_of(kind: Any) -> Iterator[Any]:
    """Empty records and such of 32 rows and columns, with one number that does not fit."""
    fields = [one for one in dir(kind()) if not one.startswith("_") and one != "copy"]
    numbers = [one for one in fields if type(getattr(kind(), one)) in (int, float)]
    sizes = {
        one: 32 for one in numbers
        if one.rpartition("_")[2] in ("rows", "cols", "k", "m", "n", "stride", "ldo", "count")
        and "block" not in one
    }  # fmt: skip
    for base in (kind(), kind().copy(**sizes)):
        yield base
        for field in numbers:
            if is_address(field):
                continue  # one that is not 0 is believed
            for number in (0, -1, 3, 2**31 - 1, 2**62, -(2**31), -(2**62)):
                with contextlib.suppress(OverflowError):
                    yield base.copy(**{field: number})


ADDRESSES = {
    "codes", "scales", "data", "packed", "out", "bias", "aux", "in", "grad", "sum", "ws", "seed",
    "mean", "rstd", "z", "weight", "counters", "dx", "dweight", "dbias", "partial", "sums", "x",
    "w", "y", "dw", "db", "starts", "ends", "ids", "padded", "weights", "map", "workspace",
    "stream", "gate", "residual",
}  # fmt: skip


def is_address(field: str) -> bool:
    return field == "first_rows" or field.rpartition("_")[2] in ADDRESSES


def run(what: str, log: str, first: int) -> None:
    with open("/proc/self/statm") as sizes:
        used = int(sizes.read().split()[0]) * mmap.PAGESIZE
    most = used + (2 << 30)  # what is too large is refused by the system, at once
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(2)
    with open(log, "w") as told:
        for number, (name, function, given) in enumerate(
            op_cases() if what == "ops" else native_cases(what)
        ):
            if number < first:
                continue
            told.seek(0)
            told.write(f"{number}\n{name}\n\n")
            told.flush()
            signal.alarm(SECONDS)
            with contextlib.suppress(Exception):
                function(*given)
        told.seek(0)
        told.write(f"{number}\nall\n\n")


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], int(sys.argv[3]))
