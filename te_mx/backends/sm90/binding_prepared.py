"""Calls of the adaptive GEMM whose native records are made once."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from te_mx.backends.base import FLOAT_DTYPES, FORMATS, LAYOUTS, pointer
from te_mx.backends.sm90 import binding
from te_mx.dispatch.problem import Problem
from te_mx.layouts.operand import Operand
from te_mx.runtime import workspace

_TILES = LAYOUTS["sm90"]


class Side(NamedTuple):
    """One side of a GEMM: its format in the words of native code, and how its codes lie."""

    fmt: str
    order: str = "sm90"


class Packs(NamedTuple):
    """A side that is packed first: the record of that, and where in the workspace to."""

    side: str
    record: Any
    codes_at: int
    scales_at: int


class PreparedGemm:
    """GEMMs of operands of one size without an epilogue: the records are made once. Operands that
    are not packed yet are packed in the workspace."""

    __slots__ = ("gemm", "index", "native", "nbytes", "own_at", "packs", "record")

    def __init__(self, problem: Problem, lhs: Side, rhs: Side, parts: int, tile: int = -1) -> None:
        m, n, k = problem.m, problem.n, problem.k
        index, native = problem.place.index, binding.native()
        assert native is not None
        self.native, self.gemm, self.index = native, native.gemm, index
        self.record = native.GemmArgs(
            lhs_rows=m, lhs_k=k, lhs_element=FORMATS[lhs.fmt], lhs_layout=_TILES,
            rhs_rows=n, rhs_k=k, rhs_element=FORMATS[rhs.fmt], rhs_layout=_TILES, ldo=n,
            out_dtype=FLOAT_DTYPES[problem.dtype], parts=parts, kernel=tile,
            device=index,
        )  # fmt: skip
        own = self.record.workspace_bytes = native.workspace_bytes(self.record)
        at, packs = 0, []
        for name, side, rows in (("lhs", lhs, m), ("rhs", rhs, n)):
            if side.order != "sm90":
                nbytes, scales_at = native.packed_bytes(rows, k)
                record = native.PackArgs(
                    rows=rows, k=k, element=FORMATS[side.fmt],
                    layout=LAYOUTS[side.order], out_layout=_TILES, spread=problem.spread,
                    device=index,
                )  # fmt: skip
                packs.append(Packs(name, record, at, at + scales_at))
                at += nbytes
        self.packs, self.own_at, self.nbytes = tuple(packs), at, at + own

    def run(self, lhs: Operand, rhs: Operand, out: Tensor, accumulate: bool = False) -> bool:
        """Enqueue out = lhs @ rhs^T, or add that to it; whether native code took it."""
        stream = binding.stream(self.index)
        args = self.record.copy(
            lhs_codes=lhs.codes.data_ptr(), lhs_scales=lhs.scales.data_ptr(),
            rhs_codes=rhs.codes.data_ptr(), rhs_scales=rhs.scales.data_ptr(), out=out.data_ptr(),
            stream=stream, accumulate=accumulate,
        )  # fmt: skip
        nbytes = self.nbytes
        if nbytes == 0:
            return binding.supported(self.gemm(args))
        scratch = workspace.acquire(out.device, nbytes)
        base: int = pointer(scratch)
        for side, record, codes_at, scales_at in self.packs:
            codes, scales = base + codes_at, base + scales_at
            operand = lhs if side == "lhs" else rhs
            pack = record.copy(
                codes=operand.codes.data_ptr(), scales=operand.scales.data_ptr(),
                out_codes=codes, out_scales=scales, stream=stream,
            )  # fmt: skip
            if not binding.supported(self.native.pack(pack)):
                return False
            setattr(args, f"{side}_codes", codes)
            setattr(args, f"{side}_scales", scales)
        args.workspace = base + self.own_at
        done = binding.supported(self.gemm(args))
        workspace.release(scratch, nbytes)
        return done
