"""NVIDIA's instructions that kernels have in them, executed here: what Triton's interpreter does
not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

Words = "np.ndarray[tuple[int], np.dtype[np.uint32]]"


def run(text: str, outs: int, *given: Words) -> list[Words]:
    """What a text leaves in its first registers, $0 and on, of words in those behind them."""
    registers = {f"${i + outs}": one for i, one in enumerate(given)}
    lines = [line.split(None, 1) for line in re.split(r";|^ *{|} *$", text) if ".reg" not in line]
    for op, operands in filter(None, lines):
        to, *names = re.split(r",\s*(?![^{]*})", operands.strip())
        to = to.strip("{").split(",")[0]  # of two halves the lower one
        args = [registers[n] if n in registers else _number(n) for n in names]
        registers[to] = _made(op, *args)
    return [registers[f"${i}"] for i in range(outs)]


def _number(text: str) -> Words:
    if "." in text:
        return np.array([float(text)], np.float32).view(np.uint32)
    base = 16 if text[:2] == "0f" else 0
    return np.array([int(text.removeprefix("0f"), base)], np.uint32)


def _made(op: str, a: Words, *more: Words) -> Words:
    x, *others = (one.view(np.float32) for one in (a, *more))
    match op:
        case "mov.b32":
            return a
        case "shl.b32":
            return a << more[0]
        case "and.b32":
            return a & more[0]
        case "or.b32":
            return a | more[0]
        case "add.u32":
            return a + more[0]
        case "mad.lo.u32":
            return a * more[0] + more[1]
        case "min.s32":
            return np.minimum(a.view(np.int32), more[0].view(np.int32)).view(np.uint32)
        case "prmt.b32":
            return _picked(a, more[0], int(more[1][0]))
        case "abs.f32":
            return np.abs(x).view(np.uint32)
        case "min.f32":
            return np.fmin(x, others[0]).view(np.uint32)
        case "mul.rn.f32":
            return (x * others[0]).view(np.uint32)
        case "mul.rn.sat.f32":
            return np.fmax(np.clip(x * others[0], 0, 1), np.float32(0)).view(np.uint32)
        case "neg.f32":
            return (-x).view(np.uint32)
        case "rcp.approx.ftz.f32":  # which kernels mend
            return (np.float32(1) / x).view(np.uint32)
        case "max.u16x2":
            both = [np.ascontiguousarray(one).view(np.uint16) for one in (a, more[0])]
            return np.maximum(*both).view(np.uint32)
        case "cvt.rn.satfinite.e4m3x2.f32":
            assert not a.any()
            low = torch.from_numpy(np.clip(others[0], -448, 448)).to(torch.float8_e4m3fn)
            return low.view(torch.uint8).numpy().astype(np.uint32)
        case "cvt.u32.u16":
            return a & 0xFFFF
        case "cvt.rn.f16x2.e4m3x2":
            codes = torch.from_numpy((a & 255).astype(np.uint8)).view(torch.float8_e4m3fn)
            return codes.half().numpy().view(np.uint16).astype(np.uint32)
        case "cvt.f32.f16":
            return a.astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
        case "fma.rn.f32":  # in fp64 nothing is rounded that counts
            made = x.astype(np.float64) * others[0] + others[1]
            return made.astype(np.float32).view(np.uint32)
    raise AssertionError(op)


def _picked(a: Words, b: Words, picks: int) -> Words:
    """prmt: four bytes of eight, or their signs all over."""
    parts, word = [one >> 8 * i & 255 for one in (a, b) for i in range(4)], np.zeros_like(a)
    for i in range(4):
        pick = picks >> 4 * i & 15
        byte = np.where(parts[pick & 7] > 127, 255, 0) if pick & 8 else parts[pick]
        word |= (byte << 8 * i).astype(np.uint32)
    return word


@contextmanager
def interpreted(tl: Any, handle: Any) -> Iterator[None]:
    """Triton's interpreter with these instructions: its language, and what holds its tensors."""

    def asm(text: Any, _: Any, args: Any, dtype: Any, *__: Any) -> Any:
        kinds = dtype if isinstance(dtype, tuple) else (dtype,)
        given = np.broadcast_arrays(*(one.handle.data for one in args))
        flat = [np.ascontiguousarray(one).reshape(-1).view(np.uint32) for one in given]
        with np.errstate(all="ignore"):
            outs = run(getattr(text, "value", text), len(kinds), *flat)
        made = []
        for out, kind in zip(outs, kinds, strict=True):
            data = out.view(np.float32 if kind == tl.float32 else np.int32).reshape(given[0].shape)
            made.append(tl.tensor(handle(data, kind), tl.block_type(kind, list(data.shape))))
        return tuple(made) if isinstance(dtype, tuple) else made[0]

    before, tl.inline_asm_elementwise = tl.inline_asm_elementwise, asm
    try:
        yield
    finally:
        tl.inline_asm_elementwise = before
